"""Other processes: for one call, to answer several in the manner of `EngineLink`, or to run pytest."""

import importlib.util
import multiprocessing
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from job import Skipped

TIMEOUT_S = 60.0


class PipeLink:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def begin(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def result(self, timeout: float) -> Any:
        if not self._pipe.poll(timeout):
            raise RuntimeError(f"no answer within {timeout:g} seconds")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise RuntimeError(str(answer))
        return answer

    def ask(self, method: str, *arguments: Any) -> Any:
        self.begin(method, *arguments)
        return self.result(TIMEOUT_S)


def apart(function: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
    """Call a function in a process of its own, which a trainer needs: it leaves Megatron's groups behind."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *arguments, **named).result()


@contextmanager
def beside(make: Callable[[], Any]) -> Iterator[PipeLink]:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(there, make), daemon=True)
    process.start()
    try:
        yield PipeLink(here)
    finally:
        process.kill()
        process.join()


def _serve(pipe: Connection, make: Callable[[], Any]) -> None:
    served = make()
    while True:
        method, arguments = pipe.recv()
        try:
            answer = getattr(served, method)(*arguments)
        except Exception as error:
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        pipe.send(answer)


def run_pytest(arguments, scratch, environment, prefix=()) -> dict[str, Any]:
    """Return how many tests passed, failed and were skipped, what failed and why, and the exit status."""
    for module in ("pytest", "hypothesis"):
        if importlib.util.find_spec(module) is None:
            raise Skipped(f"{module} is not installed")
    results = scratch / "junit.xml"
    flags = ["-q", "-p", "no:cacheprovider", "--durations=5", f"--junitxml={results}"]
    command = [*prefix, sys.executable, "-m", "pytest", *flags, *arguments]
    status = subprocess.run(
        command, cwd=Path(__file__).resolve().parents[2], env=environment, stdin=subprocess.DEVNULL
    ).returncode
    counts = {"exit_status": status, "passed": 0, "failed": 0, "skipped": 0, "failures": {}}
    if not results.exists():
        return counts
    for case in ElementTree.parse(results).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error")]
        kind = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        counts[kind] += 1
        if bad:
            counts["failures"][case.get("name")] = (bad[0].get("message") or "")[:300]
    return counts
