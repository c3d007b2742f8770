import fcntl
import gzip
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megatron_ibpo.basics.user_files import JSON_BYTES
from megatron_ibpo.config import ConfigError, config_yaml
from megatron_ibpo.run.settings import parse_config
from megatron_ibpo.study import plan, run_results, runs, statistics
from megatron_ibpo.study.claims import Claim, compare_all, compare_at_equal_amounts, judge_claims, read_claims
from megatron_ibpo.study.findings import Findings, read_findings, write_findings
from megatron_ibpo.study.page import write_page
from megatron_ibpo.study.plan import (
    PublishedClaim,
    Study,
    Task,
    Tried,
    Tuning,
    beyond,
    choose,
    grid_points,
    plan_runs,
)  # fmt: skip
from megatron_ibpo.study.run_results import RunResult, compare, compare_at_equal_steps, compare_overall
from megatron_ibpo.study.statistics import analyse, estimate, holm, power, seeds_needed, shown_p
from megatron_ibpo.study.study_files import method_settings, read_study
from megatron_ibpo.study.study_run import conduct, run_all
from megatron_ibpo.study.table import markdown, tables
from support import stand_in_training
from support.paths import ROOT
from support.stand_in_training import failing, stubborn
from support.waiting import eventually, has_ended


@pytest.fixture(autouse=True)
def only_the_stand_in_for_training_is_preloaded(monkeypatch):
    monkeypatch.setattr(runs, "PRELOADED", [runs.__name__, stand_in_training.__name__])


@pytest.fixture
def written(tmp_path):
    """Write a study of two methods and two seeds with these changes, and return its path."""

    def write(**changes):
        content = {
            "recipe": str(ROOT / "examples/recipes/tiny_qwen3_study.yaml"), "baseline": "gspo",
            "common": {"hf-checkpoint": str(ROOT / "examples/tiny_qwen3")}, "seeds": [0, 1],
            "methods": {"gspo": {"advantage-estimator": "gspo"}, "dr": {"advantage-estimator": "dr-grpo"}},
            "budget": 1e11, "budget-unit": "flops",
        } | changes  # fmt: skip
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


def training(*, best=(), gains=(), pause=0.0):
    """Stand in for training: leave what a run with known accuracy leaves."""
    return partial(stand_in_training.train, best=dict(best), gains=dict(gains), pause=pause)


def conducted(tmp_path, path, program, **settings):
    """(complete, what was said, the findings)"""
    said = io.StringIO()
    console = Console(file=said, width=10_000)
    complete = conduct(read_study([path]), tmp_path / "out", program, console, **settings)
    kept = tmp_path / "out/results.json"
    return complete, said.getvalue(), read_findings(kept) if kept.exists() else None


def test_a_study_tunes_estimates_power_compares_and_confirms(tmp_path, written):
    """dr is better. The best learning rates lie beyond the grid: gspo's is found, and dr's is always the
    last, which is left after four more values."""
    program = training(best={"gspo": 9e-4, "dr-grpo": 0.1}, gains={"dr-grpo": 0.1})
    tune = {"grid": {"lr": [1e-4, 3e-4]}, "seeds": [50], "budget": 5e10}
    path = written(tune=tune, **{"pilot-seeds": [60, 61], "confirm-seeds": [70, 71]})
    complete, said, found = conducted(tmp_path, path, program, runs_at_most=0)
    assert (complete, found) == (False, None)
    assert "10 runs to go, 8e+11 flops, duration unknown" in said
    complete, said, found = conducted(tmp_path, path, program, parallel=4)
    assert complete
    chosen = [(choice.setting, len(choice.tried), choice.at_edge) for choice in found.choices]
    assert chosen == [({"lr": 0.0243}, 2 + 4, ("lr",)), ({"lr": 9e-4}, 4, ())]  # dr, gspo
    assert found.power.needed >= 2
    assert "2 runs of gspo per task" in found.power.source
    assert said.index("power, from") < said.index("gspo, seed 0"), "before the runs"
    assert (len(found.runs), len(found.confirmation)) == (4, 4)
    assert {(run.method, run.lr) for run in found.runs} == {("gspo", 9e-4), ("dr", 0.0243)}
    assert max(run.accuracy[-1][1] for run in found.runs) < 0.65, "judged by other problems than tuned on"
    doubts = "2 seeds, 8 are needed; but the best lr of dr is at the edge of its grid"
    assert f"dr: better; but {doubts}\n" in said, "fresh seeds showed it again"
    assert "lr 0.0009" in (tmp_path / "out/page.html").read_text()
    shutil.rmtree(tmp_path / "out/confirmation/gspo")
    complete, said, found = conducted(tmp_path, path, program, runs_at_most=1)
    assert not complete
    assert found.confirmation == [], "half of it confirms nothing"
    assert "not run again with fresh seeds" in said
    assert "1 run to go, 1e+11 flops, about 0 minutes" in said  # half a minute
    assert conducted(tmp_path, path, program)[0]
    order = (tmp_path / "out/confirmation/gspo/order").read_text()
    assert len(order.split()) == 2, "finished runs are not repeated"


def test_a_study_names_void_shaping_and_tunes_the_named_methods(tmp_path, written):
    """Two learning rates for gspo alone, and two methods on two seeds: 2 + 4 runs."""
    tune = {"grid": {"lr": [1e-4, 3e-4]}, "seeds": [50], "budget": 5e10, "methods": ["gspo"]}
    methods = {"gspo": {"advantage-estimator": "gspo"}, "two": {"n-samples-per-prompt": 2}}
    _, said, _ = conducted(tmp_path, written(tune=tune, methods=methods), failing, runs_at_most=0)
    assert "6 runs to go" in said
    assert "warning" not in said, "gspo shapes nothing, and is tuned first"
    (tmp_path / "plain").mkdir()
    path = written(methods=methods, tune=None)
    _, said, _ = conducted(tmp_path / "plain", path, failing, runs_at_most=0)
    assert said.count("warning: two: with --n-samples-per-prompt 2") == 1
    study = read_study([written(tune=tune, methods=methods)])
    both = [result(method, seed, 0.5 + 0.1 * (method == "two")) for method in methods for seed in range(8)]
    (claim,) = compare_all(Findings(study, both)).claims
    assert "not tuned: two" in claim.blocks


