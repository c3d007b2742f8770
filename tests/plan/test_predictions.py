import json
import subprocess
import sys
from dataclasses import replace

import matplotlib.image
import pytest

from megatron_ibpo.basics.records import Correction, Group, Prompt, token_ids
from megatron_ibpo.commands.plan import main as plan_command
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.plan.calibration import MeasuredStep, Rates, calibrated, measure_rates, measured_step
from megatron_ibpo.plan.hardware import kind_of
from megatron_ibpo.plan.machine import Seen, find_machine, write_machine
from megatron_ibpo.plan.prediction import changes, compared, forecast, lines, setting_of
from megatron_ibpo.report import Report
from megatron_ibpo.report.stages import measured_seconds, prediction_error
from megatron_ibpo.run.settings import parse_config
from support.paths import ROOT
from support.samples import sample_of

MODELS = ROOT / "examples/models"


def setting(*flags):
    model, recipe = MODELS / "qwen3_4b", ROOT / "examples/recipes/qwen3_4b_ibpo.yaml"
    asked = ["--config", str(recipe), "--hf-checkpoint", str(model), "--dry-run-hardware", "h100", *flags]
    config = parse_config(asked)
    return setting_of(config, read_hf_config(model), 8, find_machine(config.run.dry_run_hardware))


def test_a_run_is_predicted_with_its_interval_its_price_and_what_would_help():
    asked = setting("--recompute-granularity", "full")
    total = asked.times().total
    said = "\n".join(lines(asked, steps=100, price=2.0))
    hours = total * 100 * 8 / 3600
    assert f"{hours:,.0f} GPU-hours, {2 * hours:,.0f} at 2 per hour" in said
    helping = changes(asked)
    assert len(helping) <= 3
    assert all(change.seconds < total for change in helping)
    assert "--recompute-granularity none" in {change.flag for change in changes(asked, most=99)}
    with pytest.raises(ValueError, match="--dry-run-response-len=99999 exceeds --rollout-max-response-len"):
        setting("--dry-run-response-len", "99999")


def test_search_finds_layouts_that_fit_fastest_first_and_writes_the_best(tmp_path, capsys):
    recipe, picture = tmp_path / "best.yaml", tmp_path / "step.png"
    asked = ["search", "--gpus", "2", "--hardware", "h200", "--hf-checkpoint", str(MODELS / "qwen3_0_6b")]
    assert plan_command([*asked, "--save", str(recipe), "--picture", str(picture), "--top", "3"]) == 0
    assert matplotlib.image.imread(picture).shape[1] > 900
    out = capsys.readouterr().out.splitlines()
    seconds = [float(line.split()[1]) for line in out[:3]]
    assert seconds == sorted(seconds)
    best = parse_config(["--config", str(recipe)])
    assert f"TP{best.parallel.tensor_model_parallel_size} " in out[0]
    large = ["--gpus", "1", "--hf-checkpoint", str(MODELS / "qwen3_235b_a22b")]
    assert plan_command([*asked, *large]) == 2
    assert "no layout of qwen3_235b_a22b fits 1 GPUs of h200" in capsys.readouterr().err


TINY = ROOT / "examples/tiny_qwen3_next"
SEEN = Seen(
    responses=tuple(map(float, range(14, 46, 2))), prompt=14.0, corrections=0.5, correction_prompt=60.0,
    trained=0.7,
)  # fmt: skip
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


def on(machine, config, prompts=None):
    """Seconds by stage of a step, of so many prompts, on this machine."""
    size = prompts or config.rollout.rollout_batch_size
    own = replace(config, rollout=replace(config.rollout, rollout_batch_size=size))
    return compared(setting_of(own, read_hf_config(TINY), 2, machine).times())


def told_by(steps, config):
    rates = Rates(matmul=4e10, copy=1e10)
    return calibrated(steps, rates, config, read_hf_config(TINY), 2, about="made up")


def made_up(config):
    """A machine whose figures are known: that of any steps, with other costs beyond arithmetic."""
    seconds = {"sampling": 1.0, "training": 1.0, "weights": 0.1, "step": 2.2}
    found = told_by([MeasuredStep(seconds=seconds, prompts=4, seen=SEEN)], config)
    reached = replace(
        found.known.coefficients, engine_layer=2e-3, engine_sequence=5e-5, train_layer=4e-3, step=0.01,
        update=1e-3, matmul=0.05, experts=0.05, attention=0.05,
    )  # fmt: skip
    return replace(found, known=replace(found.known, coefficients=reached))


def steps_on(machine, config, times=1.0):
    """Steps of 4 and 16 prompts, which take so many times what they should."""
    found = []
    for prompts in (4, 16):
        seconds = {name: times * value for name, value in on(machine, config, prompts).items()}
        found.append(MeasuredStep(seconds=seconds, prompts=prompts, seen=SEEN))
    return found


