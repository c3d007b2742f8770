"""Megatron's distributed checkpoints (`torch_dist`) on disk, without Megatron: a directory of `.distcp`
files, each a sequence of `torch.save`d pieces, and `.metadata`, a pickle with the place of every piece of
every tensor. It is read by an unpickler that knows only the classes that belong there: it cannot run code."""

import json
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_ibpo.basics.text import shown
from megatron_ibpo.basics.user_files import RECORD_BYTES, check_user_file, read_json_file
from megatron_ibpo.models.weight_map import Block, Entry
from megatron_ibpo.weights import CheckpointError, first_line, listed
from megatron_ibpo.weights.formats.checkpoint_files import is_inside
from megatron_ibpo.weights.formats.directories import HashedFile, disk_error
from megatron_ibpo.weights.formats.mapped_tensors import MappedFiles, check_byte_entries
from megatron_ibpo.weights.formats.run_state import CONFIG, METADATA
from megatron_ibpo.weights.layout.regions import Box, cut, intersect

COMMON = "common_state/shard_0_1"
"""Key under which megatron-core 0.19 looks for everything but tensors."""
ROWS_MAY_BE_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters with rows beyond the vocabulary, which Megatron saves as it holds them."""

_ALLOWED = {
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


def read_metadata(directory: Path) -> Metadata:
    """Return the directory's `.metadata`, read by a restricted unpickler. Raises CheckpointError if this is
    no torch_dist checkpoint, or its metadata is damaged or asks for code."""
    config = directory / CONFIG
    if not config.is_file() or not (directory / METADATA).is_file():
        if any(directory.glob("mp_rank_*")):
            raise CheckpointError(
                f"{directory} is in Megatron's old format, pickles that can run code when they are read; "
                "load it in Megatron and save it with --ckpt-format torch_dist"
            )
        raise CheckpointError(f"{directory} holds no Megatron checkpoint: no {METADATA} and {CONFIG}")
    try:
        backend = read_json_file(config)["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{config} is malformed: {type(error).__name__}: {error}") from None
    if backend != "torch_dist":
        raise CheckpointError(f"{directory}: format {shown(backend)} is not supported, only torch_dist")
    try:
        check_user_file(directory / METADATA, RECORD_BYTES)
        with (directory / METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except Exception as error:
        raise CheckpointError(
            f"{directory / METADATA} is damaged or unsafe, and was not read: {type(error).__name__}: {error}"
        ) from None
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{directory / METADATA} holds a {type(metadata).__name__}, not metadata")
    try:
        ends = _check_metadata(metadata)
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{directory / METADATA} is malformed: {error}; take another copy of the checkpoint"
        ) from None
    for name, end in ends.items():
        path = directory / name
        if path.is_file() and path.stat().st_size < end:
            raise CheckpointError(
                f"{path} cannot be read, the file is damaged: it ends at byte {path.stat().st_size}, and "
                f"{METADATA} names pieces up to byte {end}; take another copy of the checkpoint"
            )
    return metadata


def _check_metadata(metadata: Metadata) -> dict[str, int]:
    """Check that the metadata describes tensors; return the smallest size in bytes that each file must have.
    The unpickler checks only classes, and a reader allocates as much memory as a piece claims."""
    for key, meta in metadata.state_dict_metadata.items():
        if isinstance(meta, TensorStorageMetadata):
            _check_sizes(key, meta.size)
            if not isinstance(meta.properties.dtype, torch.dtype):
                raise TypeError(f"{key!r} is of {meta.properties.dtype!r}")
            for chunk in meta.chunks:
                _check_sizes(key, chunk.offsets)
                _check_sizes(key, chunk.sizes)
                spans = zip(chunk.offsets, chunk.sizes, meta.size, strict=True)
                if any(offset + size > extent for offset, size, extent in spans):
                    raise ValueError(f"{key!r} of {tuple(meta.size)} has a piece beyond its end")
        elif not isinstance(meta, BytesStorageMetadata):
            raise TypeError(f"{key!r} is a {type(meta).__name__}")
    ends: dict[str, int] = {}
    for index, place in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(place, _StorageInfo):
            raise TypeError("its storage places are malformed")
        if not is_inside(place.relative_path):
            raise ValueError(
                f"{index.fqn!r} should be in {place.relative_path!r}, which is not a file of this directory"
            )
        _check_sizes(index.fqn, (place.offset, place.length))
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    return ends


def _check_sizes(key: object, sizes: Iterable[int]) -> None:
    if not isinstance(key, str) or not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
        raise ValueError(f"{key!r} has sizes {sizes!r}")


class StoredCheckpoint:
    """A torch_dist checkpoint's tensors, read piece by piece. May be shared by threads. Once one exists,
    Megatron may load the directory: all pickles in it were read without running code."""

    def __init__(self, directory: Path):
        """Open the checkpoint. Raises CheckpointError as `read_metadata` and `check_byte_entries` do, or if
        files are missing."""
        self.directory = directory
        self._files = MappedFiles(directory)
        self._metadata = read_metadata(directory)
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: meta
            for key, meta in self._metadata.state_dict_metadata.items()
            if isinstance(meta, TensorStorageMetadata)
        }
        self._chunks = {
            key: {tuple(chunk.offsets): chunk for chunk in meta.chunks} for key, meta in self.tensors.items()
        }
        files = {info.relative_path for info in self._metadata.storage_data.values()}
        missing = sorted(file for file in files if not (directory / file).is_file())
        if missing:
            raise CheckpointError(f"{directory}: {listed(missing)} named in {METADATA} but not there")
        check_byte_entries(directory, self._metadata)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of its tensors."""
        return iter(self.tensors)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].size)

    @property
    def places(self) -> dict[MetadataIndex, _StorageInfo]:
        """File, offset and length of every piece."""
        return self._metadata.storage_data

    def check(self, entries: Iterable[Entry]) -> None:
        """Raise CheckpointError if a tensor is missing or unknown, or differs from the model's in shape or
        dtype."""
        missing, known_keys = [], set()
        for entry in entries:
            dtypes = set()
            for block in entry.blocks():
                if (stored := self._find(block)) is None:
                    missing.append(block.key)
                    continue
                known_keys.add(stored.key)
                self._check_tensor(stored)
                dtypes.add(self.tensors[stored.key].properties.dtype)
            if len(dtypes) > 1:
                raise CheckpointError(
                    f"{self.directory}: the parts of {entry.name} have different types: {dtypes}"
                )
        if missing:
            raise CheckpointError(f"{self.directory}: missing {listed(sorted(set(missing)))}")
        extra = sorted(key for key in self.tensors if key not in known_keys and is_weight(key))
        if extra:
            raise CheckpointError(
                f"{self.directory}: tensors that this model has no place for: {listed(extra)}"
            )

    def check_vocabulary(self, vocab_size: int, keys: Sequence[str] = ROWS_MAY_BE_PADDED) -> None:
        """Raise CheckpointError if embedding or head have fewer rows than the vocabulary; Megatron would add
        0s. `keys` are the tensors that have a row for each token."""
        for key in keys:
            if key in self.tensors and (rows := self.tensors[key].size[0]) < vocab_size:
                raise CheckpointError(
                    f"{self.directory}: {key} has {rows} rows for a vocabulary of {vocab_size}: it is of "
                    "another model"
                )

    def _check_tensor(self, block: Block) -> None:
        meta = self.tensors[block.key]
        shape = tuple(meta.size)
        if shape != block.shape:
            padded = block.key in ROWS_MAY_BE_PADDED and shape[1:] == block.shape[1:]
            if not (padded and shape[0] > block.shape[0]):
                raise CheckpointError(
                    f"{self.directory}: {block.key} has shape {shape}, config.json asks for {block.shape}"
                )
        if meta.properties.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise CheckpointError(
                f"{self.directory}: {block.key} is {meta.properties.dtype}, not bfloat16, float16 or float32"
            )

    def _find(self, block: Block) -> Block | None:
        """Return the block under which it is stored, or None: a homogeneous model's layers may be one tensor
        with a layer axis."""
        if block.key in self.tensors:
            return block
        head, _, suffix = block.key.partition(".layers.")
        layer, _, name = suffix.partition(".")
        key = f"{head}.layers.{name}"
        if head != "decoder" or key not in self.tensors:
            return None
        layers = self.tensors[key].size[0]
        return Block(
            key, (layers, *block.shape), (int(layer), *block.offsets), (1, *block.sizes)
        )  # its shape is checked like any other's

    def dtype(self, block: Block) -> torch.dtype:
        return self.tensors[self._stored_block(block).key].properties.dtype

    def _stored_block(self, block: Block) -> Block:
        stored = self._find(block)
        assert stored is not None, f"{block.key}: presence is checked before reading"
        return stored

    def _exact(self, block: Block) -> ChunkStorageMetadata | None:
        """Return the piece that is exactly the block, if there is one."""
        chunk = self._chunks[block.key].get(block.offsets)
        return chunk if chunk is not None and tuple(chunk.sizes) == block.sizes else None

    def read(self, entry: Entry, out: Tensor | None = None) -> Tensor:
        """Return a parameter over all ranks, read into `out`, contiguous memory of its shape and dtype, or
        into fresh memory. Raises CheckpointError if a piece of it is missing or damaged."""
        blocks = entry.blocks()
        if out is None:
            out = torch.empty(entry.shape, dtype=self.dtype(blocks[0]))
        # an expert's block has one axis more in front
        rows = [block.sizes[int(".experts.experts." in block.key)] for block in blocks]
        for block, part in zip(blocks, out.split(rows), strict=True):
            self._read_block(block, part)
        return out

    def view(self, entry: Entry) -> Tensor | None:
        """Return a parameter as a view of a file; None unless it is stored there in one contiguous piece.
        Raises CheckpointError as `read` does."""
        first, *further_blocks = entry.blocks()
        stored = self._stored_block(first)
        exact = self._exact(stored)
        if further_blocks or exact is None:
            return None
        tensor = self._load(stored.key, exact)
        return tensor.view(entry.shape) if tensor.is_contiguous() else None

    def _read_block(self, block: Block, out: Tensor) -> None:
        stored = self._stored_block(block)
        target, box, covered = out.view(stored.sizes), _box_of(stored), 0
        exact = self._exact(stored)
        for chunk in self._chunks[stored.key].values() if exact is None else [exact]:
            chunk_box = _box_of(chunk)
            if (overlap := intersect(box, chunk_box)) is not None:
                part = cut(target, box, overlap)
                part.copy_(cut(self._load(stored.key, chunk), chunk_box, overlap))
                covered += part.numel()
        if covered != target.numel():
            raise CheckpointError(f"{self.directory}: {METADATA} names no place for parts of {stored.key}")

    def _load(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        """Load a piece as it is stored in the file."""
        place = self._metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
        if place is None:
            raise CheckpointError(f"{self.directory}: {METADATA} names no place for parts of {key}")
        path = self.directory / place.relative_path
        try:
            tensor = self._files.tensor(place.relative_path, place.offset, place.length)
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{path}: {key} cannot be read, the file is damaged: {first_line(error)}"
            ) from None
        expected = self.tensors[key].properties.dtype
        if tensor.shape != chunk.sizes or tensor.dtype != expected:
            raise CheckpointError(f"{path}: {key} is not the tensor that {METADATA} describes")
        return tensor


