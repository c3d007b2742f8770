"""Fit the planner's efficiencies to one half of the published runs, and predict the other half; then fit them
to all, which is what the planner uses.

    python tools/fit_planner.py                 # fit, judge, print
    python tools/fit_planner.py --save          # and keep it, with the tables of docs/planner.md

The halves are whole sources, by the hash of their names (`plan.evidence.halves`). The fit sees the fitted
half alone. Then every source is left out in turn. Rows whose open facts move a prediction by more than half
(`LOOSE`) are judged by whether the measured figure lies in the predicted range, apart from the errors.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.versions import machine
from megatron_ibpo.models import ModelShape, read_hf_config
from megatron_ibpo.models.families import family_part
from megatron_ibpo.models.shape import Fields
from megatron_ibpo.plan.efficiencies import PARAMETERS, Efficiencies, Fitted, save
from megatron_ibpo.plan.evidence import Row, about, halves, model_dimensions, read_evidence
from megatron_ibpo.plan.hardware import Hardware, read_hardware
from megatron_ibpo.plan.lengths import fixed, log_normal, shuffled, uniform
from megatron_ibpo.plan.sampling_time import Engine, sample
from megatron_ibpo.plan.step_time import Task, step_times, update_seconds
from megatron_ibpo.plan.training_time import Batch, Layout, pass_time

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tools/results/fit_planner.json"
PAGE = ROOT / "docs/planner.md"
LOOSE = 1.5
"""Highest over lowest prediction within a row's open facts above which it is judged by its range."""
POINTS = 256
"""Lengths that stand for a step's."""
FACTORS = frozenset({"loop", "ampere", "blackwell", "cdna", "tensorrt"})
SHARES = frozenset(PARAMETERS) - FACTORS - {
    "routing", "train_layer", "engine_layer", "engine_tensor", "engine_sequence", "engine_request",
    "host_adam", "step",
}  # fmt: skip
SEEN_BY = {
    "training": (
        "matmul", "matmul_fp8", "experts", "attention", "elementwise", "link", "routing", "train_layer",
        "host", "host_adam", "ampere", "blackwell", "cdna",
    ),
    "generation": (
        "decode", "prefill", "engine_layer", "engine_tensor", "engine_sequence", "engine_request",
        "link", "ampere", "blackwell", "cdna", "tensorrt",
    ),
    "update": ("gather", "reshard", "ipc"),
}  # fmt: skip
"""Parameters that can move a row of a kind; all of them a step's."""
PRIOR = 1.0
"""Standard deviation of a parameter's logarithm before any row is seen: the fit starts from the defaults, and
what no row moves stays there."""
PRIOR_FACTOR = 0.3
"""The same of the factor of a loop, a generation or an engine."""
NOISE = 0.2
"""Of a figure's logarithm, beside what its row leaves open: its weight against the prior."""

# -------------------------------------------------------------------------------------------- predictions


@cache
def shape_of(model: str) -> ModelShape | None:
    """None for models that this project does not know."""
    folder = ROOT / "examples/models" / model
    if folder.is_dir():
        return read_hf_config(folder)
    raw = model_dimensions().get(model)
    if raw is None:
        return None
    shape: ModelShape = family_part(raw["model_type"], "shape").read(Fields(raw, Path(model)))
    return shape


def hardware_of(facts: Mapping[str, Any]) -> Hardware:
    hardware = replace(read_hardware(facts["hardware"]), **facts.get("changed", {}))
    share = facts.get("peak_share", 1.0)
    return replace(hardware, peak_bf16=hardware.peak_bf16 * share, peak_fp8=hardware.peak_fp8 * share)


def layout_of(facts: Mapping[str, Any]) -> Layout:
    names = (
        "tensor", "pipeline", "context", "expert", "chunks", "fsdp", "precision", "recompute",
        "offload_optimizer", "balanced_experts", "attention",
    )  # fmt: skip
    given = {name: facts[name] for name in names if name in facts}
    micro_batch = facts.get("micro_batch_tokens") or facts["micro_batch"] * facts["sequence"]
    return Layout(gpus=facts.get("training_gpus", facts.get("gpus")), micro_batch=micro_batch, **given)


