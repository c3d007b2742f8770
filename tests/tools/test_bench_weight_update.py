"""tools/bench_weight_update.py measures and predicts what it says."""

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
def test_the_prediction_counts_the_bytes_of_the_plan(tmp_path):
    saved = tmp_path / "predicted.json"
    said = run("predict", "--models", "30B-A3B", "--gpus", "8", "--save", str(saved), timeout=120)
    assert "Predictions" in said
    assert "published by others" in said
    record = json.loads(saved.read_text())
    assert record["kind"] == "prediction"
    colocated, separate = record["rows"]
    # 30.53 B parameters, of which TP2·EP8 on 8 GPUs has 1/8 of the experts (28.99 B) on each
    for row in (colocated, separate):
        assert row["weights_gb"] == pytest.approx(61.064, abs=0.001)
        assert row["engine_worker_needs_about_gb"] == pytest.approx(61.064 / 4, abs=0.001)
    assert colocated["gathered_by_a_gpu_gb"] + colocated["sent_by_busiest_trainer_gb"] > 61.064
    assert colocated["sent_by_busiest_trainer_gb"] == pytest.approx(61.064 / 8, rel=0.05)
    assert colocated["seconds_one_nic"] == pytest.approx(colocated["gathered_by_a_gpu_gb"] / 450, abs=0.001)
    assert separate["seconds_one_nic"] == pytest.approx(61.064 / 450, abs=0.001)
    assert separate["gathered_by_a_gpu_gb"] < 61.064 * 3 / 4  # rank 0 of 4 has more than a quarter already


@pytest.mark.slow
def test_an_update_is_measured_beside_a_broadcast(tmp_path):
    saved = tmp_path / "update.json"
    options = ("--families", "dense", "--ranks", "2", "--gigabytes", "0.2", "--rounds", "2")
    run("update", *options, "--save", str(saved), timeout=280)
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
