"""Checkpoints in Hugging Face format on disk: tensors are read in parts, compared with those that a model
must have, and files are written tensor by tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.basics.user_files import JSON_BYTES, check_user_file, read_json_file
from megatron_ibpo.models import ModelShape
from megatron_ibpo.models.weight_map import (
    HEAD,
    Entry,
    Piece,
    carried_entry,
    embedding_piece,
    is_carried,
    is_ignored,
    mtp_layers,
    weight_map,
)
from megatron_ibpo.weights import CheckpointError, first_line, listed
from megatron_ibpo.weights.formats.checkpoint_files import INDEX, MANIFEST, SINGLE, find_weights
from megatron_ibpo.weights.formats.directories import HashedFile
from megatron_ibpo.weights.formats.mapped_tensors import BLOCKS, SCALES, OpenFiles, PackedSlice
from megatron_ibpo.weights.layout.regions import TensorMeta

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Data types that weights may have, by safetensors' names."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json",
    MANIFEST,
)  # fmt: skip
"""Ends of file names that are not copied along with a checkpoint's configuration and tokenizer."""
_ROWS = 4096
"""Rows of a head that are compared at a time."""


class Checkpoint:
    """The weights in a directory. Files are opened when first read; threads may share it."""

    def __init__(self, hf_dir: Path, *, allow_pickle: bool = False):
        """With `allow_pickle` also read `pytorch_model*.bin`, by torch's weights-only unpickler. Raises
        CheckpointError as `find_weights`."""
        self.directory = hf_dir
        self._files: OpenFiles[Any] = OpenFiles(self._open)
        present, file_of = find_weights(hf_dir, allow_pickle=allow_pickle)
        self._stored_in = (
            dict.fromkeys(self._files.get(present).keys(), present) if file_of is None else file_of
        )
        self.packed = [
            name.removesuffix(BLOCKS)
            for name in self._stored_in
            if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in self._stored_in
        ]
        """Names of tensors in MXFP4, which are read as bfloat16."""
        parts = {name + part for name in self.packed for part in (BLOCKS, SCALES)}
        self.file_of = {name: file for name, file in self._stored_in.items() if name not in parts}
        self.file_of |= {name: self._stored_in[name + BLOCKS] for name in self.packed}

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of its tensors."""
        return iter(self.file_of)

    def _open(self, file: str) -> Any:
        path = self.directory / file
        try:
            return _PickledFile(path) if path.suffix == ".bin" else safe_open(path, framework="pt")
        except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({first_line(error)}): it is truncated or not a weights file; "
                "download it again"
            ) from None

    def _source(self, piece: Piece) -> str | None:
        """Return the name under which this checkpoint holds the piece."""
        names = (piece.name, piece.fused.name) if piece.fused else (piece.name,)
        return next((name for name in names if name in self.file_of), None)

    def _reader_of(self, piece: Piece) -> tuple[str, Any]:
        """Return (name, reader) of a piece that `check` has found."""
        name = self._source(piece)
        assert name is not None, f"{piece.name}: presence is checked before reading"
        return name, self._slice(name)

    def _slice(self, name: str) -> Any:
        if name not in self.packed:
            return self._stored_slice(name)
        try:
            return PackedSlice(self._stored_slice(name + BLOCKS), self._stored_slice(name + SCALES))
        except ValueError as error:
            raise CheckpointError(
                f"{self.directory / self.file_of[name]}: {name} is not in MXFP4 as its name says: {error}"
            ) from None

    def _stored_slice(self, name: str) -> Any:
        file = self._stored_in[name]
        try:
            return self._files.get(file).get_slice(name)
        except (SafetensorError, KeyError) as error:
            raise CheckpointError(
                f"{self.directory / file}: {name} is missing, although the index names it ({error})"
            ) from None

    def refuse_packed(self) -> None:
        """Raise CheckpointError if some of it is in MXFP4: engines that load the same files would hold MXFP4,
        and could not take the trained weights."""
        if self.packed:
            raise CheckpointError(
                f"{self.directory} holds {listed(sorted(self.packed))} in MXFP4, which cannot be trained; "
                "make a bfloat16 checkpoint of it with `ibpo convert to-megatron` and then `convert to-hf`"
            )

    def check(self, shape: ModelShape, entries: Iterable[Entry]) -> list[str]:
        """Compare names, shapes and dtypes with the model's; reads only headers, except for a head that must
        equal the embedding. Return the tensors that `is_ignored` leaves out. Raises CheckpointError if a
        tensor is missing, superfluous, or has another shape, dtype or values than config.json and the formats
        here allow."""
        pieces = {piece.name: piece for entry in entries for piece in entry.pieces}
        missing = sorted(name for name, piece in pieces.items() if self._source(piece) is None)
        if missing:
            untied = self._why_untied() if missing == [HEAD] else ""
            raise CheckpointError(f"{self.directory}: missing {listed(missing)}{untied}")
        unknown = sorted(self.file_of.keys() - {self._source(piece) for piece in pieces.values()})
        ignored = [name for name in unknown if is_ignored(shape, name)]
        if extra := [name for name in unknown if not is_ignored(shape, name)]:
            raise CheckpointError(
                f"{self.directory}: tensors that a {shape.family} model has no place for: {listed(extra)}"
            )
        for piece in pieces.values():
            self._check_tensor(piece)
        if shape.tie_word_embeddings and HEAD in self.file_of:
            self._check_tied_head(shape)
        return ignored

    def _why_untied(self) -> str:
        """Return the reason for which the head must be there, for a message."""
        config = read_json_file(self.directory / "config.json")
        inner = config.get("text_config")
        if any("tie_word_embeddings" in raw for raw in (config, inner) if isinstance(raw, dict)):
            return "; config.json says tie_word_embeddings=false"
        return (
            "; config.json has no tie_word_embeddings, which means false: add it as true if the head is the "
            "embedding"
        )

    def _check_tied_head(self, shape: ModelShape) -> None:
        """Check that a stored head equals the embedding that takes its place."""
        embedding = embedding_piece(shape)
        head = replace(embedding, name=HEAD)
        self._check_tensor(head)
        for start in range(0, shape.vocab_size, _ROWS):
            rows = [(start, min(_ROWS, shape.vocab_size - start))]
            if not torch.equal(self._read(embedding, rows).float(), self._read(head, rows).float()):
                raise CheckpointError(
                    f"{self.directory}: config.json says tie_word_embeddings=true, but {HEAD} is not "
                    f"{embedding.name}: a model with a head of its own says false"
                )

    def _check_tensor(self, piece: Piece) -> None:
        name, reader = self._reader_of(piece)
        expected = piece.fused.shape if piece.fused and name == piece.fused.name else piece.shape
        if tuple(reader.get_shape()) != expected:
            raise CheckpointError(
                f"{self.directory / self.file_of[name]}: {name} has shape {tuple(reader.get_shape())}, "
                f"config.json asks for {expected}"
            )
        if reader.get_dtype() not in DTYPES:
            raise CheckpointError(
                f"{self.directory / self.file_of[name]}: {name} is {reader.get_dtype()}; "
                f"weights must be one of {', '.join(DTYPES)}"
            )

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def carried(self, shape: ModelShape) -> list[Piece]:
        """Return the tensors that are kept and not trained."""
        return [Piece(name, self.shape_of(name)) for name in sorted(self.file_of) if is_carried(shape, name)]

    def dtype(self, piece: Piece) -> torch.dtype:
        return DTYPES[self._reader_of(piece)[1].get_dtype()]

    def read(self, piece: Piece) -> Tensor:
        """Return a tensor in the checkpoint's dtype. May share memory with the file."""
        return self._read(piece, piece.ranges(0, 1))

    def read_shard(self, entry: Entry, rank: int, ranks: int) -> list[Tensor]:
        """Return the shard of `rank` of `ranks` of each of the entry's pieces, as `read` gives it."""
        return [
            self._read(piece, entry.ranges(number, rank, ranks)) for number, piece in enumerate(entry.pieces)
        ]

    def _read(self, piece: Piece, ranges: list[tuple[int, int]]) -> Tensor:
        name, tensor = self._reader_of(piece)
        fused = piece.fused if name != piece.name else None
        dim = piece.cut.dim if piece.cut else 0
        cuts = []
        for start, length in ranges or [(0, 0)]:
            index = [slice(0, size) for size in piece.shape]
            index[dim] = slice(start, start + length)
            if fused:
                index[0] = slice(fused.first_row + index[0].start, fused.first_row + index[0].stop)
                cuts.append(tensor[(slice(fused.expert, fused.expert + 1), *index)][0])
            else:
                cuts.append(tensor[tuple(index)])
        self._files.count(sum(cut.nbytes for cut in cuts))
        return torch.cat(cuts, dim=dim) if len(cuts) > 1 else cuts[0]


