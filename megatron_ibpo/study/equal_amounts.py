"""Accuracy of two methods after an equal amount of what they spend, in several currencies."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_ibpo.study.plan import Study
from megatron_ibpo.study.run_results import DECODING_PRICE, RunResult
from megatron_ibpo.study.statistics import estimate

Points = list[tuple[float, float]]

_FEWEST_EVALUATIONS = 3


def compare_at_equal_amounts(study: Study, results: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return for each task, method and currency the accuracy on held-out problems of the method and of the
    baseline after the same amount, with intervals over the seeds that both have.

    The amount is the largest that every run of both has spent. Accuracy is interpolated between evaluations,
    so there is no line where a run has fewer than three, or no record of the currency.
    """
    lines = []
    for task in study.tasks:
        runs = {(run.method, run.seed): run for run in results if run.task == task.name}
        for method in study.methods:
            seeds = sorted(seed for name, seed in runs if name == method and (study.baseline, seed) in runs)
            if method == study.baseline or not seeds:
                continue
            pairs = [(runs[method, seed], runs[study.baseline, seed]) for seed in seeds]
            for currency in _amounts(study, pairs[0][0]):
                line = _line([[_curve(study, run, currency) for run in pair] for pair in pairs])
                if line is not None:
                    lines.append({"task": task.name, "method": method, "currency": currency} | line)
    return lines


def _line(curves_SM: Sequence[Sequence[Points]]) -> dict[str, Any] | None:
    if any(len(curve) < _FEWEST_EVALUATIONS for pair in curves_SM for curve in pair):
        return None
    amount = min(curve[-1][0] for pair in curves_SM for curve in pair)
    accuracy_SM = np.array([[_accuracy(curve, amount) for curve in pair] for pair in curves_SM])
    return {
        "amount": float(amount),
        "seeds": len(curves_SM),
        "accuracy": asdict(estimate(accuracy_SM[:, 0])),
        "baseline_accuracy": asdict(estimate(accuracy_SM[:, 1])),
        "difference": asdict(estimate(accuracy_SM[:, 0] - accuracy_SM[:, 1])),
    }


def _accuracy(curve: Points, amount: float) -> float:
    amounts, accuracies = zip(*curve, strict=True)
    return float(np.interp(amount, amounts, accuracies))


def _curve(study: Study, run: RunResult, currency: str) -> Points:
    """Return (amount, accuracy) of each evaluation; empty if the run has no record of the currency."""
    amounts = _amounts(study, run)[currency]
    if len(amounts) != len(run.reward):
        return []
    spent = [0.0, *(spent for spent, _ in run.reward)]
    steps = np.searchsorted(spent, [at for at, _ in run.accuracy], side="right") - 1
    return [
        ([0.0, *amounts][step], accuracy) for step, (_, accuracy) in zip(steps, run.accuracy, strict=True)
    ]


def _amounts(study: Study, run: RunResult) -> dict[str, Sequence[float]]:
    """Return the amounts spent up to each step of `run.reward`, by currency, the budget's first."""
    return {
        study.budget_unit.replace("-", " "): [spent for spent, _ in run.reward],
        f"operations, decoding x {DECODING_PRICE}": run.dear_decoding,
        "steps": range(1, len(run.reward) + 1),
        "accelerator seconds": run.accelerator_seconds,
    }
