"""The streaming loop on simulated engines and a simulated trainer, and a bound that no schedule beats.

The loop is the one that samples in a run (`sampling.ahead`); only engines and trainer are simulated.
"""

import asyncio
import math
import random
import statistics
from dataclasses import dataclass

import numpy as np
from simulated_engines import SimulatedEngine, StepTime, in_virtual_time

from megatron_ibpo.basics.records import Prompt, Sample, SampleRequest, token_ids
from megatron_ibpo.config import RolloutConfig
from megatron_ibpo.credit import CreditContext, Vocabulary, any_group, credit_of, find_operator
from megatron_ibpo.plan.workload import SIGMA
from megatron_ibpo.sampling import Sampler
from megatron_ibpo.sampling.ahead import Ahead, Pace
from megatron_ibpo.sampling.groups import GroupSampler, Rules


@dataclass(frozen=True)
class Fleet:
    """Engines, and a trainer that has GPUs of its own or takes turns with them."""

    engines: int
    training_seconds: float
    pause_seconds: float
    step_time: StepTime
    most_running: int
    groups: int
    group_size: int
    longest: int
    median_length: float
    """Median of log-normal lengths before they are cut at the longest."""

    def length(self, seed: int) -> int:
        """Return the length of the response to the request with this seed."""
        drawn = random.Random(seed).lognormvariate(0.0, SIGMA) * self.median_length
        return max(1, min(self.longest, round(drawn)))


@dataclass(frozen=True)
class Measured:
    """Means over the steps of a simulated run after the pipeline has filled."""

    seconds_per_step: float
    tokens_per_step: float
    """Number of tokens trained on."""
    staleness_mean: float
    staleness_max: float
    partial_rollouts: float
    """Partial rollouts per step."""
    groups_expired: float
    """Expired groups per step."""
    length_bias: float | None


CONTEXT = CreditContext(
    credit_of("gspo"), RolloutConfig(), Vocabulary(lambda *_: token_ids([])), 10**9, seed=0, step=0
)


async def score(prompt: Prompt, sample: Sample) -> None:
    sample.reward = 0.0


def simulate(fleet: Fleet, pace: Pace, steps: int) -> Measured:
    """Simulate `steps` steps after those in which the pipeline fills."""
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
    """Seconds to write all tokens by engines that are always full."""
    training: float
    pause: float
    freshness: float
    """Samples requested with version v are trained on by step v + S: the S + 1 steps up to then contain the
    sampling of the longest response, beside the rest, and the training."""

    @property
    def throughput(self) -> float:
        """max(sampling, training) + pause, for an S that is large enough."""
        return max(self.sampling, self.training) + self.pause

    @property
    def seconds(self) -> float:
        return max(self.throughput, self.freshness + self.pause)


def bound(fleet: Fleet, staleness: int, tokens_per_step: float) -> Bound:
    """Return the bound; see `Bound`.

    Freshness: a step takes U seconds without the pause, R of them for training. From the update to version v
    to the batch of step v + S engines have (S + 1) U - R seconds. In these each writes its part of the
    tokens, as many per second as on average, and takes the steps of the longest response, which all read
    the weights: (S + 1) U - R >= L + c ((S + 1) U - R) / U, with L the reading of weights for the longest
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