class _PickledFile:
    """A file of tensors saved by `torch.save`, with safe_open's methods."""

    def __init__(self, path: Path):
        self._tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        values = self._tensors.values() if isinstance(self._tensors, dict) else [self._tensors]
        if strays := [type(value).__name__ for value in values if not isinstance(value, Tensor)]:
            raise OSError(f"expected a dictionary of tensors, found a {strays[0]}")

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> _PickledSlice:
        return _PickledSlice(self._tensors[name])


class _PickledSlice:
    def __init__(self, tensor: Tensor):
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return DTYPE_NAMES.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


# ---------------------------------------------------------------------------------------------------- writing


class SafetensorsFile:
    """A safetensors file. Its tensors are announced first and then written in the announced order, so that
    only one must be in memory at a time."""

    def __init__(self, path: Path, metas: Iterable[TensorMeta]):
        metas = list(metas)
        self._expected = iter(metas)
        self._begun: TensorMeta | None = None
        self._rows = 0
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for meta in metas:
            span = [end, end := end + meta.num_bytes]
            header[meta.name] = {"dtype": DTYPE_NAMES[meta.dtype], "shape": meta.shape, "data_offsets": span}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = HashedFile(path)
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, *parts: Tensor) -> None:
        """Write the next tensor, or the next rows of it: parts of consecutive rows, in one call or in
        several."""
        meta = next(self._expected) if self._begun is None else self._begun
        self._rows += sum(part.shape[0] for part in parts)
        self._begun = meta if self._rows < meta.shape[0] else None
        rows = meta.shape[0] if self._begun else self._rows
        written = TensorMeta(name, parts[0].dtype, (rows, *parts[0].shape[1:]))
        assert written == meta, f"{meta} was announced, {written} is written"
        if self._begun is None:
            self._rows = 0
        for part in parts:
            raw = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._file.write(raw.numpy().data)

    def close(self) -> str:
        """Close the file; return its digest."""
        unwritten = self._begun or next(self._expected, None)
        assert unwritten is None, f"{unwritten} was announced and not written"
        return self._file.close()


