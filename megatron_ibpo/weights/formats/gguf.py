"""Conversion of GGUF files (llama.cpp's format) to Hugging Face checkpoints. Needs the package gguf."""

import shutil
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.families import FAMILIES
from megatron_ibpo.weights import CheckpointError
from megatron_ibpo.weights.formats.directories import publish
from megatron_ibpo.weights.formats.run_state import partial_of

LONGEST = 300
"""Characters kept of another library's message."""
SIZES = ("vocab_size", "hidden_size", "intermediate_size")
"""Fields of a model's configuration that give the size of some tensor."""


def gguf_to_hf(gguf: Path, target: Path) -> None:
    """Write a GGUF file as a Hugging Face checkpoint with tokenizer and chat template, in float32: quantized
    weights are dequantized. transformers reads the weights, since it knows the names and the order of each
    architecture. It allocates memory for the file's sizes, so they are compared with the file first.

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
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}"
        raise CheckpointError(
            f"{gguf} cannot be read; it is damaged, or of a kind that transformers does not know: {message}"
        ) from error
    partial = partial_of(target)
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
    header = _read_header(gguf)
    _check_merges(header)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    _check_sizes(config, header)
    with torch.device("meta"):
        needed = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    stored = sum(prod(tensor.shape.tolist()) for tensor in header.tensors)
    if needed > stored:
        raise CheckpointError(
            f"it describes a model of {needed:,} parameters, holds {stored:,}: weights are missing"
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


def _read_header(path: Path) -> Any:
    """Return gguf's reader of a file."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise CheckpointError(f"it is cut off, or a length before byte {offset} is wrong")
            return super()._get(offset, dtype, count, override_order)

    return Reader(path)


def _check_sizes(config: Any, header: Any) -> None:
    layers = len({tensor.name.split(".")[1] for tensor in header.tensors if tensor.name.startswith("blk.")})
    if (described := getattr(config, "num_hidden_layers", 0)) > layers:
        raise CheckpointError(f"it describes {described} layers and holds {layers}")
    largest = max((size for tensor in header.tensors for size in tensor.shape.tolist()), default=0)
    for name in SIZES:
        if (size := getattr(config, name, 0)) > largest:
            raise CheckpointError(f"{name} is {size}, and no tensor is that large")


def _check_merges(header: Any) -> None:
    """Refuse merges that give no token, since the tokenizer's own code would crash on them."""
    tokens, merges = (_texts(header, f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    known_tokens = set(tokens)
    for merge in merges:
        if not known_tokens.issuperset([merge.replace(" ", "", 1), *merge.split(" ", 1)]):
            raise CheckpointError(f"its tokenizer has the merge {merge!r}, which gives no token")


def _texts(header: Any, name: str) -> list[Any]:
    field = header.get_field(name)
    return [] if field is None else field.contents()
