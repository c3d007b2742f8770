"""The benchmark of the data plane: both paths carry every token."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from support.paths import ROOT

SCRIPT = ROOT / "tools" / "bench_data_plane.py"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("path", ["arrays", "lists"])
def test_every_token_arrives(path):
    """The script itself compares the tokens that the ranks laid out with those the engines had."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--only", path, "--samples", "64", "--tokens", "500"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert (row["path"], row["samples"], row["tokens"]) == (path, 64, 500)
    assert row["seconds"] > 0
