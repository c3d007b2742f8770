"""Weights between Hugging Face checkpoints, the trainer's ranks and the engines; here their errors.

Importing this package imports neither torch, Megatron nor vLLM: driver, trainers and engines all use it.
"""

from collections.abc import Sequence

from megatron_ibpo.basics import text

MOST_LISTED = 8
"""Names listed in an error; the rest are only counted."""


class CheckpointError(ValueError):
    """A checkpoint's files or tensors are not what the model needs."""


class WeightMismatchError(RuntimeError):
    """An engine does not have the weights that were sent to it."""


class WeightPlanError(ValueError):
    """The trainer's tensors are not those that the engine's model loads."""


def first_line(error: BaseException) -> str:
    """Return an error's text in one line; its type if it has no text."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def listed(names: Sequence[str]) -> str:
    return text.listed(names, most=MOST_LISTED)
