"""Write a tiny agent with random weights: the start of warm_start.sh next to this file."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from agent_tokenizer import make_agent_tokenizer

from megatron_ibpo.basics.entry_point import run_tool

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from make_tiny_checkpoint import initial_model


@dataclass
class Arguments:
    save: Path
    """Directory to write, in Hugging Face format."""
    family: Literal["qwen3_next", "qwen3"] = "qwen3_next"
    """Mixture of experts with gated delta nets, or dense."""
    seed: int = 0


def main(arguments: Arguments) -> None:
    torch.manual_seed(arguments.seed)
    tokenizer = make_agent_tokenizer()
    model: Any = initial_model(arguments.family, tokenizer)
    model.save_pretrained(arguments.save)
    tokenizer.save_pretrained(arguments.save)


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
