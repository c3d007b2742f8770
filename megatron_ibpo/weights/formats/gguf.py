"""Conversion of GGUF files (llama.cpp's format) to Hugging Face checkpoints. Needs the package gguf."""

import shutil
from pathlib import Path
from typing import Any

import torch

from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.families import FAMILIES
from megatron_ibpo.weights.formats.directories import publish
from megatron_ibpo.weights.formats.gguf_header import Header, read_header
from megatron_ibpo.weights.weight_errors import CheckpointError

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

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _check_sizes(config, header)
    with torch.device("meta"):
        needed = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if needed > header.elements:
        raise CheckpointError(
            f"it describes a model of {needed:,} parameters, holds {header.elements:,}: weights are missing"
        )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
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
