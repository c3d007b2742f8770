"""A whole study over runs whose truth is known: a stand-in for training writes what a run would leave."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import psutil
import pytest
import yaml
from rich.console import Console

from megatron_ibpo.config import ConfigError
from megatron_ibpo.study import runs
from megatron_ibpo.study.findings import read_findings
from megatron_ibpo.study.plan import grid_points, plan_main
from megatron_ibpo.study.study_files import method_settings, read_study
from megatron_ibpo.study.study_run import conduct
from support import stand_in_training
from support.paths import ROOT


def training(*, best=3e-4, gains=None, pause=0.0):
    """Stand in for training: leave what a run with known accuracy leaves."""
    return partial(stand_in_training.train, best=best, gains=gains or {}, pause=pause)


def conducted(tmp_path, path, program, **settings):
    """(complete, what was said, the findings)"""
    said = io.StringIO()
    console = Console(file=said, width=10_000)
    complete = conduct(read_study([path]), tmp_path / "out", program, console, **settings)
    kept = tmp_path / "out/results.json"
    return complete, said.getvalue(), read_findings(kept) if kept.exists() else None


def begun(tmp_path):
    """The process of each main run that has begun."""
    orders = (tmp_path / "out/runs").glob("*/order")
    return [int(line.split()[2]) for order in orders for line in order.read_text().splitlines()]


TWO_TASKS = {
    name: {"kind": kind, "settings": {"hf-checkpoint": str(ROOT / "examples" / model)}, "skill": skill}
    for name, kind, model, skill in (
        ("easy", "short", "tiny_qwen3_hard", 0.9), ("rare", "long", "tiny_qwen3", 0.1),
    )
}  # fmt: skip


def test_a_study_tunes_extends_its_grid_tells_its_power_compares_and_confirms(tmp_path, written):
    """dr is better by .05; the best learning rate lies beyond the grid, and is found."""
    program = training(best=9e-4, gains={"dr-grpo": 0.05})
    tune = {"grid": {"lr": [1e-4, 3e-4]}, "seeds": [50], "budget": 5e10}
    path = written(tune=tune, **{"pilot-seeds": [60, 61], "confirm-seeds": [70, 71]})
    complete, said, found = conducted(tmp_path, path, program, parallel=4)
    assert complete
    assert [choice.setting for choice in found.choices] == [{"lr": 9e-4}, {"lr": 9e-4}]
    assert all(len(choice.tried) == 4 and choice.at_edge == () for choice in found.choices)
    assert found.power.needed >= 2
    assert "2 runs of gspo per task" in found.power.source
    assert said.index("power, from") < said.index("gspo, seed 0"), "before the runs"
    assert (len(found.runs), len(found.confirmation)) == (4, 4)
    assert {run.lr for run in found.runs} == {9e-4}
    assert max(run.accuracy[-1][1] for run in found.runs) < 0.65, "judged by other problems than tuned on"
    assert found.runs[0].other_accuracies["0.6"] == pytest.approx(found.runs[0].accuracy[-1][1] + 0.1)
    assert "dr: better; but 2 seeds, 8 are needed\n" in said, "fresh seeds showed it again"
    page = (tmp_path / "out/page.html").read_text()
    for part in ("What may be said", "Curves", "T = 0.6", "At equal steps", "Tuning", "lr 0.0009"):
        assert part in page
    shutil.rmtree(tmp_path / "out/confirmation/gspo")
    complete, said, found = conducted(tmp_path, path, program, runs_at_most=0)
    assert not complete
    assert found.confirmation == [], "half of it confirms nothing"
    assert "not run again with fresh seeds" in said


@pytest.mark.slow  # `beyond` is tested alone
def test_a_grid_whose_best_is_always_the_last_is_left_after_four_values_without_a_claim(tmp_path, written):
    program = training(best=1e-2, gains={"dr-grpo": 0.05})
    tune = {"grid": {"lr": [1e-5, 2e-5]}, "seeds": [50], "budget": 5e10}
    _, said, found = conducted(tmp_path, written(tune=tune, seeds=3), program, parallel=4)
    assert [(choice.setting, choice.at_edge) for choice in found.choices] == [({"lr": 3.2e-4}, ("lr",))] * 2
    edges = "; but ".join(f"the best lr of {name} is at the edge of its grid" for name in ("dr", "gspo"))
    assert f"but {edges}" in said


def test_a_study_of_several_tasks_is_priced_resumed_and_has_one_page_with_its_dose(tmp_path, written):
    """Finished runs are not repeated."""
    program = training(gains={"dr-grpo": 0.05})
    path = written(tasks=TWO_TASKS)
    complete, said, found = conducted(tmp_path, path, program, runs_at_most=0)
    assert (complete, found) == (False, None)
    assert "8 runs to go, 8e+11 flops, duration unknown" in said
    complete, said, found = conducted(tmp_path, path, program, parallel=3, runs_at_most=7)
    assert (complete, found.runs_left, len(found.runs)) == (False, 1, 7)
    assert "1 run to go, 1e+11 flops, about 0 minutes" in said  # half a minute
    complete, said, found = conducted(tmp_path, path, program)
    assert (complete, len(found.runs)) == (True, 2 * 2 * 2)
    assert "run 1/1 rare, gspo, seed 1: finished" in said
    assert "power: unknown" in said
    kept = json.loads((tmp_path / "out/results.json").read_text())
    assert [line["method"] for line in kept["overall"]] == ["gspo", "dr"]
    assert kept["overall"][1]["difference"]["mean"] == pytest.approx(0.05, abs=1e-3)
    dose = [(point["task"], point["skill"]) for point in kept["dose_response"]]
    assert dose == [("rare", 0.1), ("easy", 0.9)]
    page = (tmp_path / "out/page.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 2
    assert "Methods on easy" in page
    with pytest.raises(ConfigError, match=r"other settings .*lr was 0.0003, is 0.001"):
        conducted(tmp_path, written(tasks=TWO_TASKS, common={"lr": 1e-3}), program)


def test_a_stopped_study_leaves_no_child(tmp_path, written, monkeypatch):
    """Two runs go side by side; an interrupt ends both, and none begins after it."""
    monkeypatch.setattr(runs, "LOOK_EVERY_S", 0.1)

    def interrupt_two() -> None:
        deadline = time.monotonic() + 40
        while len(begun(tmp_path)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    started = time.monotonic()
    threading.Thread(target=interrupt_two, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        conducted(tmp_path, written(), training(pause=60.0), parallel=2)
    assert time.monotonic() - started < 50
    left = begun(tmp_path)
    assert len(left) == 2
    assert not any(psutil.pid_exists(process) for process in left)
    path = written(**{"budget-unit": "accelerator-seconds"})
    with pytest.raises(ConfigError, match="slow each other down"):
        conducted(tmp_path, path, training(), parallel=2)


OWN = """
from megatron_ibpo.credit import Judgement, Operator

