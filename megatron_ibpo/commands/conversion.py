"""Common parts of the conversion tools: progress bar, errors, and the proof that nothing was lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from megatron_ibpo.basics.distributed import RemoteError, World, start_world
from megatron_ibpo.basics.entry_point import BAD_INPUT
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.weight_map import weight_map
from megatron_ibpo.policy.logits_check import logits_difference
from megatron_ibpo.policy.process_start import hush_megatron
from megatron_ibpo.weights.formats.checkpoint_files import check_integrity
from megatron_ibpo.weights.formats.convert import Report, differing_tensors
from megatron_ibpo.weights.formats.hugging_face import Checkpoint

LOGITS_BOUND = 1e-3
"""Largest root mean square of the differences, relative to that of the logits. Rounding in float32 makes 1e-7
to 1e-4 (delta nets with large weights, experts chosen by a narrow margin); a misplaced tensor makes about
1."""
console = Console(stderr=True)


def run(work: Callable[[World], int]) -> int:
    """Join the ranks and do the work. Returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.captureWarnings(True)
    hush_megatron()
    world = start_world()
    try:
        return work(world)
    except RemoteError:
        return BAD_INPUT  # its own rank says what is wrong
    finally:
        world.close()


@contextmanager
def shown_conversion(save: Path, world: World, size: Callable[[], int]) -> Iterator[Report]:
    """Show a bar while a checkpoint is converted, and at the end its bytes and seconds."""
    started = time.perf_counter()
    with progress_bar(world, "converting") as report:
        yield report
    if world.is_rank_0:
        console.print(f"{save}: {size() / 1e9:.2f} GB in {time.perf_counter() - started:.1f} s")


@contextmanager
def progress_bar(world: World, title: str) -> Iterator[Report]:
    """Show a bar on the driver, for its own share of the work."""
    columns = ("[bold]{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    lock = threading.Lock()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not world.is_rank_0) as bar:
        task = bar.add_task(title, total=None)

        def report(advance: int, total: int) -> None:
            with lock:
                bar.update(task, advance=advance, total=total)

        yield report


def check_source(directory: Path, world: World) -> None:
    """Compare the files to convert with their checksums, if there are any, so that no file is converted that
    has changed on the disk since. The ranks divide the work.

    Raises:
        CheckpointError: a file is missing or was changed.
    """
    world.on_all_ranks(lambda: check_integrity(directory, world.rank, world.size))


def verify(hf_dir: Path, stored_dir: Path, world: World, *, allow_pickle: bool = False) -> int:
    """Compare two checkpoints of one model: all bits of all weights, then logits on random prompts.

    Returns the exit status: 1 if they differ.
    """
    with progress_bar(world, "comparing") as report:
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
    largest, relative = logits_difference(hf_dir, stored_dir, world)
    console.print(
        f"logits: differ by at most {largest:.1e} in float32; relative root mean square {relative:.1e}, "
        f"allowed {LOGITS_BOUND:.0e}"
    )
    return int(not relative <= LOGITS_BOUND)


def _too_much(hf_dir: Path, world: World) -> str:
    """Return why the logits cannot be compared here; empty if they can."""
    if world.size > 1:
        return "several processes; run `convert to-hf --verify` in one"
    entries = weight_map(read_hf_config(hf_dir)).values()
    needed = 2 * 4 * sum(torch.Size(piece.shape).numel() for entry in entries for piece in entry.pieces)
    available = psutil.virtual_memory().available
    if needed > 0.9 * available:
        return (
            f"both models in float32 need {needed / 1e9:.0f} GB of memory, {available / 1e9:.0f} GB are free"
        )
    if not any(hf_dir.glob("*.safetensors")):
        return "transformers would have to read pickles"
    return ""


def checkpoint_bytes(hf_dir: Path, *, allow_pickle: bool = False) -> int:
    """Return the bytes of all weights in a Hugging Face checkpoint."""
    checkpoint = Checkpoint(hf_dir, allow_pickle=allow_pickle)
    return sum((hf_dir / file).stat().st_size for file in set(checkpoint.file_of.values()))
