"""The benchmark of the loss: what it claims without a GPU, and that its committed data are its own."""

import json

import bench_loss
import pytest

from support.paths import ROOT

RESULTS = ROOT / "tools" / "results"


def test_the_committed_predictions_are_what_the_script_predicts(tmp_path):
    bench_loss.main(bench_loss.Arguments(predict=True, save=tmp_path / "predicted.json"))
    fresh = json.loads((tmp_path / "predicted.json").read_text())
    assert fresh == json.loads((RESULTS / "bench_loss_predicted.json").read_text())
    assert fresh["kind"].startswith("prediction")
    largest = {"contestant": "ours", "tokens": 32768, "vocabulary": 151936, "masked": 0.0}
    (row,) = [row for row in fresh["rows"] if largest.items() <= row.items()]
    # three passes over 32768 x 151936 bf16 numbers at 4.3 TB/s
    assert row["floor_ms"] == round(3 * 2 * 32768 * 151936 / 4.3e12 * 1e3, 3)


def test_without_a_gpu_it_says_so_and_times_nothing(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit, match="no CUDA device"):
        bench_loss.main(bench_loss.Arguments(device="cuda"))
