"""Keep one GPU's machine code in a CUDA library. All other code becomes zeros, which compress to nothing.

The library's size, headers and host code stay as they are. A fat binary holds an entry per GPU, and the
driver reads an entry's payload only if its header names the GPU. PTX, which the driver compiles for other
GPUs, is dropped, too: a kernel without machine code for the chosen GPU fails when it is launched.

NOT RUN: no slimmed library has been loaded on a GPU yet.
"""

import re
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

SECTION = b".nv_fatbin"
MAGIC = 0xBA55ED50
MACHINE_CODE = 2  # kind of an entry; 1 is PTX
HOPPER = 90  # H100 and H200
FLASH_ATTENTION_3 = re.compile(
    rb"CollectiveMainloopFwdSm90\w*?ELi(\d+)ENS_\d+(\w+?_t)EfNS_4arch4Sm90ELb\dELb\dELb(\d)"
)  # a kernel's head size, type of elements, and whether it caps scores
Choice = Callable[[bytes], bool]


class Entry(NamedTuple):
    kind: int
    architecture: int  # 90 for sm_90
    start: int  # of its payload, in the file
    size: int


class Slimmed(NamedTuple):
    library: bytes
    kept_bytes: int  # of GPU code
    zeroed_bytes: int


def slim(library: bytes, wanted: Choice | None = None, architecture: int = HOPPER) -> Slimmed:
    """Keep the machine code of one architecture, and of that only the entries whose code `wanted` chooses.

    Raises:
        ValueError: the library is no 64-bit ELF file, is damaged, or has no such code.
    """
    slimmed = bytearray(library)
    kept = zeroed = 0
    for entry in entries(library):
        end = entry.start + entry.size
        fits = entry.kind == MACHINE_CODE and entry.architecture == architecture
        if fits and (wanted is None or wanted(library[entry.start : end])):
            kept += entry.size
        else:
            slimmed[entry.start : end] = bytes(entry.size)
            zeroed += entry.size
    if not kept:
        raise ValueError(f"no machine code for sm_{architecture}")
    return Slimmed(bytes(slimmed), kept, zeroed)


def entries(library: bytes) -> Iterator[Entry]:
    """Yield the entries of all fat binaries of a library."""
    try:
        for start, end in _fat_binaries(library):
            while start < end:
                kind, _, header, size = struct.unpack_from("<HHIQ", library, start)
                (architecture,) = struct.unpack_from("<I", library, start + 28)
                if start + header + size > end:
                    raise ValueError(f"the entry at byte {start} ends outside its fat binary")
                yield Entry(kind, architecture, start + header, size)
                start += header + size
    except struct.error as error:
        raise ValueError(f"damaged: {error}") from error


def _fat_binaries(library: bytes) -> Iterator[tuple[int, int]]:
    """Yield the bounds of each fat binary's entries."""
    for start, size in _sections(library, SECTION):
        end = start + size
        while start + 16 <= end:
            magic, _, header, length = struct.unpack_from("<IHHQ", library, start)
            if magic != MAGIC:
                start += 8  # between two of them is padding
                continue
            yield start + header, start + header + length
            start += header + length


def _sections(library: bytes, name: bytes) -> Iterator[tuple[int, int]]:
    """Yield offset and size of an ELF file's sections of this name."""
    if library[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    row_size, count, names_row = struct.unpack_from("<HHH", library, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", library, table + row * row_size) for row in range(count)]
    names = rows[names_row][4]
    for row in rows:
        start = names + row[0]
        if library[start : library.index(b"\0", start)] == name:
            yield row[4], row[5]


def flash_attention_3(head_sizes: frozenset[int], element: bytes = b"bfloat16_t") -> Choice:
    """Choose FlashAttention 3's kernels for these head sizes without capped scores, and all its helpers."""

    def is_wanted(code: bytes) -> bool:
        kernels = set(FLASH_ATTENTION_3.findall(code))
        if not kernels:
            return b"FlashAttnFwdSm90" not in code
        return any((int(size), kind, cap) in wanted for size, kind, cap in kernels)

    wanted = {(size, element, b"0") for size in head_sizes}
    return is_wanted