def test_a_stopped_study_leaves_no_child(tmp_path, written, monkeypatch):
    """Two runs go side by side; an interrupt ends both, and none begins after it."""
    monkeypatch.setattr(runs, "LOOK_EVERY_S", 0.1)

    def begun():
        orders = (tmp_path / "out/runs").glob("*/order")
        return [int(line) for order in orders for line in order.read_text().split()]

    def interrupt_two():
        eventually(lambda: len(begun()) == 2, 40)
        os.kill(os.getpid(), signal.SIGINT)

    started = time.monotonic()
    threading.Thread(target=interrupt_two, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        conducted(tmp_path, written(), training(pause=60.0), parallel=2)
    assert time.monotonic() - started < 50
    assert len(begun()) == 2
    assert not any(map(psutil.pid_exists, begun()))
    path = written(**{"budget-unit": "accelerator-seconds"})
    with pytest.raises(ConfigError, match="slow each other down"):
        conducted(tmp_path, path, training(), parallel=2)


OWN = """
from megatron_ibpo.credit import Operator
SETTINGS = {"advantage-estimator": "gspo", "lr": 5.0e-4}
NUMBER = 3
class SameLength(Operator):
    def judge(self, groups, context): ...
def advantages(rewards): ...
def weigh(groups, advantages, context): ...
"""


def test_a_method_is_settings_a_recipe_or_an_import_path(tmp_path, monkeypatch):
    """A recipe and a module are where the user stands."""
    text = (ROOT / "docs/comparing-methods.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    mine = "advantage-estimator: gspo\nlr: 0.001\n"
    for name, content in {"documented.yaml": block, "mine.yaml": mine, "same_length.py": OWN}.items():
        (tmp_path / name).write_text(content)
    for shared in ("examples", "megatron_ibpo"):
        (tmp_path / shared).symlink_to(ROOT / shared)
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("same_length", None)  # another test's, as this one is for others
    plain = {"advantage-estimator": "gspo"}
    for spec, settings in [
        ({"lr": 1e-3}, {"lr": 1e-3}),
        ("mine.yaml", plain | {"lr": 0.001}),
        ("same_length:SETTINGS", plain | {"lr": 5e-4}),
        ("same_length:SameLength", {"ibpo-operator": "same_length:SameLength"}),
        ("same_length:advantages", plain | {"advantages": "same_length:advantages"}),
        ("same_length:weigh", plain | {"token-credit": "same_length:weigh"}),
    ]:
        assert method_settings(spec) == settings
    with pytest.raises(ConfigError, match="neither settings, an operator, an estimator nor"):
        method_settings("same_length:NUMBER")
    path = tmp_path / "documented.yaml"
    study = read_study([path])
    assert list(study.methods) == ["gspo", "ibpo", "mine", "near"]
    assert [len(grid_points(study.tune, method)) for method in study.methods] == [12, 12, 24, 12]
    study = read_study([path], {"seeds": 1}, add={"own": "mine.yaml"}, only=["near", "own"], tasks=["sums"])
    planned = plan_runs(study, tmp_path / "out", "main")
    assert [(run.task, run.method) for run in planned] == [("sums", m) for m in ("gspo", "near", "own")]
    assert yaml.safe_load(planned[1].config)["ibpo-operator"] == "same_length:SameLength"
    with pytest.raises(ConfigError, match=r"no method 'gspoo'; .*did you mean 'gspo'"):
        read_study([path], only=["gspoo"])
    with pytest.raises(ConfigError, match=r"no task 'sum'; .*did you mean 'sums'"):
        read_study([path], tasks=["sum"])
    # recipes are methods, too
    recipes = [tmp_path / "mine.yaml", ROOT / "examples/recipes/tiny_qwen3_study.yaml"]
    contents = [yaml.safe_load(path.read_text()) for path in recipes]
    common = contents[1] | {"hf-checkpoint": "examples/tiny_qwen3"}
    study = read_study(recipes, {"budget": 5.0, "baseline": "mine", "seeds": 3, "common": common})
    assert [*study.methods.values()] == contents
    assert len(plan_runs(study, tmp_path / "out", "main")) == 6
    with pytest.raises(ConfigError, match="needs baseline, budget"):
        read_study(recipes)
    sys.modules.pop("same_length")


def test_the_paired_t_test_by_hand_and_over_many_studies():
    """Differences .1, .2, .3: mean .2, standard error .1 / sqrt(3), t = 3.464 of two degrees of freedom, for
    which p = 1 - t / sqrt(t² + 2) has a closed form."""
    found, t = estimate([0.1, 0.2, 0.3]), 0.2 / (0.1 / math.sqrt(3))
    assert (found.p, found.spread) == pytest.approx((1 - t / math.sqrt(t**2 + 2), 0.1))
    assert found.high - found.mean == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    alone = estimate([0.2])
    assert (alone.mean, shown_p(alone.p)) == (0.2, "–")
    assert (estimate([0.2, 0.2]).p, estimate([0.0, 0.0]).p) == (0.0, 1.0)
    rng = np.random.default_rng(1)
    studies = 0.02 * rng.normal(size=(500, 8))
    for difference, often in ((0.0, 0.05), (0.02, power(0.02, 0.02, 8))):
        estimates = [estimate(own) for own in studies + difference]
        assert np.mean([estimate.p < 0.05 for estimate in estimates]) == pytest.approx(often, abs=0.03)
        covered = [estimate.low <= difference <= estimate.high for estimate in estimates]
        assert np.mean(covered) == pytest.approx(0.95, abs=0.03), (difference, often)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.randoms())
def test_holm_lies_between_the_raw_p_and_bonferroni(ps, random):
    adjusted = holm(ps)
    for p, found in zip(ps, adjusted, strict=True):
        assert p - 1e-12 <= found <= min(1.0, len(ps) * p) + 1e-12
    order = list(range(len(ps)))
    random.shuffle(order)
    assert holm([ps[i] for i in order]) == pytest.approx([adjusted[i] for i in order])
    # by hand: times 4, 3, 2, 1 in ascending order, and never below the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.01, math.nan, 0.02]) == pytest.approx([0.02, math.nan, 0.02], nan_ok=True)


def test_the_seeds_needed_equal_published_tables():
    """Pairs for a power of .8 at a two-sided level of .05 (Cohen 1988; G*Power gives the same)."""
    for effect, pairs in ((0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)):
        assert seeds_needed(0.02, 0.02 / effect) == pairs
        assert power(0.02, 0.02 / effect, pairs) >= 0.8 > power(0.02, 0.02 / effect, pairs - 1)
    pilot = [0.48, 0.50, 0.52]  # two methods that spread by .02 differ by .02 sqrt(2); three share the level
    found = analyse(pilot, seeds=8, tests=3, source="a pilot")
    assert found.spread == pytest.approx(0.02 * math.sqrt(2))
    assert found.level == pytest.approx(0.05 / 3)
    assert found.needed == seeds_needed(0.02, found.spread, 0.05 / 3) > 8
    assert found.spread_at_most == pytest.approx(found.spread * math.sqrt(2 / 0.4463), rel=1e-3)
    assert power(found.detectable, found.spread, 8, found.level) == pytest.approx(0.8, abs=1e-6)
    assert analyse([0.5], seeds=8, tests=1, source="one run") is None
    agreed = analyse([0.5, 0.5], seeds=2, tests=1, source="runs that all agree")
    assert (agreed.spread, agreed.needed, agreed.detectable) == (0, 2, 0)


def test_a_thresholds_cost_is_where_the_smoothed_reward_crosses_it():
    spent, reward = [10.0 * step for step in range(1, 9)], [0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
    # means of two: 0, .25, .5, .75, 1, 1, 1 at 20, 30, … 80
    for threshold, cost in ((0.75, 50), (0.625, 45), (0.0, 20), (1.01, math.inf)):
        assert statistics.cost_to_reach(threshold, spent, reward, [4] * 8, window=8) == pytest.approx(cost)
    assert statistics.cost_to_reach(0.5, spent[:1], reward[:1], [4], window=8) == math.inf


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1)), min_size=1, max_size=8), st.integers(1, 20))
def test_a_response_window_is_independent_of_the_step_size(steps, window):
    """The mean at a step is that over the fewest of the last steps that have so many responses; steps of one
    response each with the same rewards reach the same mean there if no step straddles the window's start."""
    counts, values = zip(*steps, strict=True)
    ends, means = statistics.response_windows(values, counts, window)
    assert ends.tolist() == [n for n in range(len(steps)) if sum(counts[: n + 1]) >= window]
    for end, mean in zip(ends.tolist(), means, strict=True):
        start = max(n for n in range(end + 1) if sum(counts[n : end + 1]) >= window)
        inside = [value for n in range(start, end + 1) for value in [values[n]] * counts[n]]
        assert mean == pytest.approx(np.mean(inside), abs=1e-9)
        single, same = statistics.response_windows(np.repeat(values, counts), [1] * sum(counts), len(inside))
        assert same[single.tolist().index(sum(counts[: end + 1]) - 1)] == pytest.approx(mean, abs=1e-9)


