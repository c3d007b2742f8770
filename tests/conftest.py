import gc
import inspect
import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings

from megatron_ibpo.basics.versions import machine

# `nohup`, and a shell that starts tests in the background, have children ignore these, and tests send them
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

gc.disable()  # while tests are collected: what they import is no garbage
STARTED = time.monotonic()
# marks of tests that start processes, which take long
STARTS = ("world", "forked", "new_process", "engine", "ray", "kernel")
BUDGET_S = 60  # that the tests of a file may take together before the summary names it; none fails by it

settings.register_profile("here", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("here")


@pytest.fixture(autouse=True)
def own_signal_handlers():
    """A command that a test calls in its own process answers signals in its own way; later tests send one."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def process_for_calls(context):
    with ProcessPoolExecutor(1, mp_context=context, initializer=gc.enable) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=200)
        pool.submit(os._exit, 0)  # what Python does at its own end takes two seconds


@pytest.fixture(scope="module")
def planner():
    """A process of its own, since a census leaves Megatron set up for a machine without CUDA."""
    from support.ranks import server

    yield from process_for_calls(server())


@pytest.fixture(scope="module")
def new_process():
    """A process of its own that has imported nothing."""
    yield from process_for_calls(multiprocessing.get_context("spawn"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    from support.tiny_models import make_qwen3, make_qwen3_next  # most tests need no torch

    place = tmp_path_factory.mktemp("models")
    return {"dense": make_qwen3(place / "dense", 0), "next": make_qwen3_next(place / "next", 0)}


@pytest.fixture(scope="module")
def shapes(models):
    from megatron_ibpo.models import read_hf_config

    return {name: read_hf_config(path) for name, path in models.items()}


@pytest.fixture
def world():
    """Stand for the world that each rank of a test is given."""


def pytest_pyfunc_call(pyfuncitem):
    """Run a test whose first parameter is `world` on forked ranks, as many as its mark or `ranks` says; one
    marked `forked` in a process that has imported as much as a rank, and one marked `new_process` in that of
    the fixture."""
    parameters = [*inspect.signature(pyfuncitem.obj).parameters]
    given = [pyfuncitem.funcargs[name] for name in parameters]
    if pyfuncitem.get_closest_marker("new_process"):
        pyfuncitem.funcargs["new_process"](pyfuncitem.obj, *given)
        return True
    is_forked = bool(pyfuncitem.get_closest_marker("forked"))
    if parameters[:1] != ["world"] and not is_forked:
        return None
    from support.ranks import run_ranks

    if is_forked:
        run_ranks(pyfuncitem.obj, 1, *given, timeout=280, has_world=False)
        return True
    size = pyfuncitem.funcargs.get("ranks") or pyfuncitem.get_closest_marker("world").args[0]
    run_ranks(pyfuncitem.obj, size, *given[1:], timeout=280)
    return True


def pytest_addoption(parser):
    parser.addoption("--results", type=Path, help="JSON file to which this run's results are added")


def pytest_collection_modifyitems(items):
    """Mark what carries no other mark as `unit`; files that start processes come first, as they take long."""
    long = set()
    for item in items:
        if any(item.get_closest_marker(name) for name in STARTS):
            long.add(item.path)
        elif not any(item.get_closest_marker(name) for name in ("slow", "lint")):
            item.add_marker("unit")
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter, config):
    """Say which system programs were missing and which files take long, and add what became of the tests to
    the file of --results, under how numbers were rounded."""
    for line in os.environ.get("NOT_TESTED", "").splitlines():
        terminalreporter.write_line(f"not tested: {line}")
    stats, seconds = terminalreporter.stats, Counter()
    for kind in ("", "passed", "failed"):
        for report in stats.get(kind, []):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    for file, own in seconds.most_common():
        if own > BUDGET_S:
            terminalreporter.write_line(f"{file} took {own:.0f} s, and a file has {BUDGET_S}")
    path = config.getoption("--results")
    if path is None:
        return
    found = json.loads(path.read_text()) if path.exists() else {"machine": machine(), "runs": {}}
    found["runs"][f"MKL_CBWR={os.environ.get('MKL_CBWR', 'AUTO')}"] = {
        "seconds": round(time.monotonic() - STARTED),
        **{kind: len(stats.get(kind, [])) for kind in ("passed", "skipped", "failed", "error")},
        "not_passed": sorted(report.nodeid for kind in ("failed", "error") for report in stats.get(kind, [])),
        "skipped_because": Counter(report.longrepr[2] for report in stats.get("skipped", [])),
        "seconds_of_files": {file: round(own, 1) for file, own in seconds.most_common(40)},
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