SETTINGS = {"advantage-estimator": "gspo", "lr": 5.0e-4}
NUMBER = 3


class SameLength(Operator):
    def judge(self, groups, context):
        return Judgement([[0.0] * len(group.responses) for group in groups], metrics={})


def advantages(rewards):
    return [reward - min(rewards) for reward in rewards]


def weigh(groups, advantages, context):
    raise NotImplementedError
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's own where the user stands."""
    (tmp_path / "own_methods.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("own_methods", None)


@pytest.mark.usefixtures("own")
def test_a_method_is_settings_a_recipe_or_an_import_path_and_is_put_beside_some_of_a_study(tmp_path, written):
    (tmp_path / "mine.yaml").write_text("advantage-estimator: gspo\nlr: 0.001\n")
    plain = {"advantage-estimator": "gspo"}
    for spec, settings in [
        ({"lr": 1e-3}, {"lr": 1e-3}),
        ("mine.yaml", plain | {"lr": 0.001}),
        ("own_methods:SETTINGS", plain | {"lr": 5e-4}),
        ("own_methods:SameLength", {"ibpo-operator": "own_methods:SameLength"}),
        ("own_methods:advantages", plain | {"advantages": "own_methods:advantages"}),
        ("own_methods:weigh", plain | {"token-credit": "own_methods:weigh"}),
    ]:
        assert method_settings(spec) == settings
    with pytest.raises(ConfigError, match="neither settings, an operator, an estimator nor"):
        method_settings("own_methods:NUMBER")
    with pytest.raises(ConfigError, match="no_such_module"):
        method_settings("no_such_module:x")
    methods = {name: {"advantage-estimator": name} for name in ("gspo", "dr-grpo", "grpo")}
    path = written(methods=methods, tasks=TWO_TASKS, seeds=1)
    study = read_study([path], add={"own": "own_methods:SameLength"}, only=["own"], tasks=["rare"])
    planned = plan_main(study, tmp_path / "out")
    assert [(run.task, run.method) for run in planned] == [("rare", "gspo"), ("rare", "own")]
    config = yaml.safe_load(planned[1].config)
    assert config["ibpo-operator"] == "own_methods:SameLength"
    with pytest.raises(ConfigError, match=r"no method 'gspoo'; .*did you mean 'gspo'"):
        read_study([path], only=["gspoo"])
    with pytest.raises(ConfigError, match=r"no task 'rere'; .*did you mean 'rare'"):
        read_study([path], tasks=["rere"])


def test_the_study_file_of_the_documentation_can_be_run(tmp_path, monkeypatch):
    """It is run as it stands there, with a recipe and a module where the user stands."""
    text = (ROOT / "docs/comparing-methods.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "documented.yaml").write_text(block)
    (tmp_path / "mine.yaml").write_text("advantage-estimator: gspo\n")
    (tmp_path / "same_length.py").write_text(OWN)
    for shared in ("examples", "megatron_ibpo"):
        (tmp_path / shared).symlink_to(ROOT / shared)
    monkeypatch.chdir(tmp_path)
    study = read_study([tmp_path / "documented.yaml"])
    assert list(study.methods) == ["gspo", "ibpo", "mine", "near"]
    assert [len(grid_points(study.tune, method)) for method in study.methods] == [12, 12, 24, 12]
    one_task = replace(study, tasks=study.tasks[1:], seeds=(0,))
    assert len(plan_main(one_task, tmp_path / "out")) == 4


@pytest.mark.slow
def test_the_page_of_kept_results_is_written_by_the_command(tmp_path):
    command = [
        sys.executable,
        "tools/compare_methods.py",
        "docs/studies/qwen3_next.json",
        "--save",
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert page.count('"not told apart"') == 2
    assert "gspo-g16" in page
