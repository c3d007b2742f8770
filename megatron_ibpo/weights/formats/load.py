"""Hugging Face checkpoints into Megatron parameters. Each rank reads only what it holds."""

import logging
from pathlib import Path
from typing import Any

import torch

from megatron_ibpo.models import ModelShape
from megatron_ibpo.models.weight_map import weight_map
from megatron_ibpo.weights.errors import listed
from megatron_ibpo.weights.formats.finite import check_finite
from megatron_ibpo.weights.formats.hugging_face import Checkpoint
from megatron_ibpo.weights.layout.holdings import (
    layers_of,
    my_holding,
    parameters_by_global_name,
    vocab_rows_of,
)

logger = logging.getLogger(__name__)


def load_hf(chunks: list[Any], shape: ModelShape, hf_dir: Path, *, head: bool = True) -> None:
    """Fill this rank's parameters from the checkpoint in `hf_dir`, converting to their dtype. Rows that pad
    the vocabulary become 0.

    Args:
        head: False leaves the output layer as it is: a value model has one of its own.

    Raises:
        CheckpointError: a file is missing or truncated, a tensor is missing, superfluous or has another
            shape than config.json says, or is no floating-point tensor: nothing is written then. Or a tensor
            holds NaN or infinity.
    """
    checkpoint = Checkpoint(hf_dir)
    holding = my_holding(shape, layers_of(chunks), vocab_rows_of(chunks))
    entries = weight_map(shape, vocab_rows=holding.vocab_rows)
    if ignored := checkpoint.check(shape, entries.values()):
        logger.warning("%s: not part of the policy: %s", hf_dir, listed(ignored))
    with torch.no_grad():
        for name, parameter in parameters_by_global_name(chunks, holding):
            if name.startswith("output_layer.") and not head:
                continue
            entry = entries[name]
            cuts = checkpoint.read_shard(entry, *holding.shard(entry))
            for piece, cut in zip(entry.pieces, cuts, strict=True):
                check_finite(cut, hf_dir, piece.name)
            shard = entry.assemble(cuts, *holding.shard(entry))
            rows = len(parameter) - entry.padding(*holding.shard(entry))
            assert shard.shape == parameter[:rows].shape, f"{name}: {shard.shape} read for {parameter.shape}"
            parameter[:rows].copy_(shard)
            parameter[rows:].zero_()
