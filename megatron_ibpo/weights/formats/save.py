"""The export as a Hugging Face checkpoint on disk: all of it, or nothing."""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from torch import Tensor

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.weight_map import Piece
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
from megatron_ibpo.weights.layout.regions import TensorMeta, plan_buckets

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
        digests = _write(chain(export, _read(origin, carried)), files, directory, world)
        if adapters is not None:
            save_peft(adapters, directory / DIRECTORY)
        return digests

    write_directory(out_dir, world, needed, write, finish)


def _read(origin: Checkpoint, carried: list[Piece]) -> Iterator[tuple[str, Tensor]]:
    for piece in carried:
        yield piece.name, origin.read(piece)


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
