"""transformers' model of a checkpoint, beside which the trainer's is compared."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch


def transformers_model(hf_dir: Path, dtype: torch.dtype) -> Any:
    """Return transformers' model of a checkpoint, in plain torch."""
    from transformers import AutoModelForCausalLM  # takes seconds

    return AutoModelForCausalLM.from_pretrained(
        hf_dir, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )


def tensor_per_expert(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield transformers' tensors as checkpoints hold them: experts one by one, but for gpt-oss's, which
    stay together as in transformers."""
    if any(name.endswith("mlp.router.bias") for name in tensors):
        yield from tensors.items()
        return
    for name, tensor in tensors.items():
        if name.endswith(".experts.gate_up_proj"):
            for expert, gate_up in enumerate(tensor):
                for part, half in zip(("gate", "up"), gate_up.chunk(2), strict=True):
                    yield name.replace("gate_up_proj", f"{expert}.{part}_proj.weight"), half
        elif name.endswith(".experts.down_proj"):
            for expert, down in enumerate(tensor):
                yield name.replace("down_proj", f"{expert}.down_proj.weight"), down
        else:
            yield name, tensor
