"""Convert a Hugging Face checkpoint to Megatron's distributed checkpoint, on CPUs, without building the
model.

    bash tools/ibpo.sh convert to-megatron --hf-checkpoint Qwen3-30B-A3B --save megatron/qwen3-30b
    torchrun --nproc-per-node 8 -m megatron_ibpo.commands.convert_to_megatron …  # several processes

A training run loads the result with `--load`, under any layout. The sizes given here determine its pieces, so
that a run in that layout reads whole pieces. Every tensor keeps its dtype and its bits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ibpo.basics.entry_point import command, parsed
from megatron_ibpo.config import ParallelConfig

if TYPE_CHECKING:
    from megatron_ibpo.basics.distributed import World


@dataclass
class Arguments:
    hf_checkpoint: Path
    """Directory with config.json, safetensors and tokenizer. Never written to."""
    save: Path
    """Directory to write; must not exist."""
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline stage; None: an even share."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline stage; None: an even share."""
    num_virtual_stages_per_pipeline_rank: int = 1
    """Model chunks of each rank in an interleaved pipeline."""
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    verify: bool = False
    """Compare the checksums of the source, if it has some; afterwards compare all bits of both checkpoints,
    and logits on random prompts."""
    allow_pickle: bool = False
    """Read pytorch_model.bin if there are no safetensors, by torch's weights-only unpickler."""


def convert(arguments: Arguments, world: World) -> int:
    from megatron_ibpo.commands import conversion
    from megatron_ibpo.weights.formats.convert import hf_to_megatron

    hf_dir, save = arguments.hf_checkpoint, arguments.save
    sizes = {field.name for field in fields(ParallelConfig)}
    parallel = ParallelConfig(**{name: size for name, size in vars(arguments).items() if name in sizes})
    if arguments.verify:
        conversion.check_source(hf_dir, world)
    size = partial(conversion.checkpoint_bytes, hf_dir, allow_pickle=arguments.allow_pickle)
    with conversion.shown_conversion(save, world, size) as report:
        hf_to_megatron(
            hf_dir,
            save,
            parallel,
            world,
            virtual_stages=arguments.num_virtual_stages_per_pipeline_rank,
            allow_pickle=arguments.allow_pickle,
            report=report,
        )
    if not arguments.verify:
        return 0
    return conversion.verify(hf_dir, save, world, allow_pickle=arguments.allow_pickle)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Convert a checkpoint. Return 1 if --verify finds a difference."""
    arguments = parsed(Arguments, __doc__, argv, program="ibpo convert to-megatron")
    from megatron_ibpo.commands import conversion  # Megatron: 8 s that --help does not need

    return conversion.run(lambda world: convert(arguments, world))


if __name__ == "__main__":
    sys.exit(main())
