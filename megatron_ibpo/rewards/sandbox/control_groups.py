"""Control groups around sandboxes, if this user may create any. They bound what process limits do not see,
such as the kernel's memory for a million empty files. They are reused, since the kernel takes long to remove
one that bounds memory: without, a tenth fewer programs run per second. Both versions of the kernel's
interface are handled; only the first has been run. Source: cgroups(7)."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "ibpo-sandbox-"
_ROOT = Path("/sys/fs/cgroup")
_PROCESSES = "cgroup.procs"
_CONTROLLERS = {"memory", "pids"}
_numbers = itertools.count()


@contextmanager
def control_groups(memory_bytes: int, tasks: int) -> Iterator[list[Path]]:
    """Yield groups with these bounds, to be entered by writing a process id to their `cgroup.procs`; none if
    none can be created. At the end, when all their processes must have ended, they are kept for this
    process's next sandbox.

    Args:
        memory_bytes: memory including what the kernel holds for the processes, with no swap on top.
        tasks: processes and threads.
    """
    free = _free_groups(os.getpid(), memory_bytes, tasks)
    groups = free.pop() if free else _make(memory_bytes, tasks)
    try:
        yield groups
    finally:
        if any((group / _PROCESSES).read_text() for group in groups):  # the kernel has not ended them in time
            _remove(groups)
        else:
            free.append(groups)


@functools.cache
def _free_groups(process: int, memory_bytes: int, tasks: int) -> list[list[Path]]:
    """Return this process's groups with these bounds that no sandbox uses; a fork must not share them."""
    atexit.register(remove_groups, process)
    return []


def _make(memory_bytes: int, tasks: int) -> list[Path]:
    bounds = {
        "memory.limit_in_bytes": memory_bytes,  # version 1; the next one counts memory and swap together
        "memory.memsw.limit_in_bytes": memory_bytes,
        "memory.max": memory_bytes,  # version 2
        "memory.swap.max": 0,
        "pids.max": tasks,
    }
    groups = [parent / f"{PREFIX}{os.getpid()}-{next(_numbers)}" for parent in parents()]
    try:
        for group in groups:
            group.mkdir()
            for name, bound in bounds.items():
                if (group / name).exists():
                    (group / name).write_text(str(bound))
    except BaseException:
        _remove(groups)
        raise
    return groups


def remove_groups(owner: int) -> None:
    """Remove the groups that a process with this id created, once it has ended or no longer needs them. If a
    group's last processes are still being killed, wait for one second at most; the next owner removes what is
    left."""
    deadline = time.monotonic() + 1.0
    remaining = [group for parent in _own_groups() for group in parent.glob(f"{PREFIX}{owner}-*")]
    while remaining:
        _remove(remaining)
        remaining = [group for group in remaining if group.exists()]
        if not remaining or time.monotonic() > deadline:
            return
        time.sleep(0.01)


@functools.cache
def parents() -> tuple[Path, ...]:
    """Return the groups in which this process can create others, one per hierarchy that bounds memory or
    tasks. Remove what killed owners left in them."""
    usable = []
    for parent in sorted(_own_groups()):
        _remove([group for group in parent.glob(f"{PREFIX}*") if not _is_owned(group)])
        probe = parent / f"{PREFIX}{os.getpid()}-probe"
        with suppress(OSError):
            probe.mkdir()
            probe.rmdir()
            usable.append(parent)
    return tuple(usable)


def _own_groups() -> set[Path]:
    """Return the groups of this process whose child groups would have a controller that is needed here."""
    groups = set()
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2: a group with processes hands nothing down, its parent may
            own_group = _ROOT / path.lstrip("/")
            groups |= {
                group
                for group in (own_group, own_group.parent)
                if _CONTROLLERS & {*_text(group / "cgroup.subtree_control").split()}
            }
        elif _CONTROLLERS & set(controllers.split(",")):
            groups.add(_ROOT / controllers / path.lstrip("/"))
    return {group for group in groups if group.is_dir()}


def _text(file: Path) -> str:
    """Return the text of a file of the kernel; empty if there is none."""
    with suppress(OSError):
        return file.read_text(encoding="utf-8")
    return ""


def _is_owned(group: Path) -> bool:
    owner = group.name.removeprefix(PREFIX).partition("-")[0]
    return Path("/proc", owner).exists()


def _remove(groups: Sequence[Path]) -> None:
    for group in groups:
        with suppress(OSError):  # it was not made, or is gone already
            group.rmdir()