def result(method, seed, accuracy, *, problems=40, rewards=(0.2, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8)):
    solved = {problem: float(problem < accuracy * problems) for problem in range(problems)}
    return RunResult(
        method, seed, {}, 8, len(rewards),
        {"accelerator_seconds": 61.0, "tokens": 1e5, "flops": 1e11},
        [(0.0, 0.5), (61.0, accuracy)], accuracy,
        [(10.0 * (step + 1), reward) for step, reward in enumerate(rewards)],
        12.0, solved, {"gradient_snr": 0.01 * (seed + 1)},
    )  # fmt: skip


STUDY = Study("two", {"gspo": {}, "ibpo": {}}, baseline="gspo", budget=60.0, seeds=(0, 1, 2))
THREE = replace(STUDY, methods={"gspo": {}, "ibpo": {}, "mine": {}})
TASKS = replace(THREE, tasks=(Task("short", {}, skill=0.0), Task("hard", {}, skill=0.9)))


def over_tasks(method, seed, **accuracies):
    return [replace(result(method, seed, accuracy), task=task) for task, accuracy in accuracies.items()]


HOSTILE = "<script>fetch('http://nowhere')</script>"  # what a study may be named


@pytest.fixture(scope="module")
def page_of_a_study(tmp_path_factory):
    """(findings, what was compared, directory of its files)"""
    slow = (0.2,) * 6 + (0.9,) * 5
    results = [result("ibpo", seed, 0.6 + 0.05 * seed, rewards=slow) for seed in (1, 0, 2)]
    results += [result("gspo", seed, 0.5 + 0.05 * seed) for seed in (0, 1, 2)]
    study = replace(STUDY, name=HOSTILE, tasks=TASKS.tasks)
    found = Findings(study, [replace(run, task=task.name) for task in study.tasks for run in results])
    place, compared = tmp_path_factory.mktemp("study"), compare_all(found)
    write_findings(place / "results.json", found, asdict(compared))
    files = [path.name for path in write_page(found, compared, place)]
    assert files == ["results.json", "page.html", "table.md", "curves.png", "curves.svg"]
    return found, compared, place


