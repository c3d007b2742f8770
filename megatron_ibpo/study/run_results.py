"""Results of a study's runs: read from their directories, compared, as plain data."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import yaml

from megatron_ibpo.basics.user_files import JSON_BYTES, read_user_file
from megatron_ibpo.report import load_outcomes, outcomes_path, read_rows
from megatron_ibpo.report.run_dir import SKILL_FILE
from megatron_ibpo.report.summary import break_even
from megatron_ibpo.run.cost import DECODING_PRICE
from megatron_ibpo.study.plan import PlannedRun, Study
from megatron_ibpo.study.statistics import WINDOW_RESPONSES, cost_to_reach, estimate, holm, interaction_p

_AT = re.compile(r"eval/[^/]+@([\d.]+)/accuracy")
_STEPS = 5
"""Number of steps whose mean is compared at equal steps."""
_METERED = ("gradient_snr", "gspo_gradient_snr", "gradient_variance", "gspo_gradient_variance")


@dataclass(frozen=True)
class RunResult:
    """The results of one finished run, small enough to save as data."""

    method: str
    seed: int
    setting: dict[str, Any]
    """Tuned settings and their values."""
    samples_per_prompt: int
    """G, responses sampled per prompt."""
    steps: int
    spent: dict[str, float]
    """Totals of accelerator_seconds, tokens and flops."""
    accuracy: list[tuple[float, float]]
    """(spent, accuracy at temperature) of each evaluation."""
    greedy: float
    reward: list[tuple[float, float]]
    """(spent, mean training reward) of each step, over all responses sampled, those of groups that a filter
    did not take included."""
    sequences_per_prompt: float
    """Mean number of responses and corrections sampled per prompt, for choosing a G that matches."""
    solved: dict[int, float]
    """Held-out problem → share of correct responses at the end."""
    gradient: dict[str, float]
    """Means of the gradient meter's measurements; empty without it."""
    task: str = ""
    lr: float | None = None
    """Learning rate; None in results from before it was recorded, as for the fields below."""
    prompts_per_step: int | None = None
    """P."""
    other_accuracies: dict[str, float] = field(default_factory=dict)
    """Temperature of --eval-other-temperatures → accuracy at the end."""
    seconds: float | None = None
    """Duration of the run, start and evaluations included."""
    skill: float | None = None
    """`comparison_skill` of the policy that the run started from, if the run measured it."""
    break_even: dict[str, Any] | None = None
    """The corrections' position under the break-even law (`report.break_even`); None if there were none."""
    dear_decoding: list[float] = field(default_factory=list)
    """Operations spent at each step of `reward` if writing a token cost ten times as much as reading it;
    empty in results from before decoding was counted apart."""
    accelerator_seconds: list[float] = field(default_factory=list)
    """Accelerator seconds spent up to each step of `reward`; empty in results from before they were kept."""
    responses: list[float] = field(default_factory=list)
    """Number of responses sampled in each step of `reward`."""
    correction_success: list[float] = field(default_factory=list)
    """Share of corrections that were right in the first and in the last five steps; empty without any."""
    code: str = ""
    """Commit of the code that made the run, as in its versions.json."""

    @property
    def step_responses(self) -> list[float]:
        """Return the number of responses of each step of `reward`. Results from before it was recorded have P
        times G, or, without P, steps of equal size of which five make a window."""
        if self.responses:
            return self.responses
        step = self.prompts_per_step and self.prompts_per_step * self.samples_per_prompt
        return [step or WINDOW_RESPONSES / 5] * len(self.reward)


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader, ten times as fast, if PyYAML was built with it; for files that this package wrote."""


def read_run(run: PlannedRun, unit: str, setting: dict[str, Any] | None = None) -> RunResult:
    """Read the results of a finished run.

    Args:
        unit: `Study.unit`.

    Raises:
        ValueError: its records are incomplete.
    """
    rows = read_rows(run.directory / "metrics.jsonl")
    steps = [row for row in rows if row["kind"] == "step"]
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    if not steps or not evaluations or evaluations[-1]["step"] != steps[-1]["step"]:
        raise ValueError(f"{run.directory}: the run has no steps, or no evaluation after the last of them")
    if "accuracy" not in evaluations[-1]:
        raise ValueError(f"{run.directory}: a study compares by one set of held-out prompts, without a name")
    spent = f"spent_{unit}"
    config = yaml.load(run.config, _Loader)
    prompts = config["rollout-batch-size"]
    of_step = prompts * config["n-samples-per-prompt"]
    rewarded = [row for row in steps if row.get("reward") is not None]
    sampled = [config["n-samples-per-prompt"] + row.get("corrections", 0.0) / prompts for row in steps]
    path = run.directory / "versions.json"
    versions = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    meter = {name: [row[name] for row in steps if row.get(name) is not None] for name in _METERED}
    return RunResult(
        method=run.method,
        seed=run.seed,
        setting=setting or {},
        samples_per_prompt=config["n-samples-per-prompt"],
        steps=steps[-1]["step"],
        spent={name.removeprefix("spent_"): v for name, v in steps[-1].items() if name.startswith("spent_")},
        accuracy=[(row[spent], row["accuracy"]) for row in evaluations],
        greedy=evaluations[-1]["greedy_accuracy"],
        # of the groups taken, in records from before that of all responses was written
        reward=[(row[spent], row.get("reward_sampled", row["reward"])) for row in rewarded],
        sequences_per_prompt=fmean(sampled),
        solved=load_outcomes(outcomes_path(run.directory, steps[-1]["step"])),
        gradient={name: fmean(values) for name, values in meter.items() if values},
        task=run.task,
        lr=config["lr"],
        prompts_per_step=prompts,
        other_accuracies={
            temperature[1]: v for n, v in evaluations[-1].items() if (temperature := _AT.fullmatch(n))
        },
        seconds=json.loads((run.directory / "summary.json").read_text(encoding="utf-8"))["seconds_total"],
        skill=comparison_skill(measured) if (measured := run.directory / SKILL_FILE).exists() else None,
        break_even=break_even(steps),
        dear_decoding=[
            row["spent_flops"] + (DECODING_PRICE - 1) * row["spent_flops_decoding"]
            for row in rewarded
            if "spent_flops_decoding" in row
        ],
        accelerator_seconds=[row["spent_accelerator_seconds"] for row in rewarded],
        responses=[row.get("responses_sampled", of_step) for row in rewarded],
        correction_success=_correction_success(steps),
        code=str(versions.get("commit", "")),
    )


def _correction_success(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    corrected = [row for row in steps if row.get("corrections") and "correction_success" in row]
    if len(corrected) < 2 * _STEPS:
        return []
    return [
        float(np.average([r["correction_success"] for r in part], weights=[r["corrections"] for r in part]))
        for part in (corrected[:_STEPS], corrected[-_STEPS:])
    ]


def comparison_skill(path: Path) -> float | None:
    """Return how much more often a correction with a correct reference succeeds than another try. The file is
    from `ibpo skill`, or from a run before its first step. None if too few prompts allowed the measurement.
    Raises OSError, ValueError, TypeError, KeyError if it is not such a file."""
    ways = json.loads(read_user_file(path, JSON_BYTES))["ways"]["groups with a correct response"]
    above = ways.get("correct reference", {}).get("above_resample")
    return None if above is None else float(above["estimate"])


def compare(study: Study, results: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return one line of the table for each task and method with runs, baseline first.

    Methods are compared over the seeds that they and the baseline both have. Costs that were never reached
    are infinite; the ratio of medians over seeds is given if both are finite. Raises ValueError if the
    baseline has no runs, or runs of a task were tested on different problems.
    """
    lines = [line for task in study.tasks for line in _of_task(study, task.name, results)]
    if not lines:
        raise ValueError(f"no finished run of the baseline {study.baseline}")
    return lines


