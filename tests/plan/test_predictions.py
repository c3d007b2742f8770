import json

import pytest

from megatron_ibpo.commands.search import main as search
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.plan.hardware import kind_of, read_hardware
from megatron_ibpo.plan.prediction import forecast, lines, setting_of
from megatron_ibpo.report import Report
from megatron_ibpo.report.stages import prediction_error
from megatron_ibpo.run.settings import parse_config
from support.paths import ROOT

MODELS = ROOT / "examples/models"


def setting(*flags):
    model, recipe = MODELS / "qwen3_4b", ROOT / "examples/recipes/qwen3_4b_ibpo.yaml"
    asked = ["--config", str(recipe), "--hf-checkpoint", str(model), *flags]
    config = parse_config(asked)
    return setting_of(config, read_hf_config(model), 8, read_hardware("h100"))


def test_a_run_is_predicted_with_its_interval_and_its_price():
    asked = setting("--recompute-granularity", "full")
    total = asked.times().total
    said = "\n".join(lines(asked, steps=100, price=2.0))
    hours = total * 100 * 8 / 3600
    assert f"{hours:,.0f} GPU-hours, {2 * hours:,.0f} at 2 per hour" in said
    with pytest.raises(ValueError, match="--dry-run-response-len=99999 exceeds --rollout-max-response-len"):
        setting("--dry-run-response-len", "99999")


def test_search_ranks_fitting_layouts_by_speed_and_saves_the_best(tmp_path, capsys):
    recipe = tmp_path / "best.yaml"
    flags = ["--gpus", "2", "--hardware", "h200", "--hf-checkpoint", str(MODELS / "qwen3_0_6b")]
    assert search([*flags, "--save", str(recipe), "--top", "3"]) == 0
    out = capsys.readouterr().out.splitlines()
    seconds = [float(line.split()[1]) for line in out[:3]]
    assert seconds == sorted(seconds)
    best = parse_config(["--config", str(recipe)])
    assert f"TP{best.parallel.tensor_model_parallel_size} " in out[0]
    large = ["--gpus", "1", "--hf-checkpoint", str(MODELS / "qwen3_235b_a22b")]
    assert search([*flags, *large]) == 2
    assert "no layout of qwen3_235b_a22b fits 1 GPUs of h200" in capsys.readouterr().err


TINY = ROOT / "examples/tiny_qwen3_next"
RECORDED = [
    {"report": 0.0, "save": 0.0, "sample": 30.0, "credit": 0.1, "train": 20.0, "sync": 2.0},
    {"report": 0.0232, "save": 0.0, "sample": 11.1408, "credit": 0.0133, "train": 3.6502, "sync": 0.5034},
    {"report": 0.0183, "save": 0.0, "sample": 11.7488, "credit": 0.013, "train": 3.7796, "sync": 0.7048},
    {"report": 0.0149, "save": 0.0, "sample": 12.4941, "credit": 0.0235, "train": 3.8545, "sync": 0.6468},
]
"""Seconds by stage of a healthy run: three steps as they were recorded, after one that warmed up."""
ROWS = [{"kind": "step", "step": step, "seconds": seconds} for step, seconds in enumerate(RECORDED, 1)]


@pytest.fixture
def config():
    return parse_config(["--config", str(ROOT / "examples/recipes/tiny_qwen3_next_ibpo.yaml")])


def test_gpus_are_known_by_the_names_that_they_give_themselves():
    names = {
        "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA H20": "h20",
        "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA GB200": "gb200", "NVIDIA B200": "b200",
        "AMD Instinct MI300X": "mi300x", "NVIDIA A100-SXM4-40GB": None, "NVIDIA H100 PCIe": None,
        "NVIDIA GeForce RTX 4090": None, "CPU": None,
    }  # fmt: skip
    assert {name: kind_of(name) for name in names} == names


def test_a_run_keeps_its_prediction_and_ends_with_the_error(config, tmp_path):
    config.run.run_dir = tmp_path
    with Report(config) as report:
        report.predicted(forecast(config, read_hf_config(TINY), 2, "CPU"))
        assert report.finish()["prediction_error"] is None
    assert not (tmp_path / "prediction.json").exists(), "nothing was predicted"
    config.run.dry_run_hardware = "h100"
    expected = forecast(config, read_hf_config(TINY), 2, "CPU")
    with Report(config) as report:
        report.predicted(expected)
        for step, seconds in enumerate(RECORDED, 1):
            report.step(step, {"reward": 0.5}, seconds)
        summary = report.finish()
    kept = json.loads((tmp_path / "prediction.json").read_text())
    assert kept == pytest.approx(expected.seconds, abs=1e-4)
    assert summary["prediction_error"] == prediction_error(kept, ROWS)
    predicted = {"sampling": 11.7488 * 1.1, "training": 3.7796 / 2, "weights": 0.6468, "step": 2 * 16.2462}
    # over the median of all steps but the first; their sums are 15.3077, 16.2462 and 17.0189
    expected_error = {"sampling": 0.1, "training": -0.5, "weights": 0.0, "step": 1.0}
    assert prediction_error(predicted, ROWS) == pytest.approx(expected_error, abs=1e-9)
    assert prediction_error(predicted, ROWS[:1]) is None
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
