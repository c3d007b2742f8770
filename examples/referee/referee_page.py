"""The page of the referee: what the records say of each policy, method and group size."""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from frozen_policy import Space, open_space
from gradient_records import PromptRecord, load, unpacked
from method_verdicts import CURRENCIES, judge, measure

from megatron_ibpo.study.plan import Study

SIZES = (4, 8)
"""Group sizes at which each method is judged."""
STRATA = {"none of 4 right": (0, 0), "1 or 2": (1, 2), "3 or 4": (3, 4)}
"""Difficulty of a prompt by further responses to it: name → least and most right ones."""
FEWEST = 20
"""Prompts of a stratum that is judged."""


def judge_tasks(study: Study, directory: Path, metric: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (task, what its records say, as plain values) for each task of a study that has records.

    Raises:
        ValueError: a method needs a sample or a gradient that was not recorded.
    """
    for task in study.tasks:
        paths = sorted((directory / task.name).glob("prompts_*.pt"))
        if not paths:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            space = open_space(study, task, SIZES, Path(scratch))
        contents = [load(path) for path in paths]
        compass = load(directory / task.name / "compass.pt")
        records = [unpacked(entry, space.prompts.at) for content in contents for entry in content["prompts"]]
        star_scores = (compass["star"] @ compass["scores"].T).double().numpy()
        cell = rounded(_judge_task(space, records, star_scores, study.baseline, metric))
        seconds = compass["seconds"] + sum(content["seconds"] for content in contents)
        yield task.name, cell | {"core_seconds": round(seconds)}


def _judge_task(
    space: Space, records: Sequence[PromptRecord], star_scores: Any, baseline: str, metric: str
) -> dict[str, Any]:
    measures = {name: measure(contender, records) for name, contender in space.contenders.items()}
    right = np.array([sum(record.probes) for record in records])
    strata = {
        name: np.flatnonzero((right >= least) & (right <= most)) for name, (least, most) in STRATA.items()
    }
    methods: dict[str, Any] = {}
    for name, of_method in measures.items():
        of_baseline = measures[f"{baseline}@{name.rpartition('@')[2]}"]
        verdict = judge(of_method, of_baseline, star_scores, metric)
        by_stratum = {
            stratum: judge(of_method.only(places), of_baseline.only(places), star_scores, metric).efficiency[
                "free"
            ]
            for stratum, places in strata.items()
            if len(places) >= FEWEST
        }
        operations = {currency: of_method.cost[place].mean() for place, currency in enumerate(CURRENCIES)}
        methods[name] = asdict(verdict) | {
            "operations": operations,
            "strata": {stratum: asdict(interval) for stratum, interval in by_stratum.items()},
        }
    return {
        "prompts": len(records),
        "solves": float(np.mean([record.probes for record in records])),
        "corrections_succeed": _correction_success(records),
        "strata": {stratum: len(places) for stratum, places in strata.items()},
        "methods": methods,
    }


def _correction_success(records: Sequence[PromptRecord]) -> float:
    """Return the share of right samples among those sampled under other prompts than the plain one."""
    outcomes = [
        sample.correct
        for record in records
        for sample in record.samples.values()
        if len(sample.prompt_token_ids) != len(record.prompt.token_ids)
    ]
    return float(np.mean(outcomes)) if outcomes else math.nan


def rounded(value: Any) -> Any:
    """Return plain values with four digits; None for NaN, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


def page(task: str, cell: Mapping[str, Any]) -> str:
    """Return a policy's tables in Markdown."""
    lines = [
        f"## {task}",
        "",
        f"{cell['prompts']} prompts; solves {cell['solves']}, corrections succeed "
        f"{cell['corrections_succeed']}; {cell['core_seconds']} core-seconds. Prompts by difficulty: "
        f"{cell['strata']}.",
    ]
    for size in SIZES:
        names = " | ".join(CURRENCIES)
        lines += ["", f"| G = {size} | S | V | V, Euclid | cosine | {names} |", "|---" * 8 + "|"]
        for name, verdict in cell["methods"].items():
            method, _, of_size = name.rpartition("@")
            if int(of_size) == size:
                lines.append(f"| {method} | {_row(verdict)} |")
    return "\n".join([*lines, ""])


def _row(verdict: Mapping[str, Any]) -> str:
    names = ("signal", "noise", "euclidean_noise", "cosine")
    cells = [
        *(verdict[name] for name in names),
        *(verdict["efficiency"][currency] for currency in CURRENCIES),
    ]
    return " | ".join(
        f"{_number(cell['value'])} [{_number(cell['low'])}, {_number(cell['high'])}]" for cell in cells
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
