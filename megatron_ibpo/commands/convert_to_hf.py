"""Convert Megatron's distributed checkpoint to a Hugging Face checkpoint, on CPUs, without building the
model.

    bash tools/ibpo.sh convert to-hf --load runs/a --save hf/a        # the run's newest step
    torchrun --nproc-per-node 8 -m megatron_ibpo.commands.convert_to_hf …  # several processes

Reads checkpoints of any layout, without optimizer state. Writes sharded safetensors with an index, one tensor
per expert, config.json and the tokenizer, as transformers and vLLM load them. Tensors keep dtype and bits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ibpo.basics.entry_point import command, parsed

if TYPE_CHECKING:
    from megatron_ibpo.basics.distributed import World


@dataclass
class Arguments:
    load: Path
    """A checkpoint, or a training run's directory, which means its newest one. Never written to."""
    save: Path
    """Directory to write; must not exist."""
    origin_hf_checkpoint: Path | None = None
    """Source of config.json and tokenizer; None: the checkpoint's own."""
    verify: bool = False
    """Compare the checksums of the source, if it has some; afterwards compare all bits of both checkpoints,
    and logits on random prompts."""


def convert(arguments: Arguments, world: World) -> int:
    from megatron_ibpo.commands import conversion
    from megatron_ibpo.weights.formats.convert import megatron_to_hf
    from megatron_ibpo.weights.formats.run_state import find_stored

    stored = find_stored(arguments.load)
    if arguments.verify:
        conversion.check_source(stored, world)
    save = arguments.save
    with conversion.shown_conversion(save, world, lambda: conversion.checkpoint_bytes(save)) as report:
        megatron_to_hf(stored, save, world, origin=arguments.origin_hf_checkpoint, report=report)
    return conversion.verify(save, stored, world) if arguments.verify else 0


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Convert a checkpoint. Return 1 if --verify finds a difference."""
    arguments = parsed(Arguments, __doc__, argv, program="ibpo convert to-hf")
    from megatron_ibpo.commands import conversion  # Megatron: 8 s that --help does not need

    return conversion.run(lambda world: convert(arguments, world))


if __name__ == "__main__":
    sys.exit(main())
