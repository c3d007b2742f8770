"""Predict a step of Qwen3-Next-80B-A3B on 32 to 8,192 H100, and the driver's work for it.

    python tools/scale_table.py --save tools/results/scale.json --document docs/scale.md

The table has the fastest layout of the planner's search for each size, with the recipe's batch and with one
that grows with the GPUs. If engines sample ahead it also has the streaming loop on simulated engines, against
its bound. The driver's share is from tools/results/driver_load.json. Nothing is run on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from simulated_engines import StepTime
from simulated_fleet import Fleet, bound, simulate

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.versions import machine
from megatron_ibpo.commands.search import described
from megatron_ibpo.config import Config
from megatron_ibpo.models.cost import weight_count
from megatron_ibpo.plan.prediction import FittingLayout, Setting, StepTimes, search
from megatron_ibpo.plan.roofline import decode_seconds
from megatron_ibpo.plan.workload import fitted, median_length
from megatron_ibpo.run.settings import parse_config
from megatron_ibpo.sampling.ahead import Pace

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "examples/recipes/qwen3_next_80b_a3b_ibpo.yaml"
MODEL = ROOT / "examples/models/qwen3_next_80b_a3b"
DRIVER = ROOT / "tools/results/driver_load.json"
HARDWARE = "h100"
SIZES = (32, 256, 1024, 8192)
SIMULATED = 256
"""GPUs up to which the loop is simulated; more of them take minutes and gigabytes."""
SIMULATED_STEPS = 4
BYTES_PER_TOKEN = 4 + 4 + 1
"""Bytes per token of a sample on its way to the driver: id, log-prob, mask."""
BYTES_PER_PROMPT_TOKEN = 4


@dataclass(frozen=True)
class Driver:
    """Processor time of the driver per sample. The time per token is from two lengths in fleets of one size;
    the rest is that of the largest fleet."""

    own: tuple[float, float]
    """Seconds per sample, and per token of it: sampling code, decoding, journal."""
    calls: float
    """Seconds per sample for calls of engines through Ray; more tokens did not cost more."""

    @classmethod
    def read(cls, path: Path) -> Driver:
        results = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in results["load"]["rows"] if row["journal"]]
        longest = max(row["tokens"] for row in rows)
        engines = max(row["engines"] for row in rows if row["tokens"] == longest)
        by_tokens = {
            row["tokens"]: 1 / row["samples_per_second"] for row in rows if row["engines"] == engines
        }
        seconds_per_token = line(by_tokens)[1]
        largest = max(rows, key=lambda row: row["engines"])
        fixed = 1 / largest["samples_per_second"] - seconds_per_token * largest["tokens"]
        calls = results["real_calls"]["rows"]
        spent = sum(row["processor_seconds"] for row in calls)
        return cls((fixed, seconds_per_token), spent / sum(row["samples"] for row in calls))

    def seconds(self, tokens: float) -> float:
        """Return the seconds of a sample."""
        return self.python(tokens) + self.calls

    def python(self, tokens: float) -> float:
        """Return the part of it that only one thread at a time can do."""
        return self.own[0] + self.own[1] * tokens


def line(points: dict[int, float]) -> tuple[float, float]:
    """Return (value at 0, slope) of the line through two points."""
    (x1, x2) = sorted(points)
    slope = (points[x2] - points[x1]) / (x2 - x1)
    return points[x1] - slope * x1, slope


def recipe() -> Config:
    return parse_config(["--config", str(RECIPE), "--hf-checkpoint", str(MODEL)])


def predicted(config: Config, gpus: int, prompts: int, driver: Driver | None) -> dict[str, Any]:
    """Return a row: `prompts` per step on this many GPUs."""
    rollout = replace(config.rollout, rollout_batch_size=prompts)
    fitting = search(replace(config, rollout=rollout), gpus, HARDWARE, most=1)[0]
    times, task = fitting.setting.times(), fitting.setting.task
    samples = task.count * (1 + task.corrections)
    mean, longest = float(np.mean(task.responses)), float(np.max(task.responses))
    prompt = task.prompt + task.corrections / (1 + task.corrections) * task.correction_prompt
    row = {
        "gpus": gpus,
        "prompts": prompts,
        "responses": task.count,
        "corrections": round(task.count * task.corrections),
        "layout": described(fitting),
        "engines": fitting.setting.engine_gpus // fitting.setting.engine.tensor,
        "seconds": fitting.seconds,
        "seconds_low": fitting.seconds / fitting.setting.factor,
        "seconds_high": fitting.seconds * fitting.setting.factor,
        "stages": times.stages(),
        "bound": times.bound,
        "tail_of_sampling": times.sampled.tail / times.sampled.seconds,
        "longest_over_mean": longest / mean,
        "running_per_engine": times.sampled.mean_running,
        "slots_per_engine": times.sampled.slots,
        "tokens_per_second": samples * mean / fitting.seconds,
        "tokens_per_gpu_second": samples * mean / fitting.seconds / gpus,
        "samples_per_second": samples / fitting.seconds,
        "store_bytes_per_second": samples
        * (mean * BYTES_PER_TOKEN + prompt * BYTES_PER_PROMPT_TOKEN)
        / fitting.seconds,
        "weight_bytes_per_engine": 2 * weight_count(fitting.setting.basis.shape).total,
        "weight_bytes": 2
        * weight_count(fitting.setting.basis.shape).total
        * copies_received(fitting.setting),
        "driver_share": None if driver is None else samples * driver.seconds(mean) / fitting.seconds,
    }
    rounded_row: dict[str, Any] = rounded(row | {"simulated": simulated(fitting, times)})
    return rounded_row


def copies_received(setting: Setting) -> int:
    """Return how many copies of the weights all engines receive: colocated workers get their parts, others
    the whole."""
    return setting.engine_gpus // setting.engine.tensor if setting.colocated else setting.engine_gpus


def simulated(fitting: FittingLayout, times: StepTimes) -> dict[str, float] | None:
    """Return the streaming loop on engines as fast as the predicted ones, without corrections, beside its
    bound and its prediction. None without sampling ahead, and for large clusters."""
    setting, staleness = fitting.setting, fitting.setting.task.staleness
    if setting.colocated or not staleness or setting.gpus > SIMULATED:
        return None
    measured = simulate(fleet_of(fitting, times), Pace(staleness), SIMULATED_STEPS)
    least = bound(fleet_of(fitting, times), staleness, measured.tokens_per_step).seconds
    training = times.log_probs + times.update
    return {
        "seconds_per_step": measured.seconds_per_step,
        "bound_seconds": least,
        "of_bound": measured.seconds_per_step / least,
        "predicted_seconds": max(times.sampling, training) + times.weights,
        "staleness_mean": measured.staleness_mean,
    }


def fleet_of(fitting: FittingLayout, times: StepTimes) -> Fleet:
    """Return engines and a trainer that work concurrently, as fast as predicted."""
    setting = fitting.setting
    basis = replace(setting.basis, reached=setting.basis.reached.within_a_loop())
    task, engine = setting.task, setting.engine
    engines = max(1, setting.engine_gpus // engine.tensor)
    mean, longest = float(np.mean(task.responses)), float(np.max(task.responses))
    full = min(times.sampled.slots, max(1, -(-task.count // engines)) * (task.staleness + 1))
    full_seconds, half_seconds = (
        decode_seconds(basis, engine, running, task.prompt + mean / 2) for running in (full, max(1, full / 2))
    )
    per_sequence = (full_seconds - half_seconds) / max(1e-9, full - max(1, full / 2))
    reading = (times.sampled.prompts + times.corrected.prompts) / max(
        1.0, times.sampled.tokens + times.corrected.tokens
    )
    return Fleet(
        engines=engines,
        training_seconds=times.log_probs + times.update,
        pause_seconds=times.weights,
        step_time=StepTime(max(1e-9, full_seconds - per_sequence * full), per_sequence + reading),
        most_running=full,
        groups=max(1, task.count // task.group),
        group_size=task.group,
        longest=round(longest),
        median_length=median_length(mean, longest),
    )


def rounded(value: Any) -> Any:
    """Round to four significant digits, for readability."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


