"""Commands in forked children of a process that has imported everything; time and memory are watched."""

import contextlib
import os
import re
import resource
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from megatron_ibpo.commands.main import COMMANDS
from support.paths import ROOT

LONGEST_S = 20.0  # seconds of processor time that a command may take
MOST_S = 180.0  # seconds that it may take beside other work of the machine
MOST_BYTES = 2 * 10**9  # of memory that a command may hold at one time, its libraries included
STOPPED_AT = 3 * 10**9  # bytes at which a command is ended, so that the machine lives on
LOOK_S = 0.02
DOORS: dict[str, tuple[str, ...]] = {
    **{name: command.python for name, command in COMMANDS.items()},
    "convert-gguf": (str(ROOT / "tools/convert_gguf_to_hf.py"),),
    "choice": ("-m", "megatron_ibpo.commands.choose_recipe"),
}  # name of a command → what Python runs for it
_CRASH = re.compile(r"^Traceback \(most recent call last\)|internal error|please report it", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    verdict: Literal["refused", "taken", "traceback", "hang", "above 2 GB"]
    said: str  # the end of what it printed


def in_child(work: Callable[[], object], log: Path) -> Outcome:
    """Run `work` in a forked child; its return value or SystemExit is the exit status."""
    pid = os.fork()
    if pid == 0:
        _be_child(work, log)
    started, stopped = time.monotonic(), None
    while not (waited := os.wait4(pid, os.WNOHANG))[0]:
        hangs = time.monotonic() - started > MOST_S or _processor_seconds(pid) > LONGEST_S
        if hangs or _resident(pid) > STOPPED_AT:
            stopped = "hang" if hangs else "above 2 GB"
            os.killpg(pid, signal.SIGKILL)
            waited = os.wait4(pid, 0)
            break
        time.sleep(LOOK_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it has left running
    said, status = log.read_text(errors="replace")[-3000:], os.waitstatus_to_exitcode(waited[1])
    if stopped is None and waited[2].ru_maxrss * 1024 > MOST_BYTES:
        stopped = "above 2 GB"
    elif stopped is None and (status < 0 or _CRASH.search(said) or (status and not said.strip())):
        stopped = "traceback"
    return Outcome(stopped or ("refused" if status else "taken"), said)


def _processor_seconds(pid: int) -> float:
    try:
        return sum(psutil.Process(pid).cpu_times()[:4])
    except psutil.NoSuchProcess:
        return 0.0


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _be_child(work: Callable[[], object], log: Path) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, file in ((0, nothing), (1, output), (2, output)):
            os.dup2(file, number)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = int(work() or 0)  # type: ignore[call-overload]
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def run_command(name: str, arguments: Sequence[str]) -> None:
    first, *rest = DOORS[name]
    if first == "-m":
        module, *words = rest
        sys.argv = [module, *words, *arguments]
        sys.modules.pop(module, None)  # as if it were run for the first time
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    sys.argv = [first, *rest, *arguments]
    sys.path.insert(0, str(Path(first).parent))
    runpy.run_path(first, run_name="__main__")