def compare_overall(study: Study, results: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return one line per method over all tasks: the mean of its accuracies on them, over the seeds for which
    it and the baseline have run on every task, and whether its difference is the same on all tasks
    (`interaction_p`). Empty if the study has one task."""
    if len(study.tasks) < 2:
        return []
    by_task = {name: _accuracies_by_task(study, name, results) for name in study.methods}
    means = {
        name: {seed: fmean(values) for seed, values in of_seeds.items()} for name, of_seeds in by_task.items()
    }
    baseline = means[study.baseline]
    lines: list[dict[str, Any]] = []
    for name in _baseline_first(study):
        seeds = sorted(means[name].keys() & baseline.keys())
        if not seeds:
            continue
        line: dict[str, Any] = {
            "method": name,
            "seeds": len(seeds),
            "accuracy": asdict(estimate([means[name][seed] for seed in seeds])),
        }
        if name != study.baseline:
            differences_ST = np.array([by_task[name][s] for s in seeds]) - [
                by_task[study.baseline][s] for s in seeds
            ]
            line["difference"] = asdict(estimate(differences_ST.mean(axis=1))) | {
                "by_task": differences_ST.mean(axis=0).tolist(),
                "interaction_p": interaction_p(differences_ST),
            }
        lines.append(line)
    _adjust(lines)
    return lines


def compare_at_equal_steps(study: Study, results: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return the mean training reward of the same five steps for every task and method, with intervals over
    seeds: the effect of a step, whatever it costs.

    The last of these steps is one that the baseline and at least half of all methods have reached with every
    seed. A method with fewer steps is listed without a reward.
    """
    lines: list[dict[str, Any]] = []
    for task in study.tasks:
        by_method = _by_method(task.name, results)
        if study.baseline not in by_method:
            continue
        reached = {name: min(len(run.reward) for run in runs.values()) for name, runs in by_method.items()}
        last = min(reached[study.baseline], sorted(reached.values(), reverse=True)[(len(reached) - 1) // 2])
        if last < _STEPS:
            continue
        baseline = _rewards(by_method[study.baseline], last)
        for name in filter(by_method.__contains__, _baseline_first(study)):
            line = {"task": task.name, "method": name, "first": last - _STEPS + 1, "last": last}
            if reached[name] >= last:
                rewards = _rewards(by_method[name], last)
                shared = sorted(rewards.keys() & baseline.keys())
                line |= {"seeds": len(rewards), "reward": asdict(estimate(list(rewards.values())))}
                if name != study.baseline and shared:
                    line["difference"] = asdict(estimate([rewards[s] - baseline[s] for s in shared]))
            lines.append(line)
    return lines


def dose_response(
    study: Study, results: Sequence[RunResult], lines: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return every method's difference from the baseline on each task, by the comparison skill of the task's
    warm start. The skill is the study's, otherwise the mean of the runs' measurements before their first
    step. Empty unless warm starts of two skills were compared.

    Args:
        lines: result of `compare`.
    """
    skills: dict[str, float] = {}
    for task in study.tasks:
        measured = [run.skill for run in results if run.task == task.name and run.skill is not None]
        if task.skill is not None or measured:
            skills[task.name] = task.skill if task.skill is not None else fmean(measured)
    if len(set(skills.values())) < 2:
        return []
    points = [
        {"method": line["method"], "task": line["task"], "skill": skills[line["task"]]}
        | {key: line["difference"][key] for key in ("mean", "low", "high")}
        for line in lines
        if "difference" in line and line["task"] in skills
    ]
    return sorted(points, key=lambda point: (point["method"], point["skill"]))


def _of_task(study: Study, task: str, results: Sequence[RunResult]) -> list[dict[str, Any]]:
    by_method = _by_method(task, results)
    if study.baseline not in by_method:
        return []
    baseline = by_method[study.baseline]
    lines = [
        {"task": task} | _line(name, by_method[name], baseline, study.threshold)
        for name in _baseline_first(study)
        if name in by_method
    ]
    _adjust(lines)
    return lines


def _adjust(lines: Sequence[dict[str, Any]]) -> None:
    """Add the p of the paired t test, adjusted over the methods, to each line."""
    differences = [line["difference"] for line in lines if "difference" in line]
    for difference, p in zip(differences, holm([d["p"] for d in differences]), strict=True):
        difference["holm_p"] = p


def _by_method(task: str, results: Sequence[RunResult]) -> dict[str, dict[int, RunResult]]:
    by_method: dict[str, dict[int, RunResult]] = {}
    for result in results:
        if result.task == task:
            by_method.setdefault(result.method, {})[result.seed] = result
    return by_method


def _baseline_first(study: Study) -> list[str]:
    return [study.baseline, *(name for name in study.methods if name != study.baseline)]


def _accuracies_by_task(study: Study, method: str, results: Sequence[RunResult]) -> dict[int, list[float]]:
    """Return the accuracy on every task by seed, for seeds that have run on every task."""
    runs = [_by_method(task.name, results).get(method, {}) for task in study.tasks]
    seeds = set.intersection(*(set(of_task) for of_task in runs))
    return {seed: [of_task[seed].accuracy[-1][1] for of_task in runs] for seed in sorted(seeds)}


def _rewards(runs: dict[int, RunResult], last: int) -> dict[int, float]:
    """Return the mean training reward of the last steps up to `last`, by seed."""
    return {seed: fmean(r for _, r in run.reward[last - _STEPS : last]) for seed, run in runs.items()}


def _line(
    name: str, runs: dict[int, RunResult], baseline: dict[int, RunResult], threshold: float
) -> dict[str, Any]:
    shared = sorted(set(runs) & set(baseline))
    results = [runs[seed] for seed in sorted(runs)]
    costs = [cost_to_threshold(run, threshold) for run in results]
    cost = median(costs)
    dear = [cost_to_threshold(run, threshold, run.dear_decoding) for run in results if run.dear_decoding]
    base_cost = median(cost_to_threshold(run, threshold) for run in baseline.values())
    success = [run.correction_success for run in results if run.correction_success]
    line: dict[str, Any] = {
        "method": name,
        "seeds": len(results),
        "samples_per_prompt": results[0].samples_per_prompt,
        "prompts_per_step": results[0].prompts_per_step,
        "sequences_per_prompt": fmean(run.sequences_per_prompt for run in results),
        "lr": results[0].lr,
        "setting": results[0].setting,
        "steps": fmean(run.steps for run in results),
        "spent": {unit: fmean(run.spent[unit] for run in results) for unit in results[0].spent},
        "accuracy_by_seed": {run.seed: run.accuracy[-1][1] for run in results},
        "accuracy": asdict(estimate(np.nanmean(_matrix(results), axis=1))),
        "greedy": fmean(run.greedy for run in results),
        "greedy_over_seeds": asdict(estimate([run.greedy for run in results])),
        "other_accuracies": {
            at: asdict(estimate([run.other_accuracies[at] for run in results]))
            for at in results[0].other_accuracies
            if all(at in run.other_accuracies for run in results)
        },
        "cost_to_threshold": {
            "median": cost,
            "reached": sum(map(math.isfinite, costs)),
            "of_baseline": cost / base_cost if math.isfinite(cost) and math.isfinite(base_cost) else None,
            "dear_decoding": median(dear) if dear else None,
        },
        "correction_success": [fmean(values) for values in zip(*success, strict=True)],
        "gradient": {
            key: fmean(run.gradient[key] for run in results)
            for key in results[0].gradient
            if all(key in run.gradient for run in results)
        },
    }
    if runs is not baseline and shared:
        method_SP, baseline_SP = (
            _matrix([results_by_seed[seed] for seed in shared]) for results_by_seed in (runs, baseline)
        )
        line["difference"] = asdict(estimate(np.nanmean(method_SP - baseline_SP, axis=1)))
    return line


def _matrix(runs: Sequence[RunResult]) -> np.ndarray:
    """Return outcomes [seeds, problems]."""
    problems = sorted(runs[0].solved)
    if any(sorted(run.solved) != problems for run in runs):
        raise ValueError("the runs were not tested on the same problems")
    return np.array([[run.solved[problem] for problem in problems] for run in runs])


def cost_to_threshold(run: RunResult, threshold: float, costs: Sequence[float] | None = None) -> float:
    """Return what the run had spent when its training reward reached the threshold; infinite if it never
    did.

    Args:
        costs: amount spent by each step; None: in the unit of the study's budget.
    """
    spent = [s for s, _ in run.reward] if costs is None else costs
    return cost_to_reach(threshold, spent, [r for _, r in run.reward], run.step_responses)
