"""The Triton kernels without a GPU: their own suite, in a process where Triton interprets."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parent.parent
SUITES = ["test_kernels.py", "test_layouts.py", "test_readme.py"]


def command(suite, marked="not slow"):
    variables = ["TRITON_INTERPRET=1", "OMP_NUM_THREADS=1", f"PYTHONPATH={ROOT}"]
    pytest_flags = ["-q", "--timeout=280", "-m", marked, str(ROOT / "tests/interpreted" / suite)]
    return ("env", *variables, sys.executable, "-m", "pytest", *pytest_flags)


@pytest.mark.parametrize(
    "beside",
    [
        *(pytest.param(command(suite), id=suite) for suite in SUITES),
        pytest.param(command("test_layouts.py", "slow"), id="more layouts", marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_the_suite_passes_under_the_interpreter(beside):
    status, output, errors = beside()
    assert status == 0, output + errors
    counts = dict(map(reversed, re.findall(r"(\d+) (passed|failed|skipped)", output)))
    assert set(counts) == {"passed"}, output  # nothing skipped in there unseen
