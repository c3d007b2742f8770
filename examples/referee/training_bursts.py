"""The referee's test: predictions, short training at equal expense, and how well the two agree.

Every method of a cell (policy and group size) takes the same number of steps at the same expense, so a dear
method has fewer prompts in each. At a small learning rate Adam's progress in a step grows with the ratio of
signal to noise, so methods should end in the order of S²/(V·C).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from scipy import stats

from megatron_ibpo.study.plan import Study
from megatron_ibpo.study.statistics import estimate

Array = npt.NDArray[np.float64]
CURRENCY = "free"
"""Operations as the run's own meter counts them."""
TRAINING: dict[str, Any] = {
    "lr": 3.0e-4,
    "eval-interval": None,
    "eval-num-prompts": 512,
    "eval-other-temperatures": [],
}
PREDICTIONS = "predictions.json"


def write_bursts(
    study: Study,
    cells: Mapping[str, Any],
    directory: Path,
    *,
    trained: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    responses: int,
) -> None:
    """Write the predictions and one study for each cell.

    Args:
        cells: task → what the records say, as plain values.
        trained: methods to train, the study's baseline first.
        seeds: seeds of each method.
        steps: number of steps of the baseline; the budget of all.
        responses: number of responses in a step of the baseline.
    """
    directory.mkdir(parents=True, exist_ok=True)
    predictions: dict[str, dict[str, Any]] = {}
    for task in study.tasks:
        methods = cells[task.name]["methods"] if task.name in cells else {}
        for size in sorted({int(name.rpartition("@")[2]) for name in methods}):
            chosen = {name: methods[f"{name}@{size}"] for name in trained}
            prompts = {
                name: max(1, round(responses / size / entry["cost"][CURRENCY]))
                for name, entry in chosen.items()
            }
            price = methods[f"{study.baseline}@{size}"]["operations"][CURRENCY]
            cell = f"{task.name}@{size}"
            predictions[cell] = {
                name: entry["efficiency"][CURRENCY] | {"prompts": prompts[name]}
                for name, entry in chosen.items()
            }
            content = {
                "recipe": str(study.recipe),
                "baseline": study.baseline,
                "budget": float(f"{price * prompts[study.baseline] * steps:.6g}"),
                "budget-unit": "flops",
                "seeds": list(seeds),
                "common": {**study.common, **task.settings, **TRAINING, "n-samples-per-prompt": size},
                "methods": {
                    name: {**study.methods[name], "rollout-batch-size": prompts[name]} for name in trained
                },
            }
            del content["common"]["data-seed"]  # type: ignore[attr-defined]  # each seed has its own
            path = directory / f"{cell}.yaml"
            path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    text = json.dumps(predictions, indent=1)
    (directory / PREDICTIONS).write_text(text + "\n", encoding="utf-8")


def outcomes(directory: Path, cell: str, trained: Sequence[str]) -> Array:
    """Return [seeds, methods]: accuracy after the bursts of the seeds that every method has finished."""

    def accuracies(seed: str) -> list[float]:
        paths = [runs / method / seed / "summary.json" for method in trained]
        if not all(path.exists() for path in paths):
            return []
        ends = [json.loads(path.read_text(encoding="utf-8")).get("accuracy_end") for path in paths]
        return [] if None in ends else ends

    runs = directory / cell / "runs"
    seeds = sorted(path.name for path in (runs / trained[0]).glob("seed_*"))
    return np.array([of_seed for seed in seeds if (of_seed := accuracies(seed))])


def agreement(predicted: Array, measured: Array) -> float:
    """Return Kendall's τ (b, for ties)."""
    return float(stats.kendalltau(predicted, measured).statistic)


def check_bursts(directory: Path) -> str:
    """Return the table of predictions and outcomes, and how well they agree over the cells."""
    predictions = json.loads((directory / PREDICTIONS).read_text(encoding="utf-8"))
    trained = list(next(iter(predictions.values())))
    lines = ["| cell | seeds | τ | " + " | ".join(trained) + " |", "|---" * (len(trained) + 3) + "|"]
    taus, of_prices, of_seeds, signs = [], [], [], []
    for cell, of_cell in predictions.items():
        trained_SM = outcomes(directory, cell, trained)
        if not len(trained_SM):
            continue
        expected = np.array([of_cell[method]["value"] for method in trained])
        reached = trained_SM.mean(axis=0)
        taus.append(agreement(expected, reached))
        prompts = np.array([of_cell[method]["prompts"] for method in trained])
        if np.ptp(prompts):  # equal prices rank nothing
            of_prices.append(agreement(prompts, reached))
        if len(trained_SM) > 1:
            of_seeds.append(agreement(*trained_SM[:2]))
        signs += ((expected[1:] > 1) == (reached[1:] > reached[0])).tolist()
        row = [
            f"{efficiency:.2f}, {accuracy:.3f}"
            for efficiency, accuracy in zip(expected, reached, strict=True)
        ]
        lines.append(f"| {cell} | {len(trained_SM)} | {taus[-1]:.2f} | " + " | ".join(row) + " |")
    return "\n".join([
        *lines,
        "",
        f"τ {_mean(taus)} over {len(taus)} cells; of a ranking by price alone {_mean(of_prices)}; between "
        f"seeds {_mean(of_seeds)}; right signs against the baseline: {sum(signs)} of {len(signs)}",
    ])  # fmt: skip


def _mean(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "unknown"
    mean = estimate(values)
    return f"{mean.mean:.2f} [{mean.low:.2f}, {mean.high:.2f}]"