def is_weight(key: str) -> bool:
    """Return whether a key is a weight, not another part of a training run's state."""
    return (
        not key.startswith(("optimizer.", "chained_", "rng_state", "rerun_state"))
        and "_extra_state" not in key
    )


def _box_of(piece: Block | ChunkStorageMetadata) -> Box:
    return tuple((first, first + size) for first, size in zip(piece.offsets, piece.sizes, strict=True))


# ---------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class Record:
    """The place where a block was written."""

    block: Block
    dtype: torch.dtype
    file: str
    offset: int
    length: int


class DistcpFile:
    """One file of a checkpoint, to which blocks are added."""

    def __init__(self, path: Path):
        self.records: list[Record] = []
        self._file = HashedFile(path)

    def add(self, block: Block, tensor: Tensor) -> None:
        """Add a block; `tensor` holds its elements, contiguous."""
        first = tensor.storage_offset() * tensor.itemsize
        storage = tensor.untyped_storage()[
            first : first + tensor.nbytes
        ]  # else all of a view's storage is saved
        tensor = torch.empty(0, dtype=tensor.dtype).set_(storage).view(block.sizes)
        start = self._file.size
        try:
            torch.save(tensor, self._file)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise disk_error(error) from None
        length = self._file.size - start
        self.records.append(Record(block, tensor.dtype, self._file.path.name, start, length))

    def close(self) -> str:
        """Close the file; return its digest."""
        return self._file.close()


