"""The content of checkpoints' files: tensors saved by `torch.save` inside a larger file, as views of the
mapped file (`torch.load` maps whole files only, and otherwise copies to fresh memory); weights in MXFP4; and
the check of a Megatron checkpoint's pickles, before anything else reads them."""

from __future__ import annotations

import argparse
import io
import mmap
import pickle
import re
import signal
import threading
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from numpy._core.multiarray import _reconstruct
from torch import Tensor

from megatron_ibpo.basics.user_files import RECORD_BYTES, check_user_file, read_user_file
from megatron_ibpo.weights import CheckpointError, listed

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

MAPPED_BYTES = 64 * 1024**2
"""Bytes read from files before they are unmapped: pages that were read count as this process's memory."""
LOCAL_HEADER_BYTES = 30
STORAGES = {"BFloat16Storage": torch.bfloat16, "HalfStorage": torch.float16, "FloatStorage": torch.float32}


File = TypeVar("File")


class OpenFiles(Generic[File]):
    """Files that each thread opens for itself when it first reads them."""

    def __init__(self, open_file: Callable[[str], File]):
        self._open_file = open_file
        self._own = threading.local()

    def get(self, name: str) -> File:
        files: dict[str, File] = self._own.__dict__.setdefault("files", {})
        if name not in files:
            files[name] = self._open_file(name)
        return files[name]

    def count(self, num_bytes: int) -> None:
        """Count bytes read from a file. Now and then all files are closed; each is unmapped when its last
        view goes."""
        read = getattr(self._own, "bytes", 0) + num_bytes
        if read > MAPPED_BYTES:
            self._own.files.clear()
            read = 0
        self._own.bytes = read


class MappedFiles:
    """Files of a directory, mapped when they are first read. May be shared by threads."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._files = OpenFiles(self._map)

    def tensor(self, file: str, offset: int, length: int) -> Tensor:
        """Return the tensor saved in these bytes, a view of the file. Raises ValueError if the bytes are not
        there, or are not a plainly saved float tensor."""
        mapping = self._files.get(file)
        if offset + length > len(mapping):
            raise ValueError(f"{length} bytes at {offset} wanted, the file ends at {len(mapping)}")
        self._files.count(length)
        window = _Window(mapping, offset, length)
        try:
            archive = zipfile.ZipFile(io.BufferedReader(window))
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if any(info.compress_type != zipfile.ZIP_STORED for info in records.values()):
                raise ValueError("the tensor is compressed")  # its size is unbounded
            described = _Description(io.BytesIO(archive.read(records["data.pkl"]))).load()
            data = records[f"data/{described.key}"]
            if archive.read(records["byteorder"]) != b"little":
                raise ValueError("the tensor is big-endian")
            itemsize = described.dtype.itemsize
        except Exception as error:  # damaged bytes make zipfile and pickle raise nearly anything
            raise ValueError(f"not a saved tensor: {type(error).__name__}: {error}") from None
        header = mapping[offset + data.header_offset : offset + data.header_offset + LOCAL_HEADER_BYTES]
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = offset + data.header_offset + LOCAL_HEADER_BYTES + names
        if start + data.file_size > offset + length:
            raise ValueError("the tensor's bytes go beyond its place")
        count = data.file_size // itemsize
        flat = torch.frombuffer(mapping, dtype=described.dtype, count=count, offset=start)
        return flat.as_strided(described.size, described.stride, described.first)

    def _map(self, file: str) -> mmap.mmap:
        check_user_file(self.directory / file)
        with (self.directory / file).open("rb") as opened:
            # private, because torch wants writable memory; the file is never written
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)


class _Window(io.RawIOBase):
    """A part of a mapped file as a file of its own."""

    def __init__(self, mapping: mmap.mmap, offset: int, length: int):
        self._mapping, self._offset, self._length = mapping, offset, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {0: 0, 1: self._position, 2: self._length}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        first = self._offset + self._position
        data = self._mapping[first : min(first + len(buffer), self._offset + self._length)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class _Plain:
    """The description of a tensor in a pickle."""

    def __init__(self, storage: tuple[str, torch.dtype], first: int, size: Any, stride: Any, *_: Any):
        (self.key, self.dtype), self.first, self.size, self.stride = storage, first, size, stride


class _Description(pickle.Unpickler):
    """An unpickler for the description of a plain tensor, without its data; it refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Plain
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> tuple[str, torch.dtype]:
        _, dtype, key, *_ = pid
        return key, dtype


# ------------------------------------------------------------------------------------------------------ MXFP4
#
# 4-bit numbers, in groups of 32 that share a power of two ("OCP Microscaling Formats (MX) Specification",
# version 1.0, 2023). gpt-oss is published with its experts in it; it is never written.

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors that hold one weight."""
SHARING = 32
"""Numbers that share a scale."""
SCALE_BIAS = 127
"""Bias added to stored scales."""
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits; the highest bit is the sign."""


