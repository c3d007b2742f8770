"""Common parts of the benchmarks: --save, alternating rounds, rows in separate processes, memory and
processor time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron_ibpo.basics.versions import machine

T = TypeVar("T")


@dataclass
class Saving:
    """The flag of every benchmark."""

    save: Path | None = None
    """JSON file for the results."""


def save(path: Path | None, results: Mapping[str, Any], *packages: str) -> None:
    """Write the results, after the machine and its versions; without a path nothing is written.

    Args:
        packages: packages whose versions are written too.
    """
    write(path, {"machine": machine(*packages)} | dict(results))


def write(path: Path | None, content: Mapping[str, Any], *, keeping: bool = False) -> None:
    """Write the content as JSON; without a path nothing is written.

    Args:
        keeping: keep the file's other keys, such as another part of the benchmark.
    """
    if path is None:
        return
    stored = json.loads(path.read_text(encoding="utf-8")) if keeping and path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(stored | dict(content), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def in_turns(kinds: Sequence[T], rounds: int) -> Iterator[T]:
    """Yield every kind once per round, backwards in every second round, so that drift affects all alike."""
    for number in range(rounds):
        yield from kinds if number % 2 == 0 else reversed(kinds)


def in_own_process(script: str, *flags: str, timeout: float, **environment: str) -> dict[str, Any]:
    """Run a script with this process's import path and return the JSON object on the last line it prints."""
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, script, *flags],
        env={**os.environ, **environment, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=timeout,
    )
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident memory of a process, by default of this one."""
    return _status(pid, "VmRSS")


def peak_bytes(pid: int | None = None) -> int:
    """Return a process's peak resident memory so far, by default of this one. It is the kernel's figure for
    its own memory map. ru_maxrss, which wait4 reports too, starts from the parent's memory."""
    return _status(pid, "VmHWM")


def _status(pid: int | None, field: str) -> int:
    lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)
