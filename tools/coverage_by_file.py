"""A pytest plugin of tools/mutants.py: the running test file becomes coverage's context."""

from pathlib import Path

import coverage
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tell coverage the file of this test."""
    measured = coverage.Coverage.current()
    if measured is not None:
        measured.switch_context(Path(item.path).relative_to(item.config.rootpath).as_posix())
