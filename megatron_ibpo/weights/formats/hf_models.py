"""Hugging Face checkpoints into Megatron models, and the export back to disk: all of it, or nothing. Each
rank reads only what it holds."""

import logging
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.models import ModelShape, read_hf_config
from megatron_ibpo.models.weight_map import Entry, mtp_layers, weight_map
from megatron_ibpo.weights.formats.directories import write_directory
from megatron_ibpo.weights.formats.hugging_face import (
    Checkpoint,
    SafetensorsFile,
    copy_all_but_weights,
    file_names,
    write_index,
)
from megatron_ibpo.weights.formats.peft import DIRECTORY, Adapters, save_peft
from megatron_ibpo.weights.layout.export import HFExport
from megatron_ibpo.weights.layout.holdings import Holding, my_holding, named_globally, weights_by_global_name
from megatron_ibpo.weights.layout.regions import TensorMeta, plan_buckets
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
    holding = my_holding(shape, chunks)
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
    holding = my_holding(shape, policy)
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
    """Fill the weights, which come with their names in the whole model."""
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
    Raises CheckpointError; `tensor` is called `name` in the file or directory `source`."""
    if tensor.is_floating_point() and not is_finite(tensor):
        raise CheckpointError(
            f"{source}: {name} holds NaN or infinity; take another copy of the checkpoint, or an earlier one"
        )


SHARD_BYTES = 5 * 1000**3
"""Largest safetensors file."""


def save_hf(
    export: HFExport, world: World, out_dir: Path, origin_hf_dir: Path, adapters: Adapters | None = None
) -> None:
    """Write the weights to `out_dir` with the configuration, the tokenizer and the carried, untrained tensors
    of `origin_hf_dir`. Collective.

    The directory is written beside `out_dir` and moved there when complete; it replaces an existing
    `out_dir`. Weights keep the trainer's dtype, which config.json then names; carried tensors keep their own.
    `integrity.json` holds checksums.

    Args:
        adapters: adapters to write for PEFT beside the weights, in a folder; `export` has them merged.

    Raises:
        DiskSpaceError: before anything is written, if the disk cannot hold it.
    """
    origin = Checkpoint(origin_hf_dir)
    exported = {meta.name for meta in export.metadata()}
    carried = [p for p in origin.carried(read_hf_config(origin_hf_dir)) if p.name not in exported]
    metadata = export.metadata() + [
        TensorMeta(piece.name, origin.dtype(piece), piece.shape) for piece in carried
    ]
    groups = plan_buckets(metadata, SHARD_BYTES)
    names = file_names(len(groups))
    files = {name: metadata[group.start : group.stop] for name, group in zip(names, groups, strict=True)}

    def finish(directory: Path, digests: list[dict[str, str]]) -> dict[str, str]:
        copy_all_but_weights(origin_hf_dir, directory, export.dtype)
        write_index(directory, files)
        return digests[0]

    needed = sum(meta.num_bytes for meta in metadata)

    def write(directory: Path) -> dict[str, str]:
        untrained = ((piece.name, origin.read(piece)) for piece in carried)
        digests = _write(chain(export, untrained), files, directory, world)
        if adapters is not None:
            save_peft(adapters, directory / DIRECTORY)
        return digests

    write_directory(out_dir, world, needed, write, finish)


def _write(
    tensors: Iterable[tuple[str, Tensor | None]],
    files: dict[str, list[TensorMeta]],
    directory: Path,
    world: World,
) -> dict[str, str]:
    """Gather and write tensor by tensor, on rank 0. Returns digests by file.

    An error does not end the gathering, in which all ranks take part; it is raised afterwards.
    """
    error: Exception | None = None
    digests: dict[str, str] = {}
    remaining = [(file, meta.name) for file, metas in files.items() for meta in metas]
    writer: SafetensorsFile | None = None
    for (file, name), (gathered, tensor) in zip(remaining, tensors, strict=True):
        if not world.is_rank_0 or error is not None:
            continue
        assert gathered == name
        assert tensor is not None
        try:
            writer = writer or SafetensorsFile(directory / file, files[file])
            writer.write(name, tensor)
            if name == files[file][-1].name:
                digests[file] = writer.close()
                writer = None
        except Exception as caught:
            error = caught
    if error is not None:
        raise error
    return digests