def write_metadata(directory: Path, records: Iterable[Record]) -> dict[str, str]:
    """Write the files that turn `records` into a checkpoint. Returns the digests of files that were
    written."""
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    counts: dict[str, int] = defaultdict(int)
    for record in records:
        block = record.block
        if block.key not in tensors:
            properties = TensorProperties(dtype=record.dtype)
            tensors[block.key] = TensorStorageMetadata(properties, torch.Size(block.shape), [])
        offsets = torch.Size(block.offsets)
        tensors[block.key].chunks.append(ChunkStorageMetadata(offsets, torch.Size(block.sizes)))
        index = MetadataIndex(block.key, offsets, counts[block.key])
        counts[block.key] += 1
        storage[index] = _StorageInfo(record.file, record.offset, record.length)
    common = HashedFile(directory / "common_state.distcp")
    torch.save([{}], common)  # type: ignore[arg-type]
    storage[MetadataIndex(COMMON)] = _StorageInfo(common.path.name, 0, common.size)
    state: dict[str, Any] = {**tensors, COMMON: BytesStorageMetadata()}
    with (directory / METADATA).open("wb") as file:
        pickle.dump(Metadata(state_dict_metadata=state, storage_data=storage), file)
    (directory / CONFIG).write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    return {common.path.name: common.close()}
