"""Convert a checkpoint between Hugging Face's format and Megatron's distributed one, on CPUs.

    bash tools/ibpo.sh convert to-megatron --hf-checkpoint Qwen3-30B-A3B --save megatron/qwen3-30b
    bash tools/ibpo.sh convert to-hf --load runs/a --save hf/a        # the run's newest step
    torchrun --nproc-per-node 8 -m megatron_ibpo.commands.convert to-hf …  # several processes

Every tensor keeps its dtype and its bits.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import psutil
import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from megatron_ibpo.basics.entry_point import BAD_INPUT, command, parsed
from megatron_ibpo.config import ParallelConfig

# torch and Megatron are imported by the functions: they take 8 s, which --help does not need
if TYPE_CHECKING:
    from megatron_ibpo.basics.distributed import World
    from megatron_ibpo.weights.formats.convert import Report

LOGITS_BOUND = 1e-3
"""Largest root mean square of the differences, relative to that of the logits. Rounding in float32 makes 1e-7
to 1e-4 (delta nets with large weights, experts chosen by a narrow margin); a misplaced tensor makes about
1."""
console = Console(stderr=True)


@dataclass
class ToMegatron:
    """Convert a Hugging Face checkpoint to Megatron's distributed checkpoint. A training run loads the result
    with `--load`, under any layout. The sizes given here determine its pieces, so that a run in that layout
    reads whole pieces."""

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


@dataclass
class ToHf:
    """Convert Megatron's distributed checkpoint, of any layout and without its optimizer state, to a Hugging
    Face checkpoint as transformers and vLLM load it: sharded safetensors, one tensor per expert, config.json
    and the tokenizer."""

    load: Path
    """A checkpoint, or a training run's directory, which means its newest one. Never written to."""
    save: Path
    """Directory to write; must not exist."""
    origin_hf_checkpoint: Path | None = None
    """Source of config.json and tokenizer; None: the checkpoint's own."""
    verify: bool = False
    """Compare the checksums of the source, if it has some; afterwards compare all bits of both checkpoints,
    and logits on random prompts."""


Arguments = (
    Annotated[ToMegatron, tyro.conf.subcommand("to-megatron")]
    | Annotated[ToHf, tyro.conf.subcommand("to-hf")]
)


def to_megatron(arguments: ToMegatron, world: World) -> int:
    from megatron_ibpo.weights.formats.checkpoint_files import check_integrity
    from megatron_ibpo.weights.formats.convert import hf_to_megatron

    hf_dir, save, allow_pickle = arguments.hf_checkpoint, arguments.save, arguments.allow_pickle
    sizes = {field.name for field in fields(ParallelConfig)}
    parallel = ParallelConfig(**{name: size for name, size in vars(arguments).items() if name in sizes})
    if arguments.verify:
        world.on_all_ranks(lambda: check_integrity(hf_dir, world.rank, world.size))
    size = partial(_checkpoint_bytes, hf_dir, allow_pickle=allow_pickle)
    with _shown_conversion(save, world, size) as report:
        stages = arguments.num_virtual_stages_per_pipeline_rank
        hf_to_megatron(
            hf_dir, save, parallel, world, virtual_stages=stages, allow_pickle=allow_pickle, report=report
        )
    return _verify(hf_dir, save, world, allow_pickle=allow_pickle) if arguments.verify else 0


def to_hf(arguments: ToHf, world: World) -> int:
    from megatron_ibpo.weights.formats.checkpoint_files import check_integrity
    from megatron_ibpo.weights.formats.convert import megatron_to_hf
    from megatron_ibpo.weights.formats.run_state import find_stored

    stored, save = find_stored(arguments.load), arguments.save
    if arguments.verify:
        world.on_all_ranks(lambda: check_integrity(stored, world.rank, world.size))
    with _shown_conversion(save, world, lambda: _checkpoint_bytes(save)) as report:
        megatron_to_hf(stored, save, world, origin=arguments.origin_hf_checkpoint, report=report)
    return _verify(save, stored, world) if arguments.verify else 0


