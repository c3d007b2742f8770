"""Hugging Face checkpoints into Megatron parameters. Each rank reads only what it holds."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_ibpo.shape import ModelShape
from megatron_ibpo.weights.maps import Entry, Piece, is_ignored, weight_map
from megatron_ibpo.weights.place import my_place, parameters_by_global_name

__all__ = ["Checkpoint", "CheckpointError", "load_hf"]

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHOWN = 8
"""Names listed in an error before it only counts."""


class CheckpointError(ValueError):
    """The checkpoint's files or tensors are not what the model needs."""


class Checkpoint:
    """The safetensors files of a directory, opened when first read."""

    def __init__(self, hf_dir: Path):
        """Raises CheckpointError if no weights are there, or files that the index names are missing."""
        self.directory = hf_dir
        self._open: dict[str, Any] = {}
        self.file_of = self._read_index() if (hf_dir / INDEX).exists() else self._read_single()

    def _read_index(self) -> dict[str, str]:
        path = self.directory / INDEX
        try:
            file_of = dict(json.loads(path.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is malformed: {type(error).__name__}: {error}") from None
        missing = sorted({file for file in file_of.values() if not (self.directory / file).is_file()})
        if missing:
            raise CheckpointError(
                f"{self.directory}: {_listed(missing)} named in {INDEX} but not there; download again"
            )
        return file_of

    def _read_single(self) -> dict[str, str]:
        if not (self.directory / SINGLE).is_file():
            raise CheckpointError(f"{self.directory} holds neither {SINGLE} nor {INDEX}")
        return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)

    def _file(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.directory / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{self.directory / file} cannot be read ({error}): truncated or no safetensors file; "
                    "download it again"
                ) from None
        return self._open[file]

    def __contains__(self, piece: Piece) -> bool:
        return self._source(piece) is not None

    def _source(self, piece: Piece) -> str | None:
        """Name under which this checkpoint holds the piece."""
        names = [piece.name] + ([piece.fused.name] if piece.fused else [])
        return next((name for name in names if name in self.file_of), None)

    def read(self, piece: Piece, rank: int, ranks: int) -> Tensor:
        """The cut of `piece` that `rank` of `ranks` holds, in the checkpoint's dtype."""
        name = self._source(piece)
        assert name is not None, f"{piece.name}: presence is checked before reading"
        try:
            tensor = self._file(self.file_of[name]).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.directory}: {name}: {error}") from None
        rows = (0, piece.shape[0])
        fused = piece.fused if name != piece.name else None
        if fused:
            self._check_shape(name, tensor.get_shape()[2:], piece.shape[1:])
            if fused.expert >= tensor.get_shape()[0] or fused.first_row + rows[1] > tensor.get_shape()[1]:
                raise CheckpointError(
                    f"{self.directory}: {name} has shape {tuple(tensor.get_shape())}, "
                    f"which does not hold expert {fused.expert} of shape {piece.shape}"
                )
        else:
            self._check_shape(name, tensor.get_shape(), piece.shape)
        spans = piece.ranges(rank, ranks) if piece.cut else [rows]
        dim = piece.cut.dim if piece.cut else 0
        cuts = [self._cut(tensor, piece, fused, dim, start, length) for start, length in spans]
        return torch.cat(cuts, dim=dim) if len(cuts) > 1 else cuts[0]

    @staticmethod
    def _cut(tensor: Any, piece: Piece, fused: Any, dim: int, start: int, length: int) -> Tensor:
        index = [slice(0, size) for size in piece.shape]
        index[dim] = slice(start, start + length)
        if fused:
            index[0] = slice(fused.first_row + index[0].start, fused.first_row + index[0].stop)
            return tensor[(slice(fused.expert, fused.expert + 1), *index)][0]
        return tensor[tuple(index)]

    def _check_shape(self, name: str, found: Any, wanted: tuple[int, ...]) -> None:
        if tuple(found) != wanted:
            raise CheckpointError(
                f"{self.directory}: {name} has shape {tuple(found)}, config.json asks for {wanted}"
            )


def load_hf(chunks: list[Any], shape: ModelShape, hf_dir: Path, *, head: bool = True) -> None:
    """Fill this rank's parameters from the checkpoint in `hf_dir`, converting to their dtype.

    Args:
        head: False leaves the output layer as it is: a value model has one of its own.

    Raises:
        CheckpointError: a file is missing or truncated, a tensor is missing, superfluous or has another
            shape than config.json says. Everything but shapes is checked before anything is written.
    """
    checkpoint = Checkpoint(hf_dir)
    entries = weight_map(shape)
    _check_names(checkpoint, shape, entries)
    place = my_place(shape)
    with torch.no_grad():
        for name, parameter in parameters_by_global_name(chunks, place):
            if name.startswith("output_layer.") and not head:
                continue
            entry = entries[name]
            cuts = [checkpoint.read(piece, *place.shard(entry)) for piece in entry.pieces]
            shard = entry.join(cuts)
            if shard.shape != parameter.shape:
                raise CheckpointError(f"{name}: {tuple(shard.shape)} read for {tuple(parameter.shape)}")
            parameter.copy_(shard)


def _check_names(checkpoint: Checkpoint, shape: ModelShape, entries: dict[str, Entry]) -> None:
    pieces = [piece for entry in entries.values() for piece in entry.pieces]
    missing = sorted({piece.name for piece in pieces if piece not in checkpoint})
    if missing:
        raise CheckpointError(f"{checkpoint.directory}: missing {_listed(missing)}")
    known = {piece.name for piece in pieces} | {piece.fused.name for piece in pieces if piece.fused}
    unknown = sorted(set(checkpoint.file_of) - known)
    ignored = [name for name in unknown if is_ignored(shape, name)]
    if ignored:
        logger.warning("%s: not part of the policy: %s", checkpoint.directory, _listed(ignored))
    extra = [name for name in unknown if name not in ignored]
    if extra:
        raise CheckpointError(
            f"{checkpoint.directory}: tensors that a {shape.family} model has no place for: {_listed(extra)}"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