def engine_of(facts: Mapping[str, Any], shape: ModelShape, reached: Efficiencies, tensor: int) -> Engine:
    most = facts.get("running") or (256 if facts["hardware"] == "a100" else 1024)
    if facts.get("engine") == "tensorrt":
        reached = replace(reached, prefill=reached.prefill * reached.tensorrt)
    return Engine(
        shape=shape,
        hardware=hardware_of(facts),
        reached=reached,
        tensor=tensor,
        weight_bytes=facts.get("weight_bytes", 2.0 if facts["precision"] == "bf16" else 1.0),
        cache_bytes=facts.get("cache_bytes", 2.0),
        state_bytes=facts.get("state_bytes", 2.0),
        memory_share=facts.get("memory_share", 0.9),
        cache_share=facts.get("cache_share", 1.0),
        most_running=most,
        serves=facts.get("serves", True),
    )


def predict(
    facts: Mapping[str, Any], kind: str, measured: Mapping[str, float], reached: Efficiencies
) -> dict[str, float]:
    """Each measured figure as the model sees it."""
    shape = shape_of(facts["model"])
    assert shape is not None
    found = {"training": _training, "generation": _generation, "step": _step, "update": _update}[kind](
        facts, shape, reached
    )
    return {name: found[name] for name in measured if name in found}


def _training(facts: Mapping[str, Any], shape: ModelShape, reached: Efficiencies) -> dict[str, float]:
    layout, sequence = layout_of(facts), facts["sequence"]
    batch = Batch.of([sequence]).scaled(facts["batch"])
    seconds = pass_time(shape, layout, hardware_of(facts), reached, batch).total
    return {"tokens_per_gpu_second": batch.tokens / seconds / layout.gpus, "step_seconds": seconds}


def _generation(facts: Mapping[str, Any], shape: ModelShape, reached: Efficiencies) -> dict[str, float]:
    engine = engine_of(facts, shape, reached, facts["tensor"])
    mean, count = facts["response"], facts["prompts"]
    lengths = {
        "fixed": lambda: fixed(mean, count),
        "uniform": lambda: shuffled(uniform(mean, count)),
        "log-normal": lambda: shuffled(log_normal(mean, 8 * mean, count)),
    }[facts["lengths"].replace("lognormal", "log-normal")]()
    done = sample(engine, lengths, prompt=facts["prompt"], concurrency=facts["concurrency"])
    tokens = done.tokens + (count * facts["prompt"] if facts.get("counts_prompt") else 0)
    return {"output_tokens_per_second": tokens / done.seconds}


def _step(facts: Mapping[str, Any], shape: ModelShape, reached: Efficiencies) -> dict[str, float]:
    prompt = facts.get("prompt", 0)
    longest = facts["longest"] - prompt
    mean = min(facts["mean_length"] - prompt, longest * 0.98)
    lengths = log_normal(mean, longest, POINTS, facts.get("sigma", 1.0))
    task = Task(
        responses=lengths,
        count=facts["sequences"],
        prompt=prompt,
        group=16,
        updates=facts.get("updates", 1),
        passes_without_gradient=facts["passes_without_gradient"],
        staleness=facts["staleness"],
    )
    found = step_times(
        shape,
        layout_of(facts),
        engine_of(facts, shape, reached, facts["engine_tensor"]),
        task,
        hardware_of(facts),
        reached,
        engine_gpus=facts["engine_gpus"],
        colocated=facts["colocated"],
        transport=None if facts["colocated"] else "resharded",
    )
    return {
        "step_seconds": found.total,
        "generation_seconds": found.sampling,
        "logprob_seconds": found.log_probs,
        "update_seconds": found.update,
        "training_seconds": found.log_probs + found.update,
    }


