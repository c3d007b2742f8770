"""The benchmark of the data plane: both paths carry every token, and what is committed keeps its promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tools" / "bench_data_plane.py"
RESULTS = ROOT / "tools" / "results" / "bench_data_plane.json"


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


def test_the_committed_results_keep_what_was_promised():
    kept = json.loads(RESULTS.read_text())
    whole = [row for row in kept["rows"] if row["samples"] == 4096]
    assert {row["path"] for row in whole} == {"arrays"}
    assert all(row["raw_mb"] == 4096 * 16384 * 9 / 2**20 for row in whole)
    assert min(row["seconds"] for row in whole) <= kept["wanted"]["seconds"] == 10
    assert max(row["driver_peak_over_raw"] for row in whole) <= kept["wanted"]["driver_peak_over_raw"] == 2.5
    quarter = {row["path"]: row for row in kept["rows"] if row["samples"] == 1024}
    assert quarter["arrays"]["seconds"] < quarter["lists"]["seconds"]
