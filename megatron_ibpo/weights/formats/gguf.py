"""Conversion of GGUF files (llama.cpp's format) to Hugging Face checkpoints. Needs the package gguf.

The header is read here within the bounds of the file: libraries trust its lengths and counts.
"""

import mmap
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.families import FAMILIES
from megatron_ibpo.weights.formats.directories import publish
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


LONGEST = 300
"""Characters kept of another library's message."""
SIZES = ("vocab_size", "hidden_size", "intermediate_size")
"""Fields of a model's configuration that give the size of some tensor."""


def gguf_to_hf(gguf: Path, target: Path) -> None:
    """Write a GGUF file as a Hugging Face checkpoint with tokenizer and chat template, in float32: quantized
    weights are dequantized.

    transformers does the reading, since it knows the names and the order of each architecture. It trusts the
    file's sizes and allocates memory for them, so they are compared with the file first.

    Raises:
        CheckpointError: the file is not there or does not hold all of a model, or gguf is not installed.
        FileExistsError: `target` exists.
    """
    if not gguf.is_file():
        raise CheckpointError(f"no file {gguf}")
    if target.exists():
        raise FileExistsError(f"{target} exists already; remove it, or name another directory")
    try:
        model, tokenizer = _read(gguf)
    except CheckpointError as error:
        raise CheckpointError(f"{gguf}: {error}") from error
    except ImportError as error:
        raise CheckpointError(f"{gguf} cannot be read: {error}") from None
    except Exception as error:  # damaged bytes make transformers raise nearly anything
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}"
        raise CheckpointError(
            f"{gguf} cannot be read; it is damaged, or of a kind that transformers does not know: {said}"
        ) from error
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        if model.config.model_type in FAMILIES:
            read_hf_config(partial)
        publish(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read(gguf: Path) -> tuple[Any, Any]:
    """Return (model, tokenizer)."""
    header = read_header(gguf)
    _check_merges(header)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    _check_sizes(config, header)
    with torch.device("meta"):
        needed = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if needed > header.elements:
        raise CheckpointError(
            f"it describes a model of {needed:,} parameters, holds {header.elements:,}: weights are missing"
        )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    read = load_gguf_checkpoint(
        str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
    )
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise CheckpointError(f"missing {sorted(set(missing) - tied)}, unknown {sorted(unexpected)}")
    model.tie_weights()
    return model, tokenizer


def _check_sizes(config: Any, header: Header) -> None:
    """
    Raises:
        CheckpointError: the model would be larger than the file's tensors.
    """
    layers = len({name.split(".")[1] for name in header.shapes if name.startswith("blk.")})
    if (described := getattr(config, "num_hidden_layers", 0)) > layers:
        raise CheckpointError(f"it describes {described} layers and holds {layers}")
    largest = max((size for shape in header.shapes.values() for size in shape), default=0)
    for name in SIZES:
        if (size := getattr(config, name, 0)) > largest:
            raise CheckpointError(f"{name} is {size}, and no tensor is that large")


def _check_merges(header: Header) -> None:
    """
    Raises:
        CheckpointError: a merge gives no token of the vocabulary; the tokenizer's own code would crash on it.
    """
    tokens = set(header.fields.get("tokenizer.ggml.tokens", ()))
    for merge in header.fields.get("tokenizer.ggml.merges", ()):
        if merge.replace(" ", "", 1) not in tokens or not tokens.issuperset(merge.split(" ", 1)):
            raise CheckpointError(f"its tokenizer has the merge {merge!r}, which gives no token")
