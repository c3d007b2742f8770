import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

ZYGOTE = "megatron_ibpo.environments.zygote"  # module of the process that forks episodes, and of each episode
RAY_SERVERS = {"gcs_server": "gcs", "raylet": "own raylet"}  # without them the run's own Ray is gone


def end_on_sigterm():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def children(process, recursive=False):
    with suppress(psutil.Error):
        return process.children(recursive)
    return []


def below(pid):
    with suppress(psutil.Error):
        return children(psutil.Process(pid), recursive=True)
    return []


def by_kind(processes):
    """The processes that are far enough to be told; "host" holds an engine, "zygote" forks episodes."""
    names = ("trainer", "engine", "host", "verifier", "episode", "zygote", *RAY_SERVERS.values())
    kinds, actors = {name: [] for name in names}, []
    for process in processes:
        with suppress(psutil.Error):
            command = title(process)
            if "-m megatron_ibpo.rewards.worker" in command:
                if "basics/supervisor.py" not in command:  # it holds the command of its verifier
                    kinds["verifier"].append(process)
            elif process.cmdline()[2:3] == [ZYGOTE]:
                is_fork = any(parent.cmdline()[2:3] == [ZYGOTE] for parent in process.parents()[:1])
                kinds["episode" if is_fork else "zygote"].append(process)
            elif "engine_process" in command:
                kinds["engine"].append(process)
            elif "ray::_Process" in command:
                actors.append(process)
            elif process.name() in RAY_SERVERS:
                kinds[RAY_SERVERS[process.name()]].append(process)
    hosts = {process.ppid() for process in kinds["engine"] if process.is_running()}
    kinds["host"] = [actor for actor in actors if actor.pid in hosts]
    # those that hold engines do not load torch
    kinds["trainer"] = [a for a in actors if a.pid not in hosts and "libtorch_cpu" in proc(a.pid, "maps")]
    return kinds


def send(processes, how):
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(how)


def proc(pid, name):
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    return ""


def title(process):
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def engine_index(engine):
    """By the log that it writes."""
    with suppress(OSError, ValueError):
        return int(Path(os.readlink(f"/proc/{engine.pid}/fd/1")).stem.removeprefix("engine_"))
    return None


def of_place(place):
    """All processes on this machine whose environment names `place`, with any parents."""
    others = [one for one in psutil.process_iter(["status"]) if one.pid != os.getpid()]
    alive = [one for one in others if one.info["status"] != psutil.STATUS_ZOMBIE]
    return [one for one in alive if str(place) in proc(one.pid, "environ")]


def gone_within(place, seconds):
    """(seconds until nothing of `place` ran, command lines of what still does)."""
    began = time.monotonic()
    while (left := of_place(place)) and time.monotonic() - began < seconds:
        time.sleep(0.1)
    return time.monotonic() - began, [f"{process.pid} {title(process)[:200]}" for process in left]


def shared_memory_of(processes):
    return {name for one in processes for name in re.findall(r"/dev/shm/(\S+)", proc(one.pid, "maps"))}
