"""A pytest plugin of tools/mutants.py: coverage has the test file that runs as its context."""

from pathlib import Path

import coverage
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tell coverage which file this test is of."""
    measured = coverage.Coverage.current()
    if measured is not None:
        measured.switch_context(Path(item.path).relative_to(item.config.rootpath).as_posix())