def file_names(count: int) -> list[str]:
    """Return the names of a checkpoint's `count` weight files."""
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def write_index(directory: Path, files: dict[str, list[TensorMeta]]) -> None:
    """Write the index of a checkpoint's weight files; a single file needs none."""
    if len(files) == 1:
        return
    index = {
        "metadata": {"total_size": sum(meta.num_bytes for metas in files.values() for meta in metas)},
        "weight_map": {meta.name: file for file, metas in files.items() for meta in metas},
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2))


def copy_all_but_weights(origin: Path, target: Path, dtype: torch.dtype) -> None:
    """Copy the configuration, tokenizer and all else beside the weights. config.json then names `dtype` and
    no quantization, which is never written."""
    for path in sorted(origin.iterdir()):
        if not path.is_dir() and not path.name.endswith(WEIGHTS):
            check_user_file(path, JSON_BYTES)
            shutil.copyfile(path, target / path.name)
    config = read_json((target / "config.json").read_bytes())
    inner = config.get("text_config")
    for named in (config, inner) if isinstance(inner, dict) else (config,):
        named.pop("torch_dtype", None)  # its name before transformers 5
        named.pop("quantization_config", None)
        named["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


class Tensors(Protocol):
    """A checkpoint of either format."""

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of its tensors."""

    def shape_of(self, name: str) -> tuple[int, ...]: ...


def model_entries(shape: ModelShape, tensors: Tensors, vocab_rows: int | None = None) -> list[Entry]:
    """Return the entries that a checkpoint with these tensors must hold, every HF tensor once; `vocab_rows`
    as in `weight_map`. Raises CheckpointError if it has more multi-token prediction layers than can be
    converted."""
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


def check_checkpoint(hf_dir: Path, shape: ModelShape, *, trains: bool = True) -> None:
    """Compare the tensors of a checkpoint with the model of its config.json, before allocating memory for
    them. Raises CheckpointError as `Checkpoint.check` does, and if it `trains` for weights in MXFP4."""
    checkpoint = Checkpoint(hf_dir)
    if trains:
        checkpoint.refuse_packed()
    checkpoint.check(shape, model_entries(shape, checkpoint))