def test_the_table_puts_the_baseline_first_and_findings_round_trip(page_of_a_study):
    found, compared, place = page_of_a_study
    lines = compared.table[:2]
    assert [line["method"] for line in lines] == ["gspo", "ibpo"]
    assert lines[0]["cost_to_threshold"]["of_baseline"] == 1.0
    assert lines[1]["cost_to_threshold"]["of_baseline"] > 1.5
    assert lines[0]["gradient"] == {"gradient_snr": pytest.approx(0.02)}
    table = markdown(found, tables(found, compared))
    assert "| +0.100 [+0.100, +0.100] | < 0.0001 | < 0.0001 |" in table
    assert "at most 1.7% over" in table
    assert read_findings(place / "results.json") == found
    page = (place / "page.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 2, "the curves and the dose"
    assert "Methods on short" in page
    assert HOSTILE not in page


def test_a_method_that_never_reaches_the_threshold_has_no_ratio():
    never = result("ibpo", 0, 0.5, rewards=(0.1,) * 7)
    found = Findings(STUDY, [result("gspo", 0, 0.5), never])
    lines = compare(STUDY, found.runs)
    cost = {"median": math.inf, "reached": 0, "of_baseline": None, "dear_decoding": None}
    assert lines[1]["cost_to_threshold"] == cost
    (methods,) = [t for t in tables(found, compare_all(found)) if t.title == "Methods"]
    assert methods.rows[1][-3:] == ["0/1 reached", "–", "–"]
    with pytest.raises(ValueError, match="same problems"):
        compare(STUDY, [result("gspo", 0, 0.5), result("gspo", 1, 0.5, problems=41)])
    with pytest.raises(ValueError, match="baseline"):
        compare(STUDY, [never])


def test_problems_with_verifier_failures_are_left_out_of_differences():
    ibpo, gspo = ([result(method, seed, 0.5) for seed in (0, 1)] for method in ("ibpo", "gspo"))
    gspo[0].solved[0] = math.nan  # solved by ibpo, so that without it there is no difference
    gspo[1].solved[30] = 1.0  # of 40 problems
    _, line = compare(STUDY, [*ibpo, *gspo])
    assert line["difference"]["mean"] == pytest.approx(-1 / 80)


def test_over_several_tasks_the_mean_of_each_seed_is_compared():
    """ibpo gains .1 and loses .05 alike with every seed; the seed that mine lacks on one task is left out."""
    results = over_tasks("mine", 0, short=0.55, hard=0.3) + over_tasks("mine", 1, short=0.6)
    for seed in (0, 1, 2):
        results += over_tasks("gspo", seed, short=0.5 + 0.05 * seed, hard=0.25)
        results += over_tasks("ibpo", seed, short=0.6 + 0.05 * seed, hard=0.2)
    gspo, ibpo, mine = compare_overall(TASKS, results)
    assert ibpo["difference"]["mean"] == pytest.approx(0.025)
    assert (ibpo["seeds"], mine["seeds"]) == (3, 1)
    assert gspo["accuracy"]["mean"] == pytest.approx((0.55 + 0.25) / 2)
    lines = compare(TASKS, results)
    by_task = [(line["task"], line["method"]) for line in lines]
    assert by_task == [(task, m) for task in ("short", "hard") for m in ("gspo", "ibpo", "mine")]
    points = run_results.dose_response(TASKS, results, lines)
    assert [(p["method"], p["skill"]) for p in points] == [(m, s) for m in ("ibpo", "mine") for s in (0, 0.9)]
    assert [point["mean"] for point in points[:2]] == pytest.approx([0.1, -0.05])
    one_skill = replace(TASKS, tasks=(Task("short", {}, skill=0.5), Task("hard", {})))
    assert run_results.dose_response(one_skill, results, lines) == []


def test_gains_on_one_task_and_losses_on_another_are_undecided():
    """ibpo gains .2 on one task and loses .05 on the other, with noise; mine gains on both, not alike."""
    results = []
    for seed, noise in enumerate((0.0, 0.025, -0.025, 0.0)):
        results += over_tasks("gspo", seed, short=0.5, hard=0.25)
        results += over_tasks("ibpo", seed, short=0.7 + noise, hard=0.2)
        results += over_tasks("mine", seed, short=0.7 + noise, hard=0.3)
    compared = compare_all(Findings(replace(TASKS, seeds=(0, 1, 2, 3)), results))
    assert [(claim.method, claim.verdict) for claim in compared.claims] == [
        ("ibpo", "differs between tasks"), ("mine", "better"),
    ]  # fmt: skip
    _, ibpo, mine = compared.overall
    assert ibpo["difference"]["by_task"] == pytest.approx([0.2, -0.05])
    assert max(of["difference"]["interaction_p"] for of in (ibpo, mine)) < 0.05


def test_the_interaction_of_two_tasks_is_the_paired_t_test():
    rng = np.random.default_rng(0)
    two, three = rng.normal(size=(8, 2)), rng.normal(size=(8, 3))
    assert statistics.interaction_p(two) == pytest.approx(estimate(two[:, 1] - two[:, 0]).p)
    expected = pytest.approx(statistics.interaction_p(three))
    assert statistics.interaction_p(three[:, [2, 0, 1]]) == expected
    assert statistics.interaction_p(three + rng.normal(size=(8, 1))) == expected, (
        "a seed's own gain on all tasks"
    )
    false_alarms = [statistics.interaction_p(rng.normal(size=(6, 3))) < 0.05 for _ in range(400)]
    assert 0.02 < np.mean(false_alarms) < 0.09
    assert math.isnan(statistics.interaction_p(three[:2]))
    assert math.isnan(statistics.interaction_p(np.tile([0.1, -0.1], (4, 1))))


CLAIMS = (
    PublishedClaim("T1", "more accurate", "ibpo", "gspo"),
    PublishedClaim("T2", "cheaper", "ibpo", "gspo", "cost to threshold"),
    PublishedClaim("5.1.1", "corrections improve", "ibpo", measure="correction success"),
    PublishedClaim("T3", "K > 2", untestable="no tokens"),
    PublishedClaim("T4", "mine", "mine", "gspo"),
)


def test_a_published_claim_is_repeated_not_repeated_undecided_or_untested():
    """ibpo is more accurate by .1, at more than 1.5 times the cost; its corrections get better by .42."""

    def outcomes(seeds, success=lambda seed: [0.2, 0.6 + 0.01 * seed]):
        results = []
        for seed in range(seeds):
            late, noise = (0.1,) * (9 + seed % 2) + (0.9,) * 6, 0.025 * (seed % 2)
            results.append(result("gspo", seed, 0.5, rewards=(0.1,) * 3 + (0.9,) * 6))
            ibpo = result("ibpo", seed, 0.6 + noise, rewards=late)
            results.append(replace(ibpo, correction_success=success(seed)))
        return judge_claims(replace(THREE, published_claims=CLAIMS), results)

    found = outcomes(5)
    names = [one.outcome for one in found]
    assert names == ["repeated", "not repeated", "repeated", "cannot be tested here", "not run"]
    assert found[2].difference.mean == pytest.approx(0.42)
    assert 1.5 < 2 ** -found[1].difference.mean < 3, "log₂ of a ratio of costs"
    assert [one.outcome for one in outcomes(4)][:3] == ["undecided"] * 3, "too few seeds"
    assert outcomes(5, lambda seed: [0.2, 0.3 - 0.2 * (seed % 2)])[2].outcome == "undecided"
    assert outcomes(5, lambda _: [])[2].outcome == "not run"


def test_a_claim_takes_one_task_or_their_mean():
    """ibpo gains .3 on the short task and loses .1 on the hard one; one seed lacks a task."""
    runs = []
    for seed in range(6):
        runs += over_tasks("gspo", seed, short=0.5, hard=0.4)
        runs += over_tasks("ibpo", seed, short=0.8, hard=0.3)
    claims = [
        PublishedClaim("ours", "greedy", "ibpo", "gspo", "greedy accuracy", task=task)
        for task in ("", "short", "hard")
    ]
    outcomes = judge_claims(replace(TASKS, published_claims=tuple(claims)), runs[:-1])
    assert [outcome.difference.mean for outcome in outcomes] == pytest.approx([0.1, 0.3, -0.1])
    assert [outcome.seeds for outcome in outcomes] == [5, 6, 5]
    with pytest.raises(ValueError, match="a task of it"):
        read_claims([{"source": "", "claim": "", "method": "ibpo", "task": "long"}], {"ibpo": {}}, [], "x")


def test_a_run_below_the_threshold_counts_its_full_cost():
    study = replace(STUDY, published_claims=CLAIMS[1:2])
    reaches, never = (0.1,) * 3 + (0.9,) * 6, (0.1,) * 9
    runs_of = [result("gspo", 0, 0.5, rewards=reaches), result("ibpo", 0, 0.5, rewards=never)]
    (one,) = judge_claims(study, runs_of)
    cost = run_results.cost_to_threshold(runs_of[0], study.threshold)
    assert one.difference.mean == pytest.approx(math.log2(cost / 90.0))
    neither = [result(method, 0, 0.5, rewards=never) for method in ("gspo", "ibpo")]
    assert judge_claims(study, neither)[0].outcome == "not run"


def test_at_equal_steps_rewards_have_intervals_and_short_runs_none():
    """The last step is one that half of the methods have reached: the seventh."""
    results = []
    for s in (0, 1, 2):
        rewards = {"gspo": (0.1 * s,) * 9, "ibpo": (0.0, 0.0) + (0.1 * s + 0.2,) * 5, "mine": (0.9,) * 4}
        results += [result(method, s, 0.5, rewards=own) for method, own in rewards.items()]
    gspo, ibpo, mine = compare_at_equal_steps(THREE, results)
    assert (gspo["first"], gspo["last"]) == (3, 7)
    assert gspo["reward"]["mean"] == pytest.approx(0.1)
    assert gspo["reward"]["high"] > 0.1 > gspo["reward"]["low"]
    assert ibpo["difference"]["mean"] == pytest.approx(0.2)
    assert "reward" not in mine


def test_methods_are_compared_after_equal_amounts_of_each_currency():
    """One gains .1 per 10 s and step, the other .2 per 20 s, whose decoding is free: ahead by steps, level by
    seconds, behind by dear decoding."""
    slow, fast = (
        [result(method, s, 0.5, rewards=(0.5,) * n) for s in (0, 1, 2)]
        for method, n in (("ibpo", 3), ("gspo", 6))
    )

    def with_curves(run, gain, price, dear):
        spent = [price * step for step in range(1, len(run.reward) + 1)]
        return replace(
            run,
            reward=[(amount, 0.5) for amount in spent],
            accuracy=[(at, 0.01 * run.seed + gain * at / price) for at in (0.0, *spent[1::2], spent[-1])],
            accelerator_seconds=spent,
            dear_decoding=[dear * amount for amount in spent],
        )

    runs = [with_curves(run, 0.2, 20.0, 2.0) for run in slow] + [
        with_curves(run, 0.1, 10.0, 1.0) for run in fast
    ]
    lines = {line["currency"]: line for line in compare_at_equal_amounts(STUDY, runs)}
    differences = {
        name: (line["amount"], round(line["difference"]["mean"], 9)) for name, line in lines.items()
    }
    assert differences == {
        "accelerator seconds": (60.0, 0.0), "steps": (3.0, 0.3), "operations, decoding x 10": (60.0, -0.3),
    }  # fmt: skip
    assert lines["steps"]["accuracy"]["mean"] == pytest.approx(0.61)
    unknown = [replace(run, accelerator_seconds=[], dear_decoding=[]) for run in runs]
    assert {line["currency"] for line in compare_at_equal_amounts(STUDY, unknown)} == {"steps"}
    ends = [replace(run, accuracy=run.accuracy[::3]) for run in runs]
    assert not compare_at_equal_amounts(STUDY, ends), "two evaluations are no curve"


KEPT = sorted(p for p in (ROOT / "docs/studies").glob("*.json.gz") if not p.stem.startswith("audit"))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_results_from_before_can_still_be_read(path):
    """Every run's records are read, and the differences that the table had."""
    found, kept = read_findings(path), json.loads(gzip.decompress(path.read_bytes()))
    assert len(found.runs) == len(kept["runs"])
    two = replace(found.study, methods=dict(list(found.study.methods.items())[:2]))
    before = {(line.get("task", ""), line["method"]): line for line in kept["table"]}
    for task in found.study.tasks:
        for line in compare(two, [run for run in found.runs if run.task == task.name]):
            if "difference" in line:
                expected = before[task.name, line["method"]]["difference"]["mean"]
                assert line["difference"]["mean"] == pytest.approx(expected, abs=1e-6), line


def test_cut_off_or_oversized_results_are_refused(tmp_path):
    path = tmp_path / "results.json.gz"
    for content, says in (
        (gzip.compress(b"{}" * 99)[:-9], "not gzip, or cut off"), (b"{}", "not gzip, or cut off"),
        (gzip.compress(bytes(JSON_BYTES + 1), 1), "when unpacked"),
        (gzip.compress(b"{}"), "no results of a study"),
    ):  # fmt: skip
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"results.json.gz: .*{says}"):
            read_findings(path)


