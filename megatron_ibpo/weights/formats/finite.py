"""Checks for NaN and infinity. One NaN in a checkpoint makes every log-prob NaN, and every step is
skipped."""

from pathlib import Path

import torch
from torch import Tensor

from megatron_ibpo.weights.weight_errors import CheckpointError


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite. One pass without memory of its own: minimum and maximum propagate
    NaN."""
    return not tensor.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def check_finite(tensor: Tensor, where: Path, name: str) -> None:
    """
    Raises:
        CheckpointError: `tensor`, called `name` in the file or directory `where`, holds NaN or infinity.
    """
    if tensor.is_floating_point() and not is_finite(tensor):
        raise CheckpointError(
            f"{where}: {name} holds NaN or infinity, with which nothing can be trained; take another copy of "
            "the checkpoint, or an earlier one"
        )
