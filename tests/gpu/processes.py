"""Other processes: for one call, to answer several in the manner of `EngineLink`, or to run pytest."""

import importlib.util
import multiprocessing
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from job import Skipped, check

TIMEOUT_S = 60.0
one_process = partial(ProcessPoolExecutor, 1, mp_context=multiprocessing.get_context("spawn"))


def apart(function, *arguments, **named):
    """Call a function in a process of its own, which a trainer needs: it leaves Megatron's groups behind."""
    with one_process() as pool:
        return pool.submit(function, *arguments, **named).result()


class Link:
    def __init__(self, pool):
        self._pool, self._begun = pool, []

    def begin(self, method, *arguments):
        self._begun.append(self._pool.submit(_answer, method, arguments))

    def result(self, timeout=TIMEOUT_S):
        return self._begun.pop(0).result(timeout)

    def ask(self, method, *arguments):
        self.begin(method, *arguments)
        return self.result()


@contextmanager
def beside(make):
    """An object that another process makes, and whose methods it calls."""
    with one_process(initializer=_serve, initargs=(make,)) as pool:
        yield Link(pool)


def _serve(make):
    _answer.served = make()


def _answer(method, arguments):
    return getattr(_answer.served, method)(*arguments)


def pass_pytest(job, arguments, environment, *, packages=(), prefix=(), workers=4):
    """Note how many tests passed, failed and were skipped, what failed and why, and the exit status."""
    for module in ("pytest", "hypothesis", *packages):
        if importlib.util.find_spec(module) is None:
            raise Skipped(f"{module} is not installed")
    results = job.scratch / "junit.xml"
    flags = ["-q", "-p", "no:cacheprovider", "--durations=5", f"--junitxml={results}"]
    if workers and job.is_large and importlib.util.find_spec("xdist") is not None:
        flags += ["-n", str(workers), "--dist", "worksteal"]
    command = [*prefix, sys.executable, "-m", "pytest", *flags, *arguments]
    root = Path(__file__).resolve().parents[2]
    status = subprocess.run(command, cwd=root, env=environment, stdin=subprocess.DEVNULL).returncode
    counts = {"exit_status": status, "passed": 0, "failed": 0, "skipped": 0, "failures": {}}
    for case in ElementTree.parse(results).iter("testcase") if results.exists() else ():
        bad = [child for child in case if child.tag in ("failure", "error")]
        counts["failed" if bad else "skipped" if case.find("skipped") is not None else "passed"] += 1
        if bad:
            counts["failures"][case.get("name")] = (bad[0].get("message") or "")[:300]
    job.note(**counts, summary=f"{counts['passed']} tests passed, {counts['failed']} failed")
    check(counts["passed"] > 0 and not counts["failures"], f"pytest: {counts}")
    return status