def test_a_missing_policy_is_refused_with_the_command_making_it(tmp_path, written):
    policy = tmp_path / "policy"
    policy.mkdir()
    shutil.copy(ROOT / "examples/tiny_qwen3/config.json", policy)
    path = written(common={"hf-checkpoint": str(policy)})
    with pytest.raises(ConfigError, match=r"policy holds neither model.safetensors nor [a-z.]*json$"):
        conducted(tmp_path, path, failing)
    (policy / "warm_start.json").write_text('{"make": "bash make.sh"}')
    with pytest.raises(ConfigError, match=r"policy holds neither .*; make it: bash make.sh$"):
        conducted(tmp_path, path, failing)
    complete, said, _ = conducted(tmp_path, path, failing, runs_at_most=0)
    assert (complete, "4 runs to go" in said) == (False, True), "what it would cost is said all the same"


def claim_of(*, gain=0.1, seeds=range(8), again=None, **found):
    """Return the claim about ibpo, whose runs gain `gain` over GSPO's."""

    def both(numbers, gain):
        runs_of = [result("gspo", seed, 0.5) for seed in numbers]
        noise = (0.0, 0.025, -0.025, 0.0)
        return runs_of + [result("ibpo", seed, 0.5 + gain + noise[seed % 4]) for seed in numbers]

    fresh = both(range(100, 108), again) if again is not None else []
    values = (1e-4, 3e-4, 1e-3)
    chosen = [choose("", method, tried(values, best=3e-4)) for method in ("gspo", "ibpo")]
    study = replace(STUDY, tune=Tuning({"lr": values}, (50,), 30.0))
    all_found = {"choices": chosen, "confirmation": fresh} | found
    (claim,) = compare_all(Findings(study, both(seeds, gain), **all_found)).claims
    return claim


