"""tools/bench_weight_update.py measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.paths import ROOT

TOOL = ROOT / "tools" / "bench_weight_update.py"


def run(*arguments: str, timeout: float) -> str:
    done = subprocess.run(
        [sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_update_is_measured_beside_a_broadcast(tmp_path):
    saved = tmp_path / "update.json"
    options = ("--families", "dense", "--ranks", "2", "--gigabytes", "0.2", "--rounds", "2")
    run(*options, "--save", str(saved), timeout=280)
    (result,) = json.loads(saved.read_text())["results"]
    seconds = result["all_seconds"]
    assert {kind: len(rounds) for kind, rounds in seconds.items()} == dict.fromkeys(
        ("plain", "transport", "load", "vllm"), 2
    )
    assert result["bytes_sent_over_needed"] == 1
    assert 0 < result["trainer_memory_rise_in_buckets"] < 2
    assert result["best"]["live_export_over_plain"] == pytest.approx(
        min(seconds["plain"]) / min(seconds["transport"]), rel=0.05
    )
