"""The Triton kernels without a GPU: their own suite, in a process where Triton interprets."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from support.paths import ROOT

pytest.importorskip("triton")

pytestmark = pytest.mark.kernel


def command(*suites, marked="not slow"):
    variables = ["TRITON_INTERPRET=1", "OMP_NUM_THREADS=1", f"PYTHONPATH={ROOT}"]
    files = [str(ROOT / "tests/interpreted" / suite) for suite in suites]
    pytest_flags = ["-q", "--timeout=280", "-m", marked, *files]
    return ["env", *variables, sys.executable, "-m", "pytest", *pytest_flags]


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(command("test_kernels.py", "test_layouts.py", "test_readme.py"), id="quick"),
        pytest.param(command("test_traced_terms.py"), id="terms"),
        pytest.param(command("test_layouts.py", marked="slow"), id="layouts", marks=pytest.mark.slow),
    ],
)
def test_the_suite_passes_under_the_interpreter(program):
    done = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(map(reversed, re.findall(r"(\d+) (passed|failed|skipped)", done.stdout)))
    assert set(counts) == {"passed"}, done.stdout  # nothing skipped in there unseen
