"""The runs of a study as child processes, each with a time-out; finished runs are recognised."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron_ibpo.basics.supervised import end_group
from megatron_ibpo.basics.text import changed_settings, listed
from megatron_ibpo.config import ConfigError
from megatron_ibpo.report import read_rows
from megatron_ibpo.study.plan import PlannedRun, Study

Program = Callable[[Sequence[str]], int]
"""Entry point of a child (`commands.train.main`): takes the flags of a run and returns the exit status."""
PRELOADED = [
    __name__,
    "megatron_ibpo.run.in_one_process",
    "megatron_ibpo.run.open",
    "megatron_ibpo.report.plots",
    "transformers.tokenization_utils_tokenizers",
]
"""Modules imported once, in the process that all children are forked from; it saves each seven seconds."""
LOOK_EVERY_S = 2.0
GRACE_S = 30.0
"""Seconds for a child to finish its step after the first signal, and again to end after the second."""

Outcome = Literal["finished", "failed", "timed out", "stopped"]


def summary(run: PlannedRun) -> dict[str, Any] | None:
    """Return the summary that the run left, or None."""
    path = run.directory / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def is_finished(run: PlannedRun) -> bool:
    """Return whether this very run was completed before. Raises ConfigError if its directory holds a finished
    run with another configuration."""
    run_summary = summary(run)
    if run_summary is None or run_summary["status"] != "finished":
        return False
    old_config = _planned_path(run).read_text(encoding="utf-8")
    if old_config != run.config:
        changed = changed_settings(yaml.safe_load(old_config), yaml.safe_load(run.config))
        raise ConfigError(
            f"{run.directory} holds a run with other settings than the study asks for now "
            f"({listed(changed, '; ', most=3)}): choose another directory for the results, or "
            "remove that run"
        )
    return True


def execute(
    run: PlannedRun,
    study: Study,
    program: Program,
    show: Callable[[dict[str, Any]], None],
    stop: threading.Event,
) -> Outcome:
    """Run a run from its start, after removing the remains of an interrupted attempt. Its output goes to a
    .log file next to its directory. The child and all its processes have ended when this function returns or
    raises.

    Args:
        show: called from time to time with the newest row of the run's metrics.
        stop: ends the run once it is set.
    """
    if run.directory.exists():
        shutil.rmtree(run.directory)
    run.directory.parent.mkdir(parents=True, exist_ok=True)
    _planned_path(run).write_text(run.config, encoding="utf-8")
    # last, so that the study's number of processes overrides a recipe's
    arguments = [*run.arguments, "--num-trainers", str(study.processes)]
    # read when the process starts from which all children are forked
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    log = run.directory.with_suffix(".log")
    child = server.Process(target=_in_child, args=(program, arguments, log, GRACE_S))
    child.start()
    try:
        in_time = _wait(child, study.run_timeout, lambda: _show_newest(run.directory, show), stop)
    finally:
        _end(child)
    if not in_time:
        return "stopped" if stop.is_set() else "timed out"
    return "finished" if child.exitcode == 0 else "failed"


def _in_child(program: Program, arguments: list[str], log: Path, grace: float) -> None:
    os.setsid()  # so that the child and all its processes can be signalled together
    threading.Thread(target=_end_with_study, args=(grace,), daemon=True).start()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["megatron_ibpo.commands.train", *arguments]  # recorded by the run as its command
    sys.exit(program(arguments))


def _end_with_study(grace: float) -> None:
    """End this child and its processes once the study's process is gone: killed, it cannot do so itself."""
    study = multiprocessing.parent_process()
    assert study is not None
    study.join()
    os.killpg(os.getpid(), signal.SIGINT)
    time.sleep(grace)
    end_group(os.getpid())
    os._exit(1)


def _planned_path(run: PlannedRun) -> Path:
    return run.directory.with_suffix(".config")


def _wait(child: ForkServerProcess, timeout: float, look: Callable[[], None], stop: threading.Event) -> bool:
    """Return whether the child ended by itself before the time-out and before `stop` was set."""
    deadline = time.monotonic() + timeout
    while (seconds_left := deadline - time.monotonic()) > 0 and not stop.is_set():
        child.join(min(LOOK_EVERY_S, seconds_left))
        if child.exitcode is not None:
            return True
        look()
    return False


def _end(child: ForkServerProcess) -> None:
    """Ask the child to stop, ask it to stop at once, then kill it."""
    assert child.pid is not None
    for _ in range(2):
        if child.exitcode is None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGINT)
            child.join(GRACE_S)
    end_group(child.pid)
    child.kill()  # in case it did not get its own group
    child.join(GRACE_S)


def _show_newest(directory: Path, show: Callable[[dict[str, Any]], None]) -> None:
    metrics = directory / "metrics.jsonl"
    if metrics.exists() and (rows := read_rows(metrics)):
        show(rows[-1])
