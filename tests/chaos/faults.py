"""What can happen to a run, and to whom."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from chaos.processes import engine_index, raylets_above
from chaos.trial import Trial
from megatron_ibpo.journal.entries import ClosedBatch, decode
from megatron_ibpo.journal.framing import Record, records
from megatron_ibpo.journal.reading import segment_numbers, segment_path
from megatron_ibpo.weights.formats.run_state import newest_step

KILL, TERM, STOP = "SIGKILL", "SIGTERM", "SIGSTOP"
NEVER_CONTINUED = ("engine", "host", "verifier")
"""Who takes their place finds out by itself; of a stopped driver or trainer nobody could."""


Kinds = dict[str, list[psutil.Process]]


@dataclass
class Fault:
    """One that is about to happen."""

    victim: str
    """Kind of process, or "disk"."""
    signal: str
    process: psutil.Process | None = None
    engine: int | None = None
    """Which engine, where it or the process that holds it is the victim."""
    engine_pid: int = 0
    """Of that engine's own process."""
    torn: str | None = None
    """What is torn before the driver is started again: see TEARS."""

    @property
    def ends_the_driver(self) -> bool:
        return self.victim == "driver" and self.signal != STOP

    @property
    def hangs(self) -> bool:
        """It stands still for good, and only a time-out tells."""
        return self.signal == STOP and self.victim in NEVER_CONTINUED


def choose(
    rng: random.Random, trial: Trial, kinds: dict[str, list[psutil.Process]], spared: set[int]
) -> Fault:
    """A fault at random, of those that are possible now: first what it hits, then how.

    On a cluster it hits the raylet of a node that has engines, and with it whatever is on that node.

    Args:
        kinds: the run's processes; see `by_kind`.
        spared: engines that are not to be hit.

    Raises:
        psutil.NoSuchProcess: what it would hit is not there now.
    """
    if trial.cluster is not None:
        if not (raylets := raylets_above(kinds["engine"])):
            raise psutil.NoSuchProcess(0, "raylet")
        return Fault("raylet", rng.choice([KILL, TERM, STOP]), rng.choice(raylets))
    kinds = {
        **kinds,
        "driver": [psutil.Process(trial.pid())],
        "engine": [one for one in kinds["engine"] if engine_index(one) not in spared],
        "host": [one for one in kinds["host"] if not spared & {engine_index(child) for child in _below(one)}],
    }
    victims = sorted(kind for kind, found in kinds.items() if found)
    if trial.run_dir.parent.is_mount():
        victims.append("disk")
    victim = rng.choice(victims)
    if victim == "disk":
        return Fault(victim, "full")
    process = rng.choice(kinds[victim])
    fault = Fault(victim, rng.choice([KILL, TERM, STOP]), process)
    if fault.victim == "driver" and fault.signal == KILL:
        fault.torn = rng.choice([None, *TEARS])
    for one in {"engine": [process], "host": _below(process)}.get(victim, []):
        if (index := engine_index(one)) is not None:
            fault.engine, fault.engine_pid = index, one.pid
    return fault


def inject(fault: Fault, rng: random.Random, trial: Trial) -> float:
    """Let it happen. What would stand still for good goes on after a while: the seconds that this took."""
    if fault.victim == "disk":
        return _fill(trial.run_dir.parent, rng.uniform(1, 4))
    assert fault.process is not None
    fault.process.send_signal(signal.Signals[fault.signal])
    if fault.signal != STOP and trial.cluster is not None:
        trial.cluster.add_node()  # as a scheduler does
    if fault.signal != STOP or fault.hangs:
        return 0.0
    seconds = rng.uniform(0.5, 4)
    time.sleep(seconds)
    fault.process.send_signal(signal.SIGCONT)
    return seconds


def _tear_journal(trial: Trial, rng: random.Random) -> str:
    """Cut off some bytes at the end of the journal, as a loss of power does; none that a checkpoint needs."""
    directory = trial.run_dir / "journal"
    newest = newest_step(trial.run_dir)
    saved = 0 if newest is None else int(newest.name.removeprefix("step_"))
    path = segment_path(directory, max(segment_numbers(directory)))
    ends = _ends(path)
    kept = [end for end, step in ends if step is not None and step <= saved]
    first = max([ends[0][0], *kept]) if ends else 0
    size = path.stat().st_size
    if first >= size:
        return "nothing to cut off"
    left = rng.randrange(first, size)
    os.truncate(path, left)
    return f"{size - left} of {size} bytes of {path.name} cut off"


def _tear_checkpoint(trial: Trial, rng: random.Random) -> str:
    """The newest checkpoint never got its name, and a file of it is half written."""
    newest = newest_step(trial.run_dir)
    if newest is None:
        return "there was none"
    partial = newest.with_name(f".{newest.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    newest.rename(partial)
    file = rng.choice(sorted(path for path in partial.rglob("*") if path.is_file()))
    os.truncate(file, rng.randrange(file.stat().st_size))
    return f"{newest.name} is partial, {file.name} cut off"


TEARS = {"journal": _tear_journal, "checkpoint": _tear_checkpoint}


def _ends(segment: Path) -> list[tuple[int, int | None]]:
    """(end of a record, the step of the batch if it closes one), of all whole records."""
    return [
        (found.offset + 16 + len(found.payload), entry.step if isinstance(entry, ClosedBatch) else None)
        for found in records(segment)
        if isinstance(found, Record)
        for entry in [decode(found.payload)]
    ]


def _fill(disk: Path, seconds: float) -> float:
    """Leave no room on it for a while."""
    filling = disk / "filling"
    with suppress(OSError), filling.open("wb", buffering=0) as file:
        while file.write(b"x" * 2**20):
            pass
    time.sleep(seconds)
    filling.unlink()
    return seconds


def _below(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return process.children()
    return []
