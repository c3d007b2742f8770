"""A pytest plugin of tools/mutants.py. The running test becomes coverage's context, its seconds are kept, and
tests run in the order in which the command line names them."""

import base64
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

SECONDS = "MUTANTS_SECONDS"
"""Environment variable: directory for the seconds of each test, one file per process."""
RUNNING = "MUTANTS_RUNNING"
"""Environment variable: file for the name of the test that runs."""
COVERED_TEST = "COVERED_TEST"
CONFIG = "COVERAGE_PROCESS_CONFIG"
"""Environment variable: settings of coverage in processes that are started, as base64 of JSON."""
_seconds: defaultdict[str, float] = defaultdict(float)


def test_of(item: pytest.Item) -> str:
    """Return FILE::FUNCTION, without parameters."""
    file = Path(item.path).relative_to(item.config.rootpath).as_posix()
    return f"{file}::{getattr(item, 'originalname', item.name)}"


def switch(context: str) -> None:
    """Name what runs from now on, here and in processes that are started."""
    measured = coverage.Coverage.current()
    if measured is None:
        return
    measured.switch_context(context)
    os.environ[COVERED_TEST] = context  # for ranks, which are forked from one server
    config = json.loads(base64.b64decode(os.environ[CONFIG])) | {"context": context}
    os.environ[CONFIG] = base64.b64encode(json.dumps(config).encode()).decode()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    switch(test_of(item))
    if place := os.environ.get(RUNNING):
        Path(place).write_text(test_of(item))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[Any]:
    """Name the file alone while something is set up that several of its tests share."""
    if fixturedef.scope == "function":
        return (yield)
    test = test_of(request._pyfuncitem)
    switch(test.partition("::")[0])
    try:
        return (yield)
    finally:
        switch(test)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid.partition("[")[0]] += report.duration


def pytest_sessionfinish() -> None:
    if place := os.environ.get(SECONDS):
        Path(place, f"{os.getpid()}.json").write_text(json.dumps(_seconds))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {named: place for place, named in enumerate(config.args)}

    def place(item: pytest.Item) -> int:
        test = test_of(item)
        return places.get(test, places.get(test.partition("::")[0], len(places)))

    items.sort(key=place)
