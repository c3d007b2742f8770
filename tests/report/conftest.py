"""Provides a run for the page to show."""

import pytest

from support.run_pages import record_run


@pytest.fixture
def run_dir(tmp_path):
    """Return two recorded steps of a run, with text that would harm a page that does not escape it."""
    return record_run(tmp_path)
