"""The processes of a run: which is which, and which are left."""

import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

VERIFIER = "-m megatron_ibpo.rewards.worker"
SUPERVISOR = "basics/supervisor.py"  # its command holds that of its verifier
ZYGOTE = "megatron_ibpo.environments.zygote"  # module of the process that forks episodes, and of each episode
ENGINE = "engine_process"
ACTOR = "ray::_Process"
RAY_SERVERS = {"gcs_server": "gcs", "raylet": "own raylet"}  # without them the run's own Ray is gone


def end_on_sigterm() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def children(process: psutil.Process, recursive=False) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return process.children(recursive)
    return []


def below(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return children(psutil.Process(pid), recursive=True)
    return []


def by_kind(processes: Iterable[psutil.Process]) -> dict[str, list[psutil.Process]]:
    """The processes that are far enough to be told; "host" holds an engine, "zygote" forks episodes."""
    names = ("trainer", "engine", "host", "verifier", "episode", "zygote", *RAY_SERVERS.values())
    kinds: dict[str, list[psutil.Process]] = {name: [] for name in names}
    actors = []
    for process in processes:
        with suppress(psutil.Error):
            command = title(process)
            if VERIFIER in command and SUPERVISOR not in command:
                kinds["verifier"].append(process)
            elif process.cmdline()[2:3] == [ZYGOTE]:
                parent = process.parent()
                is_fork = parent is not None and parent.cmdline()[2:3] == [ZYGOTE]
                kinds["episode" if is_fork else "zygote"].append(process)
            elif ENGINE in command:
                kinds["engine"].append(process)
            elif ACTOR in command:
                actors.append(process)
            elif process.name() in RAY_SERVERS:
                kinds[RAY_SERVERS[process.name()]].append(process)
    hosts = {process.ppid() for process in kinds["engine"] if process.is_running()}
    kinds["host"] = [actor for actor in actors if actor.pid in hosts]
    kinds["trainer"] = [actor for actor in actors if actor.pid not in hosts and has_torch(actor.pid)]
    return kinds


def raylets_above(engines: Iterable[psutil.Process]) -> list[psutil.Process]:
    found = {}
    for engine in engines:
        with suppress(psutil.Error):
            raylet = engine.parents()[1]
            if raylet.name() == "raylet":
                found[raylet.pid] = raylet
    return list(found.values())


def title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def has_torch(pid: int) -> bool:
    """Return whether this process has loaded torch; those that hold engines do not."""
    with suppress(OSError):
        return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
    return False


def engine_index(engine: psutil.Process) -> int | None:
    """Return the engine's index, by the log that it writes."""
    with suppress(OSError, ValueError):
        return int(Path(os.readlink(f"/proc/{engine.pid}/fd/1")).stem.removeprefix("engine_"))
    return None


def of_place(place: Path) -> list[psutil.Process]:
    """Return all processes on this machine whose environment names `place`, with any parents."""
    mark, found = str(place).encode(), []
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):
            named = pid != os.getpid() and mark in Path(f"/proc/{pid}/environ").read_bytes()
            if named and (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def gone_within(place: Path, seconds: float) -> tuple[float, list[str]]:
    """(seconds until nothing of `place` ran, command lines of what still does)."""
    began = time.monotonic()
    while (left := of_place(place)) and time.monotonic() - began < seconds:
        time.sleep(0.1)
    return time.monotonic() - began, [f"{process.pid} {title(process)[:200]}" for process in left]


def end_all(place: Path) -> None:
    for process in of_place(place):
        with suppress(psutil.Error):
            process.kill()


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[str]:
    """Names in /dev/shm of the segments that they have mapped."""
    names: set[str] = set()
    for process in processes:
        with suppress(OSError):
            names |= {*re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{process.pid}/maps").read_text())}
    return names
