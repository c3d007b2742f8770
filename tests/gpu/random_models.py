"""Hugging Face directories with public shapes and random weights, made without transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_ibpo.models import ModelShape, read_hf_config
from megatron_ibpo.weights.layout.export import metadata_of

MODELS = Path(__file__).resolve().parents[2] / "examples/models"


def _published(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODELS / name / "config.json").read_text())
    return config


QWEN3 = _published("qwen3_0_6b")
QWEN3_NEXT = _published("qwen3_next_80b_a3b") | {
    "hidden_size": 1024, "intermediate_size": 2560, "num_hidden_layers": 12, "num_attention_heads": 8,
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "num_experts": 32, "num_experts_per_tok": 4,
}  # fmt: skip
"""About 1B parameters with the proportions of Qwen3-Next-80B-A3B: half its width, a quarter of its layers, a
sixteenth of its experts."""

_TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
}  # fmt: skip
_TINY_NEXT = {
    "linear_key_head_dim": 32, "linear_num_key_heads": 2, "linear_value_head_dim": 32,
    "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {"qwen3": QWEN3, "qwen3_next": QWEN3_NEXT}
TINY_SHAPES = {"qwen3": QWEN3 | _TINY, "qwen3_next": QWEN3_NEXT | _TINY | _TINY_NEXT}  # for two CPU cores


def make_random_model(directory, config, device, dtype, seed=0) -> Path:
    """Write config.json and one file of weights; the same for the same seed on the same kind of device."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    shape = read_hf_config(directory)
    generator = torch.Generator(device).manual_seed(seed)
    sizes = {meta.name: meta.shape for meta in metadata_of(shape, dtype)}
    tensors = {name: _draw(name, size, shape, generator).to(dtype).cpu() for name, size in sizes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _draw(name: str, size: tuple[int, ...], shape: ModelShape, generator: torch.Generator) -> torch.Tensor:
    device = generator.device
    if name.endswith("A_log"):
        return torch.empty(size, device=device).uniform_(1, 16, generator=generator).log()
    if len(size) > 1:
        return torch.empty(size, device=device).normal_(0, shape.initializer_range, generator=generator)
    is_centred = shape.zero_centered_norms and "linear_attn" not in name
    return torch.zeros(size, device=device) if is_centred else torch.ones(size, device=device)
