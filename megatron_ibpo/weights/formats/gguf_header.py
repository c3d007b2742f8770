"""The header of a GGUF file, read within the bounds of the file: libraries trust its lengths and counts."""

import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from megatron_ibpo.weights.weight_errors import CheckpointError

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
TEXT, ARRAY = 8, 9
LONGEST_ARRAY = 2**22
"""Most entries of an array: several times the largest vocabularies."""
MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class Header:
    """Fields and tensors that a GGUF file declares."""

    fields: Mapping[str, Any]
    shapes: Mapping[str, Sequence[int]]
    """Tensor → sizes, the innermost first."""

    @property
    def elements(self) -> int:
        return sum(map(prod, self.shapes.values()))


def read_header(path: Path) -> Header:
    """
    Raises:
        CheckpointError: not a GGUF file, a truncated one, or one that describes more than it holds.
        UnicodeDecodeError, ValueError: a name is not text, or a tensor's type is unknown.
        ImportError: gguf is not installed.
    """
    if path.stat().st_size < len(MAGIC):
        raise CheckpointError("it is not a GGUF file: it is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(data).header()


class _Reader:
    """A reader of consecutive values in a file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def header(self) -> Header:
        if (magic := self._take(4)) != MAGIC:
            raise CheckpointError(f"it is not a GGUF file: it begins with {magic!r}")
        if (version := self._number("I")) not in VERSIONS:
            raise CheckpointError(
                f"it has version {version} of the format, or is big-endian; 2 and 3 are read"
            )
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._text()
            fields[name] = self._value(self._number("I"))
        places = {self._text(): self._tensor() for _ in range(num_tensors)}
        alignment = fields.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        for name, (_, end) in places.items():
            if start + end > len(self._data):
                raise CheckpointError(f"tensor {name[:60]} goes beyond the end of the file")
        return Header(fields, {name: shape for name, (shape, _) in places.items()})

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise CheckpointError(f"it is cut off, or a length at byte {self._at} is wrong")
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))[0]

    def _text(self) -> str:
        return self._take(self._number("Q")).decode()

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == TEXT:
            return self._text()
        if kind != ARRAY:
            raise CheckpointError(f"it has a value of type {kind}, which GGUF does not know")
        item, count = self._number("I"), self._number("Q")
        if count > LONGEST_ARRAY or item == ARRAY:
            raise CheckpointError(f"it has a list of {count:,} entries of type {item}")
        return [self._value(item) for _ in range(count)]

    def _tensor(self) -> tuple[list[int], int]:
        """Return (the tensor's sizes, the offset after the header at which it ends)."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        if not 1 <= (dimensions := self._number("I")) <= MOST_DIMENSIONS:
            raise CheckpointError(f"it has a tensor of {dimensions} dimensions")
        shape = [self._number("Q") for _ in range(dimensions)]
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self._number("I"))]
        if prod(shape) % block:
            raise CheckpointError(f"it has a tensor of sizes {shape} in blocks of {block}")
        return shape, self._number("Q") + prod(shape) // block * size
