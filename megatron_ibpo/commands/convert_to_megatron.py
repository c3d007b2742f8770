"""Convert a Hugging Face checkpoint to Megatron's distributed checkpoint, on CPUs, without building the
model.

    bash tools/ibpo.sh convert to-megatron --hf-checkpoint Qwen3-30B-A3B --save megatron/qwen3-30b
    torchrun --nproc-per-node 8 -m megatron_ibpo.commands.convert_to_megatron …  # several processes

A training run loads the result with `--load`, under any layout. The sizes given here determine its pieces, so
that a run in that layout reads whole pieces. Every tensor keeps its dtype and its bits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
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

    parallel = ParallelConfig(
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
        decoder_first_pipeline_num_layers=arguments.decoder_first_pipeline_num_layers,
        decoder_last_pipeline_num_layers=arguments.decoder_last_pipeline_num_layers,
        expert_model_parallel_size=arguments.expert_model_parallel_size,
        expert_tensor_parallel_size=arguments.expert_tensor_parallel_size,
    )
    if arguments.verify:
        conversion.check_source(arguments.hf_checkpoint, world)
    started = time.perf_counter()
    with conversion.progress_bar(world, "converting") as report:
        hf_to_megatron(
            arguments.hf_checkpoint,
            arguments.save,
            parallel,
            world,
            virtual_stages=arguments.num_virtual_stages_per_pipeline_rank,
            allow_pickle=arguments.allow_pickle,
            report=report,
        )
    if world.is_rank_0:
        size = conversion.checkpoint_bytes(arguments.hf_checkpoint, allow_pickle=arguments.allow_pickle)
        conversion.console.print(
            f"{arguments.save}: {size / 1e9:.2f} GB in {time.perf_counter() - started:.1f} s"
        )
    if not arguments.verify:
        return 0
    return conversion.verify(
        arguments.hf_checkpoint, arguments.save, world, allow_pickle=arguments.allow_pickle
    )


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Convert a checkpoint. Return 1 if --verify finds a difference."""
    arguments = parsed(Arguments, __doc__, argv, program="ibpo convert to-megatron")
    from megatron_ibpo.commands import conversion  # Megatron: 8 s that --help does not need

    return conversion.run(lambda world: convert(arguments, world))


if __name__ == "__main__":
    sys.exit(main())
