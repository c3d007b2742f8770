"""Hugging Face checkpoints into Megatron models. Each rank reads only what it holds."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ibpo.models import ModelShape
from megatron_ibpo.models.weight_map import Entry, mtp_layers, weight_map
from megatron_ibpo.weights.formats.hugging_face import Checkpoint
from megatron_ibpo.weights.layout.holdings import (
    Holding,
    layers_of,
    my_holding,
    named_globally,
    vocab_rows_of,
    weights_by_global_name,
)
from megatron_ibpo.weights.weight_errors import CheckpointError, listed

logger = logging.getLogger(__name__)


def load_hf(chunks: list[Any], shape: ModelShape, hf_dir: Path, *, head: bool = True) -> None:
    """Fill this rank's parameters, and buffers that are weights, from the checkpoint in `hf_dir`, cast to
    their dtype. Rows that pad the vocabulary become 0.

    Args:
        head: False leaves the output layer as it is: a value model has one of its own.

    Raises:
        CheckpointError: a file is missing or truncated, or a tensor is missing, superfluous, of another shape
            than config.json says, in MXFP4 or not floating-point: nothing is written then. Or a tensor holds
            NaN or infinity.
    """
    checkpoint = Checkpoint(hf_dir)
    checkpoint.refuse_packed()
    holding = my_holding(shape, layers_of(chunks), vocab_rows_of(chunks))
    entries = weight_map(shape, vocab_rows=holding.vocab_rows)
    if ignored := checkpoint.check(shape, entries.values()):
        logger.warning("%s: not part of the policy: %s", hf_dir, listed(ignored))
    weights = weights_by_global_name(chunks, holding)
    named = ((name, weight) for name, weight in weights if head or not name.startswith("output_layer."))
    _fill(named, entries, checkpoint, holding)


def load_mtp(model: Any, policy: list[Any], shape: ModelShape, hf_dir: Path) -> None:
    """Fill this rank's part of the multi-token prediction layer from the checkpoint in `hf_dir`.

    Args:
        model: result of `policy.mtp.build_mtp`.
        policy: result of `build_model`.

    Raises:
        CheckpointError: see `load_hf`; or the checkpoint has no such layer, or several.
    """
    checkpoint = Checkpoint(hf_dir)
    layers = mtp_layers(checkpoint)
    if layers != 1:
        raise CheckpointError(
            f"{hf_dir} holds {layers} multi-token prediction layers (mtp.layers.*), but --mtp-num-layers "
            "1 trains exactly one; leave the flag out, or take a checkpoint with one"
        )
    holding = my_holding(shape, layers_of(policy), vocab_rows_of(policy))
    entries = weight_map(shape, 1, holding.vocab_rows)
    checkpoint.check(shape, entries.values())
    _fill(named_globally(model, 0, holding), entries, checkpoint, holding)


@torch.no_grad()
def _fill(
    weights: Iterable[tuple[str, Tensor]],
    entries: Mapping[str, Entry],
    checkpoint: Checkpoint,
    holding: Holding,
) -> None:
    """
    Args:
        weights: parameters, with their names in the whole model.
    """
    for name, weight in weights:
        entry = entries[name]
        cuts = checkpoint.read_shard(entry, *holding.shard(entry))
        for piece, cut in zip(entry.pieces, cuts, strict=True):
            check_finite(cut, checkpoint.directory, piece.name)
        shard = entry.assemble(cuts, *holding.shard(entry))
        rows = len(weight) - entry.padding(*holding.shard(entry))
        assert shard.shape == weight[:rows].shape, f"{name}: {shard.shape} read for {weight.shape}"
        weight[:rows].copy_(shard)
        weight[rows:].zero_()


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite. One pass without memory of its own: minimum and maximum propagate
    NaN."""
    return not tensor.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def check_finite(tensor: Tensor, source: Path, name: str) -> None:
    """Refuse a tensor with NaN or infinity: one NaN makes every log-prob NaN, and every step is skipped.

    Raises:
        CheckpointError: `tensor`, called `name` in the file or directory `source`, holds NaN or infinity.
    """
    if tensor.is_floating_point() and not is_finite(tensor):
        raise CheckpointError(
            f"{source}: {name} holds NaN or infinity; take another copy of the checkpoint, or an earlier one"
        )