def _update(facts: Mapping[str, Any], shape: ModelShape, reached: Efficiencies) -> dict[str, float]:
    seconds = update_seconds(
        shape,
        hardware_of(facts),
        reached,
        transport=facts["transport"],
        engine_tensor=facts["engine_tensor"],
        gpus=facts["training_gpus"] + facts["engine_gpus"],
    )
    return {"update_seconds": seconds}


def open_range(row: Row, reached: Efficiencies) -> dict[str, tuple[float, float]]:
    """Lowest and highest prediction over the corners of what the row leaves open."""
    corners = [dict(zip(row.left_open, corner, strict=True)) for corner in product(*row.left_open.values())]
    found = [
        predict(row.with_facts(**corner), row.kind, row.measured, reached)
        for corner in corners
        if not (row.kind == "step" and corner.get("mean_length", 0) >= row.facts["longest"])
    ]
    return {name: (min(f[name] for f in found), max(f[name] for f in found)) for name in found[0]}


# ------------------------------------------------------------------------------------------------ the fit


def known(rows: Sequence[Row]) -> list[Row]:
    """Those whose model this project has."""
    return [row for row in rows if shape_of(row.facts["model"]) is not None]


def from_logarithms(point: np.ndarray) -> Efficiencies:
    return Efficiencies(**dict(zip(PARAMETERS, map(float, np.exp(point)), strict=True)))


def fit(rows: Sequence[Row], start: Efficiencies, evaluations: int = 12) -> Fitted:
    """Least squares of logarithms; every source weighs the same as the square root of its figures says, a
    figure the less the more its row leaves open, and what lies far off counts less (soft L1)."""
    origin = np.log([getattr(start, name) for name in PARAMETERS])
    default = np.log([getattr(Efficiencies(), name) for name in PARAMETERS])
    figures = dict.fromkeys({row.source for row in rows}, 0)
    for row in rows:
        figures[row.source] += len(_times(row))
    top = statistics.mean(figures.values())
    weights = {source: math.sqrt(math.sqrt(top / count)) for source, count in figures.items()}
    noise = [figure_noise(row) for row in rows]

    already: dict[tuple[int, tuple[float, ...]], dict[str, float]] = {}

    def predicted(number: int, reached: Efficiencies) -> dict[str, float]:
        """Of a row; most steps of the fit move parameters that most rows do not see."""
        row = rows[number]
        key = number, tuple(getattr(reached, name) for name in SEEN_BY.get(row.kind, PARAMETERS))
        if key not in already:
            already[key] = predict(row.facts, row.kind, _times(row), reached)
        return already[key]

    def residuals(point: np.ndarray) -> np.ndarray:
        reached = from_logarithms(point)
        off = [
            weights[row.source] / noise[number][name] * math.log(value / row.measured[name])
            for number, row in enumerate(rows)
            for name, value in predicted(number, reached).items()
        ]
        return np.array([*off, *((point - default) / prior)])

    prior = np.where([name in FACTORS for name in PARAMETERS], PRIOR_FACTOR, PRIOR)
    upper = np.array([0.0 if name in SHARES else np.inf for name in PARAMETERS])
    upper = np.where([name == "routing" for name in PARAMETERS], math.log(3), upper)
    lower = np.where([name == "routing" for name in PARAMETERS], -1e-6, -np.inf)
    found = least_squares(
        residuals,
        np.clip(origin, lower + 1e-4, upper - 1e-4),
        bounds=(lower, upper),
        loss="soft_l1",
        diff_step=1e-3,
        max_nfev=evaluations,
    )
    moved = found.jac[: len(found.jac) - len(PARAMETERS)]
    spread = np.sqrt(np.diag(np.linalg.inv(found.jac.T @ found.jac)))
    intervals = {
        name: (math.exp(found.x[i] - 1.645 * spread[i]), math.exp(found.x[i] + 1.645 * spread[i]))
        for i, name in enumerate(PARAMETERS)
        if np.abs(moved[:, i]).max(initial=0) > 1e-3
    }
    return Fitted(from_logarithms(found.x), intervals, {})


