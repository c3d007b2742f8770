"""The tensors that a checkpoint of a model must hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from megatron_ibpo.models import ModelShape
from megatron_ibpo.models.weight_map import Entry, carried_entry, mtp_layers, weight_map
from megatron_ibpo.weights.formats.hugging_face import Checkpoint
from megatron_ibpo.weights.weight_errors import CheckpointError


class Tensors(Protocol):
    """A checkpoint of either format."""

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of its tensors."""

    def shape_of(self, name: str) -> tuple[int, ...]: ...


def model_entries(shape: ModelShape, tensors: Tensors, vocab_rows: int | None = None) -> list[Entry]:
    """Return the entries that a checkpoint with these tensors must hold, every HF tensor once.

    Args:
        vocab_rows: as in `weight_map`.

    Raises:
        CheckpointError: it has more multi-token prediction layers than can be converted.
    """
    layers = mtp_layers(tensors) if shape.mtp_in_checkpoints else 0
    if layers > 1:
        raise CheckpointError(
            f"mtp.layers.1 to mtp.layers.{layers - 1}: only one multi-token prediction layer can be "
            "converted, since Hugging Face checkpoints have one mtp.fc for all of them"
        )
    entries = weight_map(shape, layers, vocab_rows)
    if shape.tie_word_embeddings:
        del entries["output_layer.weight"]
    carried = sorted(name for name in tensors if name.startswith(shape.carried))
    return [*entries.values(), *(carried_entry(name, tensors.shape_of(name)) for name in carried)]


def check_checkpoint(hf_dir: Path, shape: ModelShape) -> None:
    """Compare the tensors of a checkpoint with the model of its config.json, before allocating memory for
    them.

    Raises:
        CheckpointError: see `Checkpoint.check`.
    """
    checkpoint = Checkpoint(hf_dir)
    checkpoint.check(shape, model_entries(shape, checkpoint))