# -------------------------------------------------------------------------------------------- the tables


def step_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of seconds per step, by stage."""
    lines = [
        "| GPUs | prompts | a step, s | sampling | corrections | log-probs | update | weights | "
        "tokens/s and GPU | layout |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        stages = " | ".join(
            f"{row['stages'][name]:.1f}"
            for name in ("sampling", "corrections", "log_probs", "update", "weights")
        )
        span = f"{row['seconds']:.0f} ({row['seconds_low']:.0f} to {row['seconds_high']:.0f})"
        lines.append(
            f"| {row['gpus']:,} | {row['prompts']:,} | {span} | {stages} | "
            f"{row['tokens_per_gpu_second']:.3g} | {row['layout']} |"
        )
    return lines


def driver_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of the driver's throughput per second."""
    lines = [
        "| GPUs | prompts | engines | samples/s | tokens/s | MB/s of samples | weights received, TB | "
        "waiting for the longest | driver's processor |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {row['gpus']:,} | {row['prompts']:,} | {row['engines']:,} | "
        f"{row['samples_per_second']:.3g} | {row['tokens_per_second']:,.0f} | "
        f"{row['store_bytes_per_second'] / 1e6:.3g} | {row['weight_bytes'] / 1e12:,.0f} | "
        f"{100 * row['tail_of_sampling']:.0f} % | {100 * row['driver_share']:.0f} % |"
        for row in rows
    ]


