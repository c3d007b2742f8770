"""GGUF files, as llama.cpp keeps models, to Hugging Face checkpoints. Needs the package gguf."""

import shutil
from pathlib import Path

import torch

from megatron_ibpo.weights.errors import CheckpointError
from megatron_ibpo.weights.formats.publishing import publish


def gguf_to_hf(gguf: Path, target: Path) -> None:
    """Write a GGUF file as a Hugging Face checkpoint with tokenizer and chat template, in float32: every
    quantized weight becomes the number that it stands for.

    Reading is left to transformers, which knows the names and the order of each architecture.

    Raises:
        CheckpointError: the file is not there or does not hold all of a model, or gguf is not installed.
        FileExistsError: `target` is there.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    if not gguf.is_file():
        raise CheckpointError(f"no file {gguf}")
    if target.exists():
        raise FileExistsError(f"{target} is there; remove it or name another directory")
    try:
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except ImportError as error:
        raise CheckpointError(f"{gguf} cannot be read: {error}") from None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    read = load_gguf_checkpoint(
        str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
    )
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise CheckpointError(f"{gguf}: missing {sorted(set(missing) - tied)}, unknown {sorted(unexpected)}")
    model.tie_weights()
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    publish(partial, target)