def tried(values, best, key="lr"):
    return [Tried({key: value}, 50, 0.9 if value == best else 0.5, 0.9, 10) for value in values]


def test_a_better_method_needs_confirmation_by_fresh_seeds():
    assert claim_of(again=0.1) == Claim("ibpo", "better", ())
    assert claim_of().blocks == ("not run again with fresh seeds",)
    assert claim_of(again=0.0).blocks[0].startswith("fresh seeds do not show it: +0.000")
    assert claim_of(gain=0.0).verdict == "not told apart"
    assert claim_of(gain=-0.1) == Claim("ibpo", "worse", ())
    assert claim_of(seeds=range(5), again=0.1).blocks == ("5 seeds, 8 are needed",)
    assert claim_of(seeds=range(1)).verdict == "no test"
    assert claim_of(runs_left=3, again=0.1).blocks == ("3 runs to go",)
    edge = choose("", "gspo", tried((1e-4, 3e-4), best=3e-4))
    assert claim_of(choices=[edge], again=0.1).blocks == ("the best lr of gspo is at the edge of its grid",)
    assert claim_of(choices=[], again=0.1).blocks == ("what tuning tried was not kept",)


def test_tuning_takes_the_best_mean_and_extends_the_grid():
    runs_of = [(1e-4, 0.6), (1e-4, 0.7), (3e-4, 0.9), (3e-4, 0.5), (1e-3, 0.1), (1e-3, 0.2)]
    found = choose("short", "gspo", [Tried({"lr": lr}, 50, a, a, 10) for lr, a in runs_of])
    assert (found.setting, found.at_edge, len(found.tried)) == ({"lr": 3e-4}, (), 6)
    points = [{"lr": lr, "G": g} for lr in (1e-4, 3e-4, 9e-4) for g in (4, 8)]
    found = choose("", "gspo", [Tried(p, 50, float(p == {"lr": 3e-4, "G": 8}), 0.0, 9) for p in points])
    assert (found.at_edge, beyond(found)) == (("G",), {"G": {"lr": 3e-4, "G": 16}})
    # in equal ratios
    for values, best, further in [
        ((1e-4, 3e-4, 1e-3), 3e-4, None), ((1e-4, 3e-4, 1e-3), 1e-3, 3.33333e-3),
        ((1e-4, 3e-4, 1e-3), 1e-4, 3.33333e-5), ((2, 4), 2, 1),
        ((1, 2), 1, None), ((0.0, 0.5), 0.0, None),  # edges with nothing beyond
        ((3e-4,), 3e-4, None), (("gspo", "dapo"), "gspo", None),  # no axis
    ]:  # fmt: skip
        found = choose("", "gspo", tried(values, best, key="x"))
        is_edge = further is not None or best in (1, 0.0)
        assert found.at_edge == (("x",) if is_edge else ()), (values, best, further)
        assert beyond(found) == ({} if further is None else {"x": {"x": further}})


@pytest.mark.parametrize("name", [
    pytest.param(path.name, marks=pytest.mark.slow if path.stem in ("suite", "paper") else ())
    for path in sorted((ROOT / "examples/studies").glob("*.yaml"))
])  # fmt: skip
def test_every_study_of_the_repository_can_be_run(name, tmp_path, monkeypatch):
    """It is run with one of its seeds, and tuned at both ends of its grid on one of its tasks: in between, on
    other tasks and with other seeds nothing else is checked."""
    monkeypatch.chdir(ROOT)
    study = read_study([ROOT / "examples/studies" / name], {"seeds": 1})
    planned = plan_runs(study, tmp_path, "main")
    assert len(planned) == len(study.tasks) * len(study.methods)
    for method in study.methods if study.tune else ():
        points = grid_points(study.tune, method)
        for point in points[:: max(1, len(points) - 1)]:
            planned += plan.plan_point(study, tmp_path, study.tasks[0], method, point, (50,))
    assert len({run.directory for run in planned}) == len(planned)