@pytest.fixture
def here(config, tmp_path):
    """A machine as steps of two sizes tell, and its file."""
    machine, path = told_by(steps_on(made_up(config), config), config), tmp_path / "here.yaml"
    write_machine(machine, path)
    return machine, path


def test_steps_of_two_sizes_tell_what_a_third_takes(config, here):
    true = made_up(config)
    for prompts in (4, 8, 64):
        assert on(here[0], config, prompts) == pytest.approx(on(true, config, prompts), rel=1e-3)
    # of each size the step of middle length counts: one of three stood still
    steps = [step for times in (9.0, 1.0, 0.5) for step in steps_on(true, config, times)]
    assert on(told_by(steps, config), config) == pytest.approx(on(true, config), rel=1e-3)
    with pytest.raises(ValueError, match="no step had anything to train on"):
        told_by([], config)


def test_rates_and_a_step_are_what_was_done_in_the_time():
    ticks = iter(range(1000))
    rates = measure_rates(clock=lambda: float(next(ticks)))  # each product and copy takes a second
    assert rates == Rates(matmul=2 * 768**3, copy=2 * 64 * 1024**2)

    def sample(prompt, written):
        return sample_of([1] * prompt, [1] * written)

    prompt = Prompt(0, token_ids([1] * 10), 1, "", "", "")
    responses = [sample(10, 20), sample(10, 40)]
    groups = [Group(prompt, responses, [Correction(0, (), sample(70, 30))]), Group(prompt, responses)]
    found = measured_step(RECORDED[1], groups, tokens_trained=100)
    assert found.prompts == 2
    assert found.seconds == measured_seconds([ROWS[0], ROWS[1]])
    assert (found.seen.prompt, found.seen.corrections, found.seen.correction_prompt) == (10, 0.25, 60)
    assert found.seen.trained == 100 / (4 * (10 + 30) * 1.25)
    assert (min(found.seen.responses), max(found.seen.responses)) == (20, 40)


def test_a_machine_is_read_as_it_was_written_and_predicts_its_own_runs_alone(config, tmp_path, here):
    found, path = here
    read = find_machine(str(path))
    assert (read.workload, read.hardware.name, read.hardware.starts_ahead) == (found.workload, "here", False)
    (tmp_path / "other.yaml").write_text("about: nothing\n")
    for name, says in (
        ("other", "not a file of `ibpo calibrate`: KeyError"),
        ("none", "No such file or directory; `ibpo calibrate` writes it"),
    ):
        with pytest.raises(ValueError, match=says):
            find_machine(str(tmp_path / f"{name}.yaml"))
    shape = read_hf_config(TINY)
    config.run.dry_run_hardware = str(path)
    assert forecast(config, shape, 2, "CPU").seconds == pytest.approx(on(found, config), rel=1e-2)
    other = forecast(config, shape, 1, "CPU")
    assert other.seconds is None
    assert "on 2 trainers as TP2 PP1 CP1 EP2, engines of 1 beside them (vllm), but this run is" in other.said
    config.run.dry_run_hardware = None
    assert "`ibpo calibrate` measures a machine" in forecast(config, shape, 2, "CPU").said


def test_gpus_are_known_by_the_names_that_they_give_themselves():
    names = {
        "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA H20": "h20",
        "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA GB200": "gb200", "NVIDIA B200": "b200",
        "AMD Instinct MI300X": "mi300x", "NVIDIA A100-SXM4-40GB": None, "NVIDIA H100 PCIe": None,
        "NVIDIA GeForce RTX 4090": None, "CPU": None,
    }  # fmt: skip
    assert {name: kind_of(name) for name in names} == names


def test_a_run_keeps_its_prediction_and_ends_with_the_error(config, here, tmp_path):
    config.run.run_dir = tmp_path
    with Report(config) as report:
        report.predicted(forecast(config, read_hf_config(TINY), 2, "CPU"))
        assert report.finish()["prediction_error"] is None
    assert not (tmp_path / "prediction.json").exists(), "nothing was predicted"
    config.run.dry_run_hardware = str(here[1])
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


@pytest.mark.ray
@pytest.mark.slow
def test_a_calibrated_machine_predicts_a_run(tmp_path):
    """Commands are used as users use them; the error itself is the machine's affair."""
    machine, run_dir = tmp_path / "here.yaml", tmp_path / "run"
    flags = ["--config", str(ROOT / "examples/recipes/tiny_qwen3_study.yaml"), "--rollout-backend", "lean"]
    flags += ["--dry-run-hardware", str(machine)]
    few = ["--num-rollout", "3", "--eval-num-prompts", "0", "--operator-skill-prompts", "0", "--no-save"]
    for words in (["calibrate", *flags], ["train", *flags, *few, "--run-dir", str(run_dir)]):
        command = [sys.executable, "-m", "megatron_ibpo.commands.main", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
    error = json.loads((run_dir / "summary.json").read_text())["prediction_error"]
    assert set(error) == {"sampling", "training", "weights", "step"}