def loop_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of the streaming loop on simulated engines."""
    lines = [
        "| GPUs | prompts | engines | a step, s | its bound, s | over it | predicted, s |",
        "|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {row['gpus']:,} | {row['prompts']:,} | {row['engines']:,} | "
        f"{simulation['seconds_per_step']:.1f} | {simulation['bound_seconds']:.1f} | "
        f"{100 * (simulation['of_bound'] - 1):+.1f} % | {simulation['predicted_seconds']:.1f} |"
        for row in rows
        if (simulation := row["simulated"]) is not None
    ]


TABLES = {"steps": step_table, "driver": driver_table, "loop": loop_table}


def with_tables(document: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the document with the text between each table's marks rewritten."""
    for name, table in TABLES.items():
        head, opening, body = document.partition(f"<!-- {name} -->\n")
        _, closing, tail = body.partition(f"<!-- end of {name} -->")
        assert opening, f"the document has no table {name}"
        assert closing, f"the table {name} has no end"
        document = head + opening + "\n".join(table(rows)) + "\n" + closing + tail
    return document


@dataclass
class Arguments:
    save: Path | None = None
    """JSON file for the results."""
    document: Path | None = None
    """Page whose tables are rewritten."""


def main(arguments: Arguments) -> None:
    config, driver = recipe(), Driver.read(DRIVER)
    base_prompts = config.rollout.rollout_batch_size
    rows = []
    for grows in (False, True):
        for gpus in SIZES:
            prompts = base_prompts * gpus // SIZES[0] if grows else base_prompts
            if grows and prompts == base_prompts:
                continue
            rows.append(predicted(config, gpus, prompts, driver))
            print(rows[-1], flush=True)
    results = {
        "machine": machine("numpy"),
        "hardware": HARDWARE,
        "recipe": str(RECIPE.relative_to(ROOT)),
        "mean_length": config.rollout.rollout_max_response_len // 2,
        "step_error_factor": rounded(fitted().error["step"]),
        "driver": asdict(driver),
        "rows": rows,
    }
    if arguments.save:
        arguments.save.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if page := arguments.document:
        page.write_text(with_tables(page.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