def dequantised(blocks_XGB: Tensor, scales_XG: Tensor) -> Tensor:
    """Return the numbers in bfloat16, which represents all of them exactly: [..., G * 32].

    Args:
        blocks_XGB: uint8 [..., G, 16], two numbers each, the lower four bits first.
        scales_XG: uint8 [..., G].
    """
    values = torch.tensor([*POSITIVE, *(-value for value in POSITIVE)])
    codes = torch.stack((blocks_XGB & 15, blocks_XGB >> 4), dim=-1).flatten(-2)
    powers = torch.exp2(scales_XG.float() - SCALE_BIAS)
    return (values[codes.int()] * powers.unsqueeze(-1)).flatten(-2).bfloat16()


class PackedSlice:
    """A tensor [experts, in, out] with the methods of safetensors' slices. Its two parts are stored in a file
    as [experts, out, …]; raises ValueError if they are not two such parts."""

    def __init__(self, blocks: Any, scales: Any):
        self._blocks, self._scales = blocks, scales
        sizes, shared = list(blocks.get_shape()), list(scales.get_shape())
        dtypes = {blocks.get_dtype(), scales.get_dtype()}
        if len(sizes) != 4 or sizes[-1] != SHARING // 2 or shared != sizes[:-1] or dtypes != {"U8"}:
            raise ValueError(f"blocks {sizes} and scales {shared} of {' and '.join(sorted(dtypes))}")

    def get_shape(self) -> list[int]:
        experts, rows, groups, _ = self._blocks.get_shape()
        return [experts, groups * SHARING, rows]

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: tuple[slice, slice, slice]) -> Tensor:
        experts, columns, rows = index
        weights = dequantised(self._blocks[experts, rows], self._scales[experts, rows])
        return weights.transpose(1, 2)[:, columns]


# ---------------------------------------------------------------------------------------------------- pickles
#
# Scalars of the optimizer, the schedule, a tool's arguments, random states and Transformer Engine's
# `_extra_state` are stored as pickles. torch's distributed reader unpickles every entry that `.metadata`
# calls bytes with `weights_only=False`, so a checkpoint could run code. Here torch's restricted unpickler
# reads the same bytes first, and is given the classes that Megatron-LM stores beside tensors and plain
# containers.

_COMMON_FILE = "common.pt"
"""File in which older versions of Megatron keep everything but tensors."""

_HARMLESS: dict[str, Callable[..., Any]] = {
    "_io.BytesIO": io.BytesIO,
    "argparse.Namespace": argparse.Namespace,
    "builtins.bytes": bytes,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy.dtype": np.dtype,
    "numpy.dtypes.UInt32DType": np.dtypes.UInt32DType,
    "numpy.ndarray": np.ndarray,
    "pathlib.PosixPath": PosixPath,
    "pathlib._local.PosixPath": PosixPath,
    "signal.Signals": signal.Signals,
    "torch._C.Generator": torch._C.Generator,
    "types.SimpleNamespace": types.SimpleNamespace,
}
_OF_MEGATRON = (
    "megatron.core.enums.ModelType",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphModule",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.InferenceCudaGraphScope",
)
"""Together, what `megatron.core.safe_globals` allows. By name, since tools run without Megatron."""


class _StandIn:
    """A stand-in for an object of Megatron's; accepts the arguments and state that belong to it."""

    def __new__(cls, *_: Any, **__: Any) -> _StandIn:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def check_byte_entries(directory: Path, metadata: Metadata) -> None:
    """Unpickle everything in `directory`, whose files all exist, that is not a tensor, with an unpickler that
    cannot run code. Raises CheckpointError for an entry that is damaged or needs a class that is not
    allowed."""
    allowed = _HARMLESS | dict.fromkeys(_OF_MEGATRON, _StandIn)
    # pairs: given bare classes, torch would forget at the end those that Megatron has allowed for itself
    with torch.serialization.safe_globals([(allowed_class, name) for name, allowed_class in allowed.items()]):
        for path, entry, data in _entries(directory, metadata):
            try:
                torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            except Exception as error:
                # not torch's advice, which is to allow what was refused
                refused = re.search(r"GLOBAL (\S+)", str(error))
                plain = f"not a pickle of plain data ({type(error).__name__})"
                raise CheckpointError(
                    f"{path}: {entry} is damaged or unsafe, and was not read: "
                    f"{f'it asks for {refused[1]}' if refused else plain}; "
                    "take another copy of the checkpoint, or save it anew without this entry"
                ) from None


def _entries(directory: Path, metadata: Metadata) -> Iterator[tuple[Path, str, bytes]]:
    """Yield file, name and bytes of each pickle."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # half a second

    for index, place in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata.get(index.fqn), TensorStorageMetadata):
            continue  # read with weights_only=True by all readers
        path = directory / place.relative_path
        if place.transform_descriptors:
            raise CheckpointError(
                f"{path}: {index.fqn} is stored through the transforms "
                f"{listed(place.transform_descriptors)}; save the checkpoint without transforms"
            )
        check_user_file(path)
        with path.open("rb") as file:
            file.seek(place.offset)
            yield path, index.fqn, file.read(place.length)
    common = directory / _COMMON_FILE
    if common.is_file():
        yield common, "the common state", read_user_file(common, RECORD_BYTES)
