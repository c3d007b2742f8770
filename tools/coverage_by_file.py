"""A pytest plugin of tools/mutants.py: coverage has the test file that runs as its context.

Processes that a test starts have it too (`context = ${IBPO_TEST_FILE}`), but for those of `ranks`, which are
forked from one server for all files.
"""

import os
from pathlib import Path

import coverage
import pytest

CONTEXT = "IBPO_TEST_FILE"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Switch where another file begins."""
    name = Path(item.path).relative_to(item.config.rootpath).as_posix()
    measured = coverage.Coverage.current()
    if measured is not None and os.environ.get(CONTEXT) != name:
        os.environ[CONTEXT] = name
        measured.switch_context(name)