@contextmanager
def _shown_conversion(save: Path, world: World, size: Callable[[], int]) -> Iterator[Report]:
    """Show a bar while a checkpoint is converted, and at the end its bytes and seconds."""
    started = time.perf_counter()
    with _progress_bar(world, "converting") as report:
        yield report
    if world.is_rank_0:
        console.print(f"{save}: {size() / 1e9:.2f} GB in {time.perf_counter() - started:.1f} s")


@contextmanager
def _progress_bar(world: World, title: str) -> Iterator[Report]:
    """Show a bar on the driver, for its own share of the work."""
    columns = ("[bold]{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    lock = threading.Lock()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not world.is_rank_0) as bar:
        task = bar.add_task(title, total=None)

        def report(advance: int, total: int) -> None:
            with lock:
                bar.update(task, advance=advance, total=total)

        yield report


def _verify(hf_dir: Path, stored_dir: Path, world: World, *, allow_pickle: bool = False) -> int:
    """Compare two checkpoints of one model: all bits of all weights, then logits on random prompts.

    Returns the exit status: 1 if they differ.
    """
    from megatron_ibpo.weights.formats.convert import differing_tensors

    with _progress_bar(world, "comparing") as report:
        differing = differing_tensors(hf_dir, stored_dir, world, allow_pickle=allow_pickle, report=report)
    if differing:
        if world.is_rank_0:
            console.print(f"[red]{len(differing)} tensors differ: {', '.join(differing[:8])}")
        return 1
    if world.is_rank_0:
        console.print("weights: 0 differing bytes")
    reason = _too_much(hf_dir, world)
    if reason:
        if world.is_rank_0:
            console.print(f"[yellow]logits: not compared: {reason}")
        return 0
    from megatron_ibpo.policy.logits_check import logits_difference

    largest, relative = logits_difference(hf_dir, stored_dir, world)
    console.print(
        f"logits: differ by at most {largest:.1e} in float32; relative root mean square {relative:.1e}, "
        f"allowed {LOGITS_BOUND:.0e}"
    )
    return int(not relative <= LOGITS_BOUND)


def _too_much(hf_dir: Path, world: World) -> str:
    """Return why the logits cannot be compared here; empty if they can."""
    from megatron_ibpo.models import read_hf_config
    from megatron_ibpo.models.weight_map import weight_map

    if world.size > 1:
        return "several processes; run `convert to-hf --verify` in one"
    entries = weight_map(read_hf_config(hf_dir)).values()
    needed = 2 * 4 * sum(math.prod(piece.shape) for entry in entries for piece in entry.pieces)
    available = psutil.virtual_memory().available
    if needed > 0.9 * available:
        return (
            f"both models in float32 need {needed / 1e9:.0f} GB of memory, {available / 1e9:.0f} GB are free"
        )
    if not any(hf_dir.glob("*.safetensors")):
        return "transformers would have to read pickles"
    return ""


def _checkpoint_bytes(hf_dir: Path, *, allow_pickle: bool = False) -> int:
    """Return the bytes of all weights in a Hugging Face checkpoint."""
    from megatron_ibpo.weights.formats.hugging_face import Checkpoint

    checkpoint = Checkpoint(hf_dir, allow_pickle=allow_pickle)
    return sum((hf_dir / file).stat().st_size for file in set(checkpoint.file_of.values()))


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Convert a checkpoint. Return 1 if --verify finds a difference."""
    arguments: ToMegatron | ToHf = parsed(Arguments, __doc__, argv, program="ibpo convert")
    from megatron_ibpo.basics.distributed import RemoteError, start_world
    from megatron_ibpo.policy.process_start import hush_megatron

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.captureWarnings(True)
    hush_megatron()
    world = start_world()
    try:
        return to_megatron(arguments, world) if isinstance(arguments, ToMegatron) else to_hf(arguments, world)
    except RemoteError:
        return BAD_INPUT  # its own rank says what is wrong
    finally:
        world.close()


if __name__ == "__main__":
    sys.exit(main())