def figure_noise(row: Row) -> dict[str, float]:
    """Standard deviation of each figure's logarithm: what it may lie off, and that of an even spread over
    what the open facts of the row allow."""
    ranges = open_range(row, Efficiencies())
    return {
        name: math.hypot(NOISE, math.log(high / low) / math.sqrt(12)) for name, (low, high) in ranges.items()
    }


def _times(row: Row) -> dict[str, float]:
    """Figures of time; memory has nothing to fit."""
    return {name: value for name, value in row.measured.items() if not name.endswith("_gib")}


# --------------------------------------------------------------------------------------------- the errors


@dataclass(frozen=True)
class Judged:
    """A figure beside its prediction."""

    source: str
    row: str
    half: str
    kind: str
    figure: str
    measured: float
    predicted: float
    low: float
    high: float
    cited: str

    @property
    def error(self) -> float:
        """Share by which the prediction is off."""
        return self.predicted / self.measured - 1

    @property
    def loose(self) -> bool:
        return self.high / self.low > LOOSE


def judge(rows: Sequence[Row], reached: Efficiencies, of: Mapping[str, str]) -> list[Judged]:
    judged = []
    for row in rows:
        found = predict(row.facts, row.kind, _times(row), reached)
        values = {name: float(value) for name, value in found.items()}
        ranges = open_range(row, reached)
        for name, value in values.items():
            low, high = float(min(ranges[name][0], value)), float(max(ranges[name][1], value))
            judged.append(
                Judged(
                    row.source, row.name, of[row.source], row.kind, name, row.measured[name],
                    value, low, high, row.cited,
                )
            )  # fmt: skip
    return judged


def summary(judged: Sequence[Judged]) -> dict[str, Any]:
    """Median and 90th percentile of the absolute error, of rows that are not loose; and of the loose ones the
    share whose figure lies within the predicted range."""
    firm = [abs(found.error) for found in judged if not found.loose]
    loose = [found.low <= found.measured <= found.high for found in judged if found.loose]
    return {
        "figures": len(firm),
        "median": round(statistics.median(firm), 4) if firm else None,
        "p90": round(float(np.quantile(firm, 0.9)), 4) if firm else None,
        "loose": len(loose),
        "loose_within": sum(loose),
    }


def factor(judged: Sequence[Judged]) -> float:
    """Within which nine of ten firm predictions lie, both ways."""
    return float(
        np.exp(np.quantile([abs(math.log(1 + found.error)) for found in judged if not found.loose], 0.9))
    )


def by(judged: Sequence[Judged], what: str) -> dict[str, Any]:
    """The summary of each kind or source."""
    names = sorted({getattr(found, what) for found in judged})
    return {name: summary([found for found in judged if getattr(found, what) == name]) for name in names}


def left_out(rows: Sequence[Row], source: str, of: Mapping[str, str]) -> dict[str, Any]:
    """A source predicted by a fit to all the others, from the defaults, which no source has moved."""
    others = fit([row for row in rows if row.source != source], Efficiencies(), evaluations=7)
    return summary(judge([row for row in rows if row.source == source], others.efficiencies, of))


# ------------------------------------------------------------------------------------------------ the page


