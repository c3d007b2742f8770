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
import yaml
from scipy import stats

from megatron_ibpo.study.plan import Study
from megatron_ibpo.study.statistics import estimate

METHODS = ("gspo", "wrong-weight", "ibpo", "ibpo-shaping-only", "plain-prompt", "plain-prompt-gated")
"""Methods that are trained; the others are coefficients on the same gradients."""
SEEDS = (0, 1)
CURRENCY = "free"
"""Operations as the run's own meter counts them."""
TRAINING = {
    "lr": 3.0e-4,
    "eval-interval": None,
    "eval-num-prompts": 512,
    "eval-other-temperatures": [],
}
PREDICTIONS = "predictions.json"


def write_bursts(
    study: Study, cells: Mapping[str, Any], directory: Path, *, steps: int, responses: int
) -> None:
    """Write the predictions and one study for each cell.

    Args:
        cells: task → what the records say, as plain values.
        steps: number of steps of the baseline; the budget of all.
        responses: number of responses in a step of the baseline.
    """
    directory.mkdir(parents=True, exist_ok=True)
    predictions: dict[str, dict[str, Any]] = {}
    for task in study.tasks:
        methods = cells[task.name]["methods"] if task.name in cells else {}
        for size in sorted({int(name.rpartition("@")[2]) for name in methods}):
            chosen = {name: methods[f"{name}@{size}"] for name in METHODS}
            prompts = {
                name: max(1, round(responses / size / entry["verdict"]["cost"][CURRENCY]))
                for name, entry in chosen.items()
            }
            price = methods[f"{study.baseline}@{size}"]["operations"][CURRENCY]
            cell = f"{task.name}@{size}"
            predictions[cell] = {
                name: entry["verdict"]["efficiency"][CURRENCY] | {"prompts": prompts[name]}
                for name, entry in chosen.items()
            }
            content = {
                "recipe": str(study.recipe),
                "baseline": study.baseline,
                "budget": float(f"{price * prompts[study.baseline] * steps:.6g}"),
                "budget-unit": "flops",
                "seeds": list(SEEDS),
                "common": {**study.common, **task.settings, **TRAINING, "n-samples-per-prompt": size},
                "methods": {
                    name: {**study.methods[name], "rollout-batch-size": prompts[name]} for name in METHODS
                },
            }
            del content["common"]["data-seed"]  # type: ignore[attr-defined]  # each seed has its own
            path = directory / f"{cell}.yaml"
            path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    text = json.dumps(_rounded(predictions), indent=1)
    (directory / PREDICTIONS).write_text(text + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def outcomes(directory: Path, cell: str) -> dict[str, list[float]]:
    """Return method → accuracy after the burst of each seed, for methods with all seeds."""
    found: dict[str, list[float]] = {}
    for method in METHODS:
        paths = [directory / cell / "runs" / method / f"seed_{seed}" / "summary.json" for seed in SEEDS]
        if all(path.exists() for path in paths):
            found[method] = [json.loads(path.read_text(encoding="utf-8"))["accuracy_end"] for path in paths]
    return found


def agreement(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return Kendall's τ (b, for ties)."""
    return float(stats.kendalltau(predicted, measured).statistic)


def check_bursts(directory: Path) -> str:
    """Return the table of predictions and outcomes, and τ over the cells whose bursts are complete."""
    predictions = json.loads((directory / PREDICTIONS).read_text(encoding="utf-8"))
    lines = ["| cell | τ | " + " | ".join(METHODS) + " |", "|---" * (len(METHODS) + 2) + "|"]
    taus, between, signs = [], [], []
    for cell, of_cell in predictions.items():
        trained = outcomes(directory, cell)
        if len(trained) < len(METHODS):
            continue
        expected = [of_cell[method]["value"] for method in METHODS]
        reached = [float(np.mean(trained[method])) for method in METHODS]
        taus.append(agreement(expected, reached))
        between.append(agreement(*([trained[method][seed] for method in METHODS] for seed in range(2))))
        signs += [(own > 1) == (end > reached[0]) for own, end in zip(expected[1:], reached[1:], strict=True)]
        row = [f"{own:.2f}, {end:.3f}" for own, end in zip(expected, reached, strict=True)]
        lines.append(f"| {cell} | {taus[-1]:.2f} | " + " | ".join(row) + " |")
    if len(taus) < 2:
        return "\n".join([*lines, "", "fewer than two cells are complete"])
    overall, ceiling = estimate(taus), estimate(between)
    return "\n".join([
        *lines,
        "",
        f"τ {overall.mean:.2f} [{overall.low:.2f}, {overall.high:.2f}] over {len(taus)} cells; between the "
        f"seeds of the bursts {ceiling.mean:.2f} [{ceiling.low:.2f}, {ceiling.high:.2f}]; "
        f"right signs against the baseline {np.mean(signs):.2f} of {len(signs)}",
    ])  # fmt: skip
