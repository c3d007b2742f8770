"""The Triton kernels without a GPU: their own suite, in a process where Triton interprets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("suite", ["test_kernels.py", "test_layouts.py", "test_readme.py"])
def test_the_suite_passes_under_the_interpreter(suite):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = ["-m", "pytest", "-q", "--timeout=280", str(ROOT / "tests" / "interpreted" / suite)]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=290, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(map(reversed, re.findall(r"(\d+) (passed|failed|skipped)", done.stdout)))
    assert set(counts) == {"passed"}, done.stdout  # nothing skipped in there unseen
