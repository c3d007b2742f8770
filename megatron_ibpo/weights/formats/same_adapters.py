"""Comparison of a checkpoint's adapters with a run's: same rank, scale, targets and base."""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_ibpo.config import ModelConfig
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.lora import chosen_lora
from megatron_ibpo.weights.weight_errors import CheckpointError

BLOCKS, BLOCK_BYTES = 256, 64 * 1024
"""Number and size of the evenly spaced blocks that are hashed of a weight file; a small file is read
whole."""


def describe_adapters(model: ModelConfig) -> dict[str, Any] | None:
    """Return the description of a run's adapters for `layout.json`; None if it has none.

    Raises:
        ConfigError: a target that the model lacks.
    """
    if model.lora_rank is None or model.hf_checkpoint is None:
        return None
    lora = chosen_lora(model, read_hf_config(model.hf_checkpoint))
    assert lora is not None
    return {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "targets": list(lora.targets),
        "base": str(model.hf_checkpoint),
        "base_digest": weights_digest(model.hf_checkpoint),
    }


def check_same_adapters(saved: Any, model: ModelConfig, checkpoint: Path) -> None:
    """
    Args:
        saved: entry "lora" of the checkpoint's `layout.json`.

    Raises:
        CheckpointError: training cannot resume with these adapters; says what differs.
    """
    present = describe_adapters(model)
    if saved is None and present is None:
        return
    if present is None:
        raise CheckpointError(
            f"--load {checkpoint}: holds adapters only; resume with its --lora-rank, or start from a "
            "merged export"
        )
    if not isinstance(saved, dict):
        raise CheckpointError(
            f"--load {checkpoint}: holds weights and no adapters; convert it to Hugging Face format and give "
            "that as --hf-checkpoint, or drop --lora-rank"
        )
    flags = {"rank": "--lora-rank", "alpha": "--lora-alpha", "targets": "--lora-targets"}
    for name, flag in flags.items():
        if saved.get(name) != present[name]:
            raise CheckpointError(
                f"--load {checkpoint}: its adapters have {flag} {_format_value(saved.get(name))}, this run "
                f"{_format_value(present[name])}; resume with the same"
            )
    if saved.get("base_digest") != present["base_digest"]:
        raise CheckpointError(
            f"--load {checkpoint}: its adapters belong to the weights that were in {saved.get('base')}, "
            f"but --hf-checkpoint {model.hf_checkpoint} has others"
        )


def _format_value(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


@lru_cache(maxsize=1)  # called for every checkpoint of a run
def weights_digest(hf_dir: Path) -> str:
    """Return a hash that identifies a model's weights, from their files' sizes and evenly spaced blocks.
    Names and places of files do not count, and a change between those blocks goes unseen."""
    digests = sorted(
        _file_digest(path) for path in hf_dir.iterdir() if path.suffix in (".safetensors", ".bin")
    )
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    size, digest = path.stat().st_size, hashlib.sha256()
    digest.update(str(size).encode())
    step = max(BLOCK_BYTES, size // BLOCKS)
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