def test_runs_have_their_own_seed_budget_recipe_and_half(tmp_path, written, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the directory of the results is relative to it
    methods = {"gspo": {"advantage-estimator": "gspo"}, "ibpo": {"n-samples-per-prompt": 4}}
    common = {"hf-checkpoint": str(ROOT / "examples/tiny_qwen3"), "eval-interval": 3}
    tune = {"grid": {"lr": ["1e-4", 3e-4], "rollout-batch-size": [16, 32]}, "seeds": [50], "budget": 5e10}
    study = read_study([written(methods=methods, common=common, tune=tune)])
    planned = [*plan.plan_tuning(study, Path("out")), *plan_runs(study, Path("out"), "main")]
    assert len({run.directory for run in planned}) == len(planned) == 8 + 4
    configs = [yaml.safe_load(run.config) for run in planned]
    how = [(config["eval-half"], config.get("eval-interval"), config["budget"]) for config in configs]
    assert how == [("tuning", None, 5e10)] * 8 + [("test", 3, 1e11)] * 4
    tried = [(own["ibpo-operator"], own["lr"], own["rollout-batch-size"]) for own in configs[:8]]
    grid = product(("none", configs[-1]["ibpo-operator"]), (1e-4, 3e-4), (16, 32))
    assert sorted(tried) == sorted(grid)
    assert [run.method for run in planned[8:]] == ["gspo", "ibpo"] * 2
    assert [(own["seed"], own["data-seed"]) for own in configs[8:]] == [(0, 0), (0, 0), (1, 1), (1, 1)]
    assert (configs[-1]["advantage-estimator"], configs[-1]["n-samples-per-prompt"]) == ("ibpo", 4)
    assert planned[-1].directory == Path("out/runs/ibpo/seed_1")
    assert planned[-1].directory.with_suffix(".yaml").exists()
    tasks = {"short": {"settings": {}, "budget": 2e10}, "long": {"settings": {}}}
    study = read_study([written(methods=methods, common=common, tune=tune, tasks=tasks)])
    budgets = {(run.task, run.phase, run.budget) for run in [
        *plan.plan_tuning(study, Path("out")), *plan_runs(study, Path("out"), "main"),
    ]}  # fmt: skip
    assert budgets == {
        ("short", "tuning", 1e10), ("short", "main", 2e10), ("long", "tuning", 5e10), ("long", "main", 1e11)
    }  # fmt: skip
    assert study.budgets == "1e+11 flops (short: 2e+10)"
    for run in planned[8::3]:  # of either method, with either seed
        assert config_yaml(parse_config(run.arguments)) == run.config


def test_a_task_has_a_warm_start_of_measured_skill(tmp_path, written):
    """A number, or what `ibpo skill --save` wrote."""
    above = {"above_resample": {"estimate": 0.31, "low": 0.2, "high": 0.4}}
    measured = {"ways": {"groups with a correct response": {"correct reference": above}}}
    (tmp_path / "skill.json").write_text(json.dumps(measured))
    settings = {"hf-checkpoint": str(ROOT / "examples/tiny_qwen3_hard"), "lr": 1e-4}
    tasks = {
        "easy": {"settings": {}, "skill": 0.02, "warm-start": {"slip": 0.02}},
        "hard": {"kind": "rare", "settings": settings, "skill": str(tmp_path / "skill.json")},
    }
    study = read_study([written(tasks=tasks)])
    found = [(task.name, task.kind, task.skill) for task in study.tasks]
    assert found == [("easy", "", 0.02), ("hard", "rare", 0.31)]
    planned = plan_runs(study, tmp_path / "out", "main")
    hard = yaml.safe_load(planned[2].config)
    assert (Path(hard["hf-checkpoint"]).name, hard["lr"]) == ("tiny_qwen3_hard", 1e-4)
    assert planned[2].directory == tmp_path / "out/runs/hard/dr/seed_0"
    (tmp_path / "skill.json").write_text("{}")
    with pytest.raises(ConfigError, match="task hard: skill must be a number, or a file"):
        read_study([written(tasks=tasks)])


def tuned(**changes):
    return {"tune": {"grid": {"lr": [1]}, "seeds": [9], "budget": 1} | changes}


def test_a_senseless_study_and_an_impossible_method_are_refused(tmp_path, written):
    for changes, words in [
        ({"baseline": "grpo"}, "'grpo' is none of the methods"),
        ({"budgett": 3}, "unknown key .budgett.; did you mean .budget."),
        ({"seeds": ["../../x"]}, "seeds must be a list of whole numbers from 0 to"),
        ({"seeds": [1, 1]}, "seeds must be one or more, all different"),
        (tuned(seeds=[0]), "tuning must not use the study's own"),
        (tuned(own={"x": {"lr": [1]}}), "tune names x, which is none of the methods"),
        (tuned(grid={"lr": 1}), "each setting a list"),
        ({"pilot-seeds": [7]}, "a pilot of one seed has no spread"),
        ({"confirm-seeds": [1, 2]}, "confirmation must not use the study's own"),
        ({"tasks": {"a": {"hf-checkpoint": "x"}}}, "task a: must have settings"),
        ({"published-claims": [{"source": "T1"}]}, "published-claims, number 1: .*'claim'"),
        ({"published-claims": [{"source": "T1", "claim": "x", "method": "no"}]}, "must have a method of the"),
        ({"methods": {"gspo": {}, "mine": "nowhere"}}, r"must be a recipe .* or settings"),
    ]:
        with pytest.raises(ConfigError, match=words):
            read_study([written(**changes)])
    for setting, words in (
        ({"ibpo-lamda": 1}, ".*did you mean 'ibpo-lambda'"),
        ({"ibpo-lambda": 3.0}, "1 problem"),
    ):
        study = read_study([written(methods={"gspo": {"advantage-estimator": "gspo"}, "odd": setting})])
        with pytest.raises(ConfigError, match=f"method odd: {words}"):
            plan_runs(study, tmp_path / "out", "main")


def test_a_name_outside_the_studys_directory_is_refused_at_once(written):
    for name in ["../../x", "/tmp/x", "..", ".hidden", "", "a\0b", "a\nb", "\udc80", "x" * 201]:
        for changes in ({"methods": {"gspo": {}, name: {}}}, {"tasks": {name: {"settings": {}}}}):
            with pytest.raises(ConfigError, match=r"no slash, no control character|a task has no name"):
                read_study([written(**changes)])
        with pytest.raises(ConfigError, match="no slash, no control"):
            read_study([written()], add={name: {}})
    study = read_study([written(**tuned(grid={"prompt-data": ["../../x", "/a/b"]}))])
    names = [plan.point_name(point) for point in grid_points(study.tune, "gspo")]
    assert names == ["prompt-data_..%2F..%2Fx", "prompt-data_%2Fa%2Fb"]
    with pytest.raises(ConfigError, match=r"tuning run 'prompt-data_x+': a directory gets this name"):
        read_study([written(**tuned(grid={"prompt-data": ["x" * 201]}))])


def planned(tmp_path):
    return plan.PlannedRun("m", 0, tmp_path / "runs/seed_0", (str(tmp_path / "pid"),), "key: value\n", 1.0)


def test_a_failed_run_keeps_its_log_and_endless_ones_end(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "GRACE_S", 0.1)
    monkeypatch.setattr(runs, "LOOK_EVERY_S", 0.05)
    started, run, stop, pid = time.monotonic(), planned(tmp_path), threading.Event(), tmp_path / "pid"

    def ended(program, run_timeout):
        study = replace(STUDY, run_timeout=run_timeout)
        return runs.execute(run, study, program, lambda row: None, stop)

    assert ended(failing, 120.0) == "failed"
    assert run.directory.with_suffix(".log").read_text() == "why\n"
    assert not runs.is_finished(run)
    assert ended(stubborn, 0.3) == "timed out"
    assert time.monotonic() - started < 60
    pid.unlink(missing_ok=True)

    def stop_once_it_is_up():
        eventually(pid.exists, 60)
        stop.set()

    threading.Thread(target=stop_once_it_is_up).start()
    assert ended(stubborn, 120.0) == "stopped"
    assert eventually(lambda: has_ended(pid.read_text()), 5), "it was killed a moment ago"


def test_a_run_ends_with_a_study_that_was_killed(tmp_path):
    run, pid = planned(tmp_path), tmp_path / "pid"
    code = f"""
import threading
from megatron_ibpo.study import runs
from megatron_ibpo.study.plan import PlannedRun, Study
from pathlib import Path, PosixPath
from support.stand_in_training import stubborn
runs.GRACE_S, runs.PRELOADED = 0.1, [runs.__name__]
study = Study("one", {{"m": {{}}}}, baseline="m", budget=60.0, seeds=(0,))
runs.execute({run!r}, study, stubborn, lambda row: None, threading.Event())
"""
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with subprocess.Popen([sys.executable, "-c", code], env=os.environ | paths) as study:
        try:
            assert eventually(pid.exists, 60)
        finally:
            study.kill()
    assert eventually(lambda: has_ended(pid.read_text()), 30)


def test_a_finished_run_is_recognised_and_a_different_one_refused(tmp_path, written):
    run = planned(tmp_path)
    run.directory.mkdir(parents=True)
    run.directory.with_suffix(".config").write_text(run.config)
    for status in ("interrupted", "finished"):
        (run.directory / "summary.json").write_text(json.dumps({"status": status}))
        assert runs.is_finished(run) == (status == "finished")
    with pytest.raises(ConfigError, match=r"other settings .*key was 'value', is 'other'"):
        runs.is_finished(replace(run, config="key: other\n"))
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # belongs to this opening of the file, as to another process's
        with pytest.raises(ConfigError, match="another process"):
            conduct(read_study([written()]), tmp_path, failing, Console(file=io.StringIO()))


def test_ended_runs_are_shown_and_corrections_count_as_sequences(tmp_path):
    """Seven steps of 16 prompts with 8 responses each; then the first step made 56 corrections."""
    recipe, run = tmp_path / "recipe.yaml", planned(tmp_path)
    settings = {"rollout-batch-size": 16, "n-samples-per-prompt": 8, "lr": 3e-4, "seed": 0, "budget": 1}
    recipe.write_text(yaml.safe_dump(settings | {"advantage-estimator": "ibpo", "hf-checkpoint": "tiny"}))
    words = ("--config", str(recipe), "--run-dir", str(run.directory))
    run = replace(run, arguments=words, config=recipe.read_text())
    said = io.StringIO()
    assert run_all(STUDY, [run], training(), Console(file=said, width=200), parallel=1) == 1
    told = r"run 1/1 m, seed 0: finished after \d+ s, 7 steps, accuracy 0\.5094"
    assert re.fullmatch(told, said.getvalue().strip())
    metrics = run.directory / "metrics.jsonl"
    first, *others = metrics.read_text().splitlines(keepends=True)
    of_all = {"corrections": 56.0, "reward_sampled": 0.25, "responses_sampled": 300.0}  # 172 were not taken
    metrics.write_text(json.dumps(json.loads(first) | of_all) + "\n" + "".join(others))
    (run.directory / "versions.json").write_text('{"commit": "abc"}')
    found = run_results.read_run(run, "flops")
    assert (found.responses, found.reward[0][1], found.code) == ([300.0] + [128] * 6, 0.25, "abc")
    assert (found.steps, found.prompts_per_step, found.samples_per_prompt) == (7, 16, 8)
    assert found.sequences_per_prompt == 8.5


@pytest.mark.engine
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_comparison_can_be_stopped_and_resumed_to_its_table(tmp_path):
    """examples/studies/mini.yaml cut to one step a run, through the command that a user types."""
    content = yaml.safe_load((ROOT / "examples/studies/mini.yaml").read_text()) | {"name": "mini"}
    content |= {"budget": 1, "common": {"eval-num-prompts": 16, "rollout-batch-size": 4}}
    (tmp_path / "mini.yaml").write_text(yaml.safe_dump(content))
    study, out = str(tmp_path / "mini.yaml"), str(tmp_path / "out")
    command = [sys.executable, "tools/compare_methods.py", study, "--save", out]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

    def compare_methods(*flags, status):
        done = subprocess.run(
            [*command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    assert "1 of 2 runs are finished" in compare_methods("--runs-at-most", "1", status=1)
    assert "gspo, seed 0" not in compare_methods(status=0)  # it is not run again
    assert "| gspo | 4 | 8 | 0.0003 |" in (tmp_path / "out/table.md").read_text()  # P, G, learning rate
    kept = json.loads((tmp_path / "out/results.json").read_text())
    assert kept["table"][1]["gradient"].keys() >= {"gradient_variance", "gspo_gradient_variance"}
    for run in kept["runs"]:
        assert (run["steps"], len(kept["runs"])) == (1, 2)
        assert run["spent"]["flops"] > run["spent"]["flops_shared_prefixes"] > 0
