"""Predictions of a run: what is said of it, the search for layouts, and the picture of a step."""

from dataclasses import replace

import matplotlib.image
import pytest

from megatron_ibpo.commands.plan import main as plan_command
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.plan.feasibility import make_plan
from megatron_ibpo.plan.parameter_count import estimate_census
from megatron_ibpo.plan.prediction import changes, lines, setting_of
from megatron_ibpo.plan.search import search
from megatron_ibpo.plan.timeline import LANES, plot_step, timeline
from megatron_ibpo.run.settings import parse_config
from support.paths import ROOT

MODELS = ROOT / "examples/models"


def setting(*flags):
    model, recipe = MODELS / "qwen3_4b", ROOT / "examples/recipes/qwen3_4b_ibpo.yaml"
    asked = ["--config", str(recipe), "--hf-checkpoint", str(model), "--dry-run-hardware", "h100", *flags]
    return setting_of(parse_config(asked), read_hf_config(model), 8)


def test_a_run_is_predicted_with_its_interval_its_price_and_what_would_help():
    asked = setting("--recompute-granularity", "full")
    total = asked.times().total
    said = "\n".join(lines(asked, steps=100, price=2.0))
    hours = total * 100 * 8 / 3600
    price = f"{hours:,.0f} GPU-hours, {2 * hours:,.0f} at 2 per hour"
    for part in (price, "a step: ", "between", "a checkpoint: training waits "):
        assert part in said
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
    assert picture.exists()
    out = capsys.readouterr().out.splitlines()
    seconds = [float(line.split()[1]) for line in out[:3]]
    assert seconds == sorted(seconds)
    best = parse_config(["--config", str(recipe)])
    assert f"TP{best.parallel.tensor_model_parallel_size} " in out[0]
    large = ["--gpus", "1", "--hf-checkpoint", str(MODELS / "qwen3_235b_a22b")]
    assert plan_command([*asked, *large]) == 2
    assert "no layout of qwen3_235b_a22b fits 1 GPUs of h200" in capsys.readouterr().err


def test_long_sequences_are_shared_where_one_rank_does_not_hold_them():
    recipe, model = ROOT / "examples/recipes/qwen3_next_80b_a3b_ibpo.yaml", MODELS / "qwen3_next_80b_a3b"
    lengths = ["--rollout-max-context-len", "131072", "--rollout-max-response-len", "98304"]
    config = parse_config(["--config", str(recipe), "--hf-checkpoint", str(model), *lengths])
    found = search(config, 16, "h100", most=4)
    shared = [layout for layout in found if layout.setting.layout.context > 1]
    assert shared
    for layout in shared:
        parallel = replace(layout.config.parallel, context_parallel_size=1)
        alone = make_plan(replace(layout.config, parallel=parallel), 16, estimate_census)
        assert any(problem.startswith("training takes") for problem in alone.problems)


def test_a_step_is_drawn_with_a_lane_for_each_who_works(tmp_path):
    asked = setting()
    spans, times = timeline(asked), asked.times()
    lanes = {span.lane for span in spans}
    assert {"engines", "corrections", "trainer", "optimizer", "weight update"} <= lanes <= set(LANES)
    ends = {span.name: span.end for span in spans}
    assert ends["responses"] == pytest.approx(times.sampling)
    assert ends["corrections"] == pytest.approx(times.sampling + times.corrections)
    assert max(ends.values()) == pytest.approx(times.total)
    path = tmp_path / "step.png"
    plot_step(spans, LANES, path, title="a step")
    assert matplotlib.image.imread(path).shape[1] > 900
    # ahead of training, engines and trainers work side by side
    ahead = replace(asked, colocated=False, task=replace(asked.task, staleness=4))
    begins = {span.name: span.begin for span in timeline(ahead)}
    assert begins["log-probs"] == begins["prompts"] == 0
    ends = {span.name: span.end for span in timeline(ahead)}
    assert max(ends["corrections"], ends["optimizer"]) == pytest.approx(begins["weight update"])
    assert ends["other"] == pytest.approx(ahead.times().total)