def line(name: str, found: Mapping[str, Any]) -> str:
    def share(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.0f} %"

    within = f"{found['loose_within']} of {found['loose']}" if found["loose"] else "–"
    return f"| {name} | {found['figures']} | {share(found['median'])} | {share(found['p90'])} | {within} |"


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Marker in the page → what stands behind it."""
    head = "| {} | figures | median error | 90th percentile | loose, within range |\n|---|---|---|---|---|"
    halves_ = [
        line(f"{half}, {kind}", found)
        for half in ("held out", "fitted")
        for kind, found in results[half].items()
    ]
    sources = [line(f"{name} ({results['half'][name]})", f) for name, f in results["sources"].items()]
    alone = [line(name, found) for name, found in results["left_out"].items()]
    used = [line(kind, found) for kind, found in results["used"].items()]
    rows = [
        f"| {row['source']} | {row['row']} | {row['figure']} | {row['measured']:.4g} | "
        f"{row['predicted']:.4g} | {100 * row['error']:+.0f} % | "
        f"{row['low']:.4g} to {row['high']:.4g}{' *' if row['loose'] else ''} |"
        for row in results["rows"]
    ]
    parameters = [
        f"| `{name}` | {entry['value']:.3g} | "
        + (f"{entry['low']:.3g} to {entry['high']:.3g}" if "low" in entry else "not seen: the start")
        + f" | {entry['half']:.3g} | {entry['start']:.3g} |"
        for name, entry in results["parameters"].items()
    ]
    return {
        "halves": "\n".join([head.format("half and kind"), *halves_]),
        "used": "\n".join([head.format("kind"), *used]),
        "sources": "\n".join([head.format("source"), *sources]),
        "left out": "\n".join([head.format("source left out"), *alone]),
        "parameters": "\n".join(
            [
                "| parameter | fitted to all | 90 % | to the fitted half | start |\n|---|---|---|---|---|",
                *parameters,
            ]
        ),
        "rows": "\n".join(
            [
                "| source | row | figure | published | predicted | error | over what is open |",
                "|---|---|---|---|---|---|---|",
                *rows,
            ]
        ),
    }


def write_page(results: Mapping[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables(results).items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
        text = re.sub(pattern, lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text, flags=re.S)  # type: ignore[misc]
    PAGE.write_text(text, encoding="utf-8")


def keep(results: Mapping[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_page(results)


@dataclass
class Arguments:
    save: bool = False
    """Keep what comes out: efficiencies.yaml, tools/results/fit_planner.json, tables of docs/planner.md."""
    leave_out: bool = True
    """Also fit without each source in turn."""


def main(arguments: Arguments) -> None:
    everything = read_evidence()
    rows, of = known(everything), halves(everything)
    half = fit([row for row in rows if of[row.source] == "fitted"], Efficiencies())
    judged = judge(rows, half.efficiencies, of)
    used = fit(rows, half.efficiencies)
    unseen = [found for found in judged if found.half == "held out"]
    errors = {
        kind: round(factor([f for f in unseen if f.kind == kind]), 3)
        for kind in ("training", "generation", "step")
    }
    used = replace(used, error=errors)
    if arguments.save:
        save(used)
    results: dict[str, Any] = {
        "machine": machine("numpy", "scipy"),
        "rows_in_all": len(everything),
        "half": of,
        "about": about(),
        "parameters": {name: parameter(name, half, used) for name in PARAMETERS},
        "error_factor": errors,
    }
    for name in ("held out", "fitted"):
        results[name] = by([found for found in judged if found.half == name], "kind")
        print(name, json.dumps(results[name]), flush=True)
    results["used"] = by(judge(rows, used.efficiencies, of), "kind")
    print("used, on what it was fitted to", json.dumps(results["used"]), flush=True)
    results["sources"] = by(judged, "source")
    print(json.dumps(results["sources"], indent=1), flush=True)
    results["rows"] = [
        asdict(found) | {"error": round(found.error, 4), "loose": found.loose} for found in judged
    ]
    results["left_out"] = {}
    for source in [None, *(sorted(results["sources"]) if arguments.leave_out else ())]:
        if source is not None:
            results["left_out"][source] = left_out(rows, source, of)
            print("left out:", source, results["left_out"][source], flush=True)
        if arguments.save:
            keep(results)


def parameter(name: str, half: Fitted, used: Fitted) -> dict[str, float]:
    """Its start, its value in both fits, and the interval of that which is used."""
    return {
        "value": getattr(used.efficiencies, name),
        "half": getattr(half.efficiencies, name),
        "start": getattr(Efficiencies(), name),
    } | dict(zip(("low", "high"), used.intervals.get(name, ()), strict=False))


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
