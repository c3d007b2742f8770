"""Main memory of this process's node. Source: cgroups(7); only version 1 has been run."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil

_GROUPS = Path("/sys/fs/cgroup")
_PROCESS_GROUPS = Path("/proc/self/cgroup")


def main_memory(groups: Path = _GROUPS, process_groups: Path = _PROCESS_GROUPS) -> int:
    """Return the bytes that the processes of a run may take on this node: all its memory, or the lowest limit
    of a control group that this process is in, as containers and batch systems set it. The use by other
    programs is not subtracted.

    Args:
        groups: where the kernel shows control groups.
        process_groups: file that lists this process's groups.
    """
    limits = [psutil.virtual_memory().total]
    for file in _limit_files(groups, process_groups):
        with suppress(OSError, ValueError):  # not shown in this container, or "max"
            limits.append(int(file.read_text(encoding="utf-8")))
    return min(limits)


def _limit_files(groups: Path, process_groups: Path) -> Iterator[Path]:
    """Yield the limit files of this process's group and of all groups around it, for either version of the
    kernel's interface."""
    lines = ""
    with suppress(OSError):  # a kernel without control groups
        lines = process_groups.read_text(encoding="utf-8")
    for line in lines.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        group = PurePosixPath(path)
        for around in (group, *group.parents):
            yield groups / controllers / around.relative_to("/") / name
