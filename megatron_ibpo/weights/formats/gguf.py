"""GGUF files, as llama.cpp keeps models, to Hugging Face checkpoints. Needs the package gguf."""

import shutil
from pathlib import Path
from typing import Any

import torch

from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.families import FAMILIES
from megatron_ibpo.weights.errors import CheckpointError, first_line
from megatron_ibpo.weights.formats.publishing import publish

PARAMETERS_PER_BYTE = 8
"""More than any quantization packs into a file."""


def gguf_to_hf(gguf: Path, target: Path) -> None:
    """Write a GGUF file as a Hugging Face checkpoint with tokenizer and chat template, in float32: every
    quantized weight becomes the number that it stands for.

    Reading is left to transformers, which knows the names and the order of each architecture.

    Raises:
        CheckpointError: the file is not there, damaged, or does not hold all of a model, or gguf is not
            installed.
        FileExistsError: `target` is there.
    """
    if not gguf.is_file():
        raise CheckpointError(f"no file {gguf}")
    if target.exists():
        raise FileExistsError(f"{target} is there; remove it or name another directory")
    try:
        model, tokenizer = _read(gguf)
    except CheckpointError:
        raise
    except Exception as error:  # damaged bytes make transformers raise nearly anything
        raise CheckpointError(
            f"{gguf} cannot be read ({first_line(error)}): damaged, or of a kind that transformers does not "
            "know; download it again"
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
    """The model in float32, and its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _check_size(gguf, config)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    read = load_gguf_checkpoint(
        str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
    )
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise CheckpointError(f"{gguf}: missing {sorted(set(missing) - tied)}, unknown {sorted(unexpected)}")
    model.tie_weights()
    return model, tokenizer


def _check_size(gguf: Path, config: Any) -> None:
    """Refuse sizes that the file cannot hold, before a model of them takes memory."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.gguf.reader import read_gguf_metadata

    _, names = read_gguf_metadata(str(gguf))
    if config.num_hidden_layers > len(names):
        raise CheckpointError(
            f"{gguf} says that it has {config.num_hidden_layers} layers, and holds {len(names)} tensors"
        )
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > PARAMETERS_PER_BYTE * gguf.stat().st_size:
        raise CheckpointError(
            f"{gguf} says that its model has {parameters:,} parameters, more than its "
            f"{gguf.stat().st_size:,} bytes can hold"
        )
