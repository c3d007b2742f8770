"""A small random model of the same family and shape rules as the run's."""

import shutil
from pathlib import Path
from typing import Any

import torch

from megatron_ibpo.data.tokenizer import TOKENIZER_FILES
from megatron_ibpo.weights.formats.checkpoint_files import has_weights

TINY_BYTES = 64 * 1024**2
"""Weights up to this size are used as they are."""
SPREAD = 0.1
"""Standard deviation of the random weights, with which logits are not flat."""
SMALL: dict[str, int] = {
    "intermediate_size": 192, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 32,
    "linear_num_key_heads": 2, "sliding_window": 24, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
"""Field of config.json → the most of it in the small model."""


def is_tiny(hf_dir: Path) -> bool:
    """Return whether the checkpoint's weights are small enough to be used as they are."""
    files = [*hf_dir.glob("*.safetensors"), *hf_dir.glob("*.bin")]
    return has_weights(hf_dir) and sum(file.stat().st_size for file in files) <= TINY_BYTES


def cut_down(hf_dir: Path, target: Path, seed: int) -> Path:
    """Write a model of the same family with few layers and a small hidden size into `target`, with random
    weights in float32 and the same tokenizer. Return `target`."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig  # take seconds

    config = AutoConfig.from_pretrained(hf_dir).get_text_config()
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the small weights are not packed
    _shrink(config)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dim() == 1 and (tensor.requires_grad or name.endswith("e_score_correction_bias")):
                tensor.add_(torch.randn_like(tensor) * SPREAD / 2)  # constants would hide a mix-up
    if (hf_dir / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(hf_dir)
    model.save_pretrained(target)
    for name in TOKENIZER_FILES:
        if (hf_dir / name).is_file():
            shutil.copyfile(hf_dir / name, target / name)
    return target


def _shrink(config: Any) -> None:
    """Make the sizes small, and keep what decides how a layer is laid out: ratios of heads, experts, ties."""
    groups = max(1, config.num_attention_heads // config.num_key_value_heads)
    keys = min(2, config.num_key_value_heads)
    is_square = _head_dim(config) * config.num_attention_heads == config.hidden_size
    heads = keys * min(groups, 2)
    value_heads = getattr(config, "linear_num_value_heads", 0)
    ratio = value_heads // config.linear_num_key_heads if value_heads else 0
    layers = _num_layers(config)
    for name, most in SMALL.items():
        if isinstance(value := getattr(config, name, None), int):
            setattr(config, name, min(value, most))
    config.num_attention_heads, config.num_key_value_heads = heads, keys
    config.hidden_size = 32 * heads if is_square else 96  # 1, 2 or 4 heads of 32 are never 96
    if value_heads:
        config.linear_num_value_heads = config.linear_num_key_heads * min(ratio, 2)
    config.num_hidden_layers = layers
    config.initializer_range = SPREAD
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    rope = getattr(config, "rope_parameters", None) or {}
    if "mrope_section" in rope:
        eighth = 32 // 8
        rope["mrope_section"] = [eighth - 2 * (eighth // 3), eighth // 3, eighth // 3]


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _num_layers(config: Any) -> int:
    """Return the fewest layers, a multiple of two pipeline stages, that have every kind."""
    kinds = getattr(config, "layer_types", None) or [0]
    last_new = max(kinds.index(kind) for kind in set(kinds)) + 1
    of_kinds = last_new + last_new % 2
    with_dense_start = 4 if getattr(config, "first_k_dense_replace", 0) else 2
    return min(config.num_hidden_layers, max(of_kinds, with_dense_start))
