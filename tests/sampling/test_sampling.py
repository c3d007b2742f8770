"""The Sampler and the stream of groups: the same groups in any order of finishing, and after any death."""

import asyncio
import gc
import os
import random
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engines import SimulatedEngine, StepTime, in_virtual_time

from megatron_ibpo.basics.records import Group, Prompt, Sample, SampleRequest, token_ids
from megatron_ibpo.credit import (
    CreditContext,
    Vocabulary,
    any_group,
    credit_of,
    fill_batch,
    find_operator,
    is_informative,
    leaves_gradient,
)
from megatron_ibpo.engines import Engine, EngineDiedError, EngineError, EngineLostError, ThreadedEngine
from megatron_ibpo.engines.vllm.settings import engine_settings
from megatron_ibpo.sampling import Sampler
from megatron_ibpo.sampling.groups import Batch, GroupSampler, Rules, sample_batch
from megatron_ibpo.sampling.journal_memory import replay
from megatron_ibpo.sampling.meter import Meter
from megatron_ibpo.sampling.requests import group_requests
from support.credit_cases import correct_groups, plain
from support.sampling_cases import ROLLOUT, STEP, judge, make_prompts
from support.tiny_models import make_qwen3


def correction_prompt(prompt: Prompt, wrong: np.ndarray, references: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([prompt.head_ids, wrong, *references, prompt.tail_ids])


CONTEXT = CreditContext(credit_of("ibpo"), ROLLOUT, Vocabulary(correction_prompt), 400, seed=3, step=2)
OPERATOR = find_operator(CONTEXT.algorithm)


def write(request: SampleRequest) -> list[int]:
    """Return what an engine answers: it depends on the request alone."""
    draw = random.Random(request.seed + 1000 * int(request.prompt_token_ids.sum()))
    return [draw.randrange(2, 60) for _ in range(draw.randint(1, request.max_tokens))]


class RandomScore:
    """A verifier that takes its time, more or less of it."""

    def __init__(self, seed: int = 0, longest: float = 0.3) -> None:
        self._draw = random.Random(seed)
        self._longest = longest

    async def __call__(self, prompt: Prompt, sample: Sample) -> None:
        await asyncio.sleep(self._draw.uniform(0, self._longest))
        judge(prompt, sample)


def draw_round(number: int) -> list[tuple[Prompt, Sequence[SampleRequest]]]:
    prompts = make_prompts(100 * number)
    requests = group_requests(prompts, ROLLOUT, seed=CONTEXT.seed, step=CONTEXT.step)
    size = ROLLOUT.n_samples_per_prompt
    return [(prompt, requests[i * size : (i + 1) * size]) for i, prompt in enumerate(prompts)]


ALL = Rules(ROLLOUT.rollout_batch_size, 1, any_group, any_group)


def at_once(number: int) -> list[Group]:
    """The groups of a round by the plain way, without corrections: sample all, score all."""
    groups = []
    for prompt, requests in draw_round(number):
        samples = [answered(request) for request in requests]
        for index, sample in enumerate(samples):
            sample.index = index
            judge(prompt, sample)
        groups.append(Group(prompt, samples))
    return groups


def answered(request: SampleRequest) -> Sample:
    ids = token_ids(write(request))
    zeros, ones = np.zeros(len(ids), np.float32), np.ones(len(ids), np.bool_)
    finish = "stop" if len(ids) < request.max_tokens else "length"
    return Sample(request.prompt_token_ids, ids, zeros, finish, 1.0, ((0, 0),), ones)


def corrected(groups: list[Group]) -> list[Group]:
    def score(pairs: list[tuple[Prompt, Sample]]) -> None:
        for prompt, sample in pairs:
            judge(prompt, sample)

    correct_groups(groups, CONTEXT, OPERATOR, lambda requests: [answered(r) for r in requests], score)
    return groups


def stream(
    engines: Sequence[SimulatedEngine], rules: Rules = ALL, score: Any = None, **options: Any
) -> tuple[Batch, float, dict[str, float]]:
    """(batch, seconds, metrics) of the engines in virtual time."""
    options = {"stall_timeout": 100.0} | options
    sampler = Sampler(engines, score or RandomScore(), **options)

    async def work() -> Batch:
        try:
            return await sample_batch(GroupSampler(sampler, OPERATOR, rules), draw_round, CONTEXT)
        finally:
            await sampler.settle()

    batch, seconds = in_virtual_time(work())
    return batch, seconds, sampler.take_metrics()


# --- what comes out --------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    engines=st.integers(1, 4),
    speeds=st.lists(st.floats(0.001, 0.2), min_size=4, max_size=4),
    seed=st.integers(0, 2**16),
)
def test_groups_do_not_depend_on_who_answers_first(engines: int, speeds: list[float], seed: int) -> None:
    fleet = [SimulatedEngine(StepTime(speed, 0.0), write) for speed in speeds[:engines]]
    batch, _, metrics = stream(fleet, score=RandomScore(seed))
    expected = corrected(at_once(0))
    assert plain(batch.groups) == plain(expected)
    assert sum(len(group.corrections) for group in batch.groups) > 5
    assert plain(batch.sampled) == plain(
        [response for group in expected for response in group.responses]
        + [correction.response for group in expected for correction in group.corrections]
    )
    assert metrics["requests_asked_again"] == 0


@settings(max_examples=25)
@given(
    deaths=st.lists(st.none() | st.floats(0.01, 1.0), min_size=1, max_size=4),
    takes=st.floats(0.0, 2.0),
    seed=st.integers(0, 2**16),
)
def test_groups_do_not_depend_on_engines_that_die(
    deaths: list[float | None], takes: float, seed: int
) -> None:
    fleet = [SimulatedEngine(STEP, write, dies_at=time) for time in deaths]

    async def revive(index: int) -> SimulatedEngine:
        await asyncio.sleep(takes)
        return SimulatedEngine(STEP, write)

    batch, _, metrics = stream(fleet, score=RandomScore(seed), revive=revive)
    assert plain(batch.groups) == plain(corrected(at_once(0)))
    assert metrics["engine_deaths"] == sum(engine.end is not None for engine in fleet)


@settings(max_examples=20)
@given(wanted=st.integers(1, 12), max_rounds=st.integers(1, 6), seed=st.integers(0, 2**16))
def test_dynamic_sampling_takes_the_groups_that_it_took_round_by_round(
    wanted: int, max_rounds: int, seed: int
) -> None:
    def usable(group: Group) -> bool:
        return group.prompt.index % 5 != 1

    rules = Rules(wanted, max_rounds, usable, is_informative)
    batch, _, _ = stream([SimulatedEngine(STEP, write) for _ in range(2)], rules, RandomScore(seed))
    groups, metrics = fill_batch(at_once, wanted, max_rounds, usable=usable, preferred=is_informative)
    assert plain(batch.groups) == plain(corrected(groups))
    assert batch.metrics == metrics


@settings(max_examples=12)
@given(wanted=st.integers(1, 9), max_rounds=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_deciding_after_credit_keeps_unsolved_groups_whose_corrections_differ(
    wanted: int, max_rounds: int, seed: int
) -> None:
    """Against choosing among groups that are all corrected. What was corrected and passed over is in the
    account of what was sampled."""

    def preferred(group: Group) -> bool:
        return is_informative(group) or leaves_gradient(group, CONTEXT, OPERATOR)

    rules = Rules(wanted, max_rounds, any_group, is_informative, leaves_gradient)
    engines = [SimulatedEngine(STEP, write) for _ in range(2)]
    batch, _, _ = stream(engines, rules, RandomScore(seed))
    groups, _ = fill_batch(lambda number: corrected(at_once(number)), wanted, max_rounds, preferred=preferred)
    assert plain(batch.groups) == plain(groups)
    assert len(batch.sampled) == sum(len(engine.asked) for engine in engines)


def test_an_unsolved_group_is_kept_for_its_corrections() -> None:
    """Of the groups that none of four responses solves, those stay whose four corrections do not all fail."""
    by_rewards, by_credit = (
        stream([SimulatedEngine(STEP, write)], Rules(9, 4, any_group, is_informative, after))[0].groups
        for after in (None, leaves_gradient)
    )

    def unsolved(groups: list[Group]) -> list[Group]:
        return [group for group in groups if not any(response.correct for response in group.responses)]

    assert unsolved(by_rewards) == []
    assert unsolved(by_credit) != []
    assert all(any(c.response.correct for c in group.corrections) for group in unsolved(by_credit))


def test_nothing_is_corrected_for_a_group_that_is_discarded() -> None:
    engine = SimulatedEngine(STEP, write)
    batch, _, _ = stream([engine], Rules(9, 6, any_group, is_informative))
    corrections = sum(len(group.corrections) for group in batch.groups)
    rounds = int(batch.metrics["sampling_rounds"])
    assert rounds > 1
    assert len(engine.asked) == rounds * 6 * 4 + corrections


def test_the_answers_of_mixed_prompts_come_in_order_and_scored() -> None:
    prompts = make_prompts(0, 3)
    asked = [(prompts[i % 3], SampleRequest(prompts[i % 3].token_ids, i, 30)) for i in range(12)]
    engines = [SimulatedEngine(STEP, write) for _ in range(3)]
    sampler = Sampler(engines, RandomScore(), stall_timeout=100)
    told: dict[int, Sample] = {}
    samples, _ = in_virtual_time(sampler.answers(asked, told.__setitem__))
    assert told == dict(enumerate(samples)), "each one as it is scored"
    assert list(told) != sorted(told), "and not in order"
    assert [s.token_ids.tolist() for s in samples] == [write(request) for _, request in asked]
    assert all(sample.is_scored for sample in samples)
    for engine in engines:  # a prompt each
        assert len({int(request.prompt_token_ids[0]) for _, request in engine.asked}) == 1


# --- when it is asked ------------------------------------------------------------------------------


def test_a_group_is_corrected_while_others_are_still_sampled() -> None:
    first, second = make_prompts(0, 2)

    def unequal(request: SampleRequest) -> list[int]:
        return [3] * (2000 if request.prompt_token_ids[0] == second.token_ids[0] else 10)

    rollout = replace(ROLLOUT, rollout_max_response_len=2000)
    context = replace(CONTEXT, rollout=rollout, max_context=10_000)

    def draw(number: int) -> list[tuple[Prompt, Sequence[SampleRequest]]]:
        requests = group_requests([first, second], rollout, seed=0, step=0)
        return [(first, requests[:4]), (second, requests[4:])]

    async def score(prompt: Prompt, sample: Sample) -> None:
        sample.reward, sample.correct = float(sample.index), False

    engine = SimulatedEngine(STEP, unequal)
    sampler = Sampler([engine], score, stall_timeout=100)
    rules = Rules(2, 1, any_group, any_group)
    batch, seconds = in_virtual_time(sample_batch(GroupSampler(sampler, OPERATOR, rules), draw, context))
    assert [len(group.corrections) for group in batch.groups] == [4, 4]
    first_corrections = [
        time for time, request in engine.asked[8:] if request.prompt_token_ids[0] == first.token_ids[0]
    ]
    assert len(first_corrections) == 4
    assert max(first_corrections) < 1 < 20 < seconds


def test_a_group_stays_together_and_groups_are_spread() -> None:
    engines = [SimulatedEngine(STEP, write) for _ in range(3)]
    _, _, metrics = stream(engines)
    of_prompts = [{int(request.prompt_token_ids[0]) for _, request in engine.asked[:8]} for engine in engines]
    assert [len(prompts) for prompts in of_prompts] == [2, 2, 2]
    assert set.union(*of_prompts) == {prompt.token_ids[0] for prompt in make_prompts(0)}
    assert metrics["engine_requests_max"] >= metrics["engine_requests_min"] >= 8
    assert metrics["sampling_tail_seconds"] > 0


def test_where_prefixes_are_not_cached_single_requests_are_spread() -> None:
    engines = [SimulatedEngine(STEP, write) for _ in range(24)]
    batch, alone, _ = stream(engines, prefix_caching=False)
    responses = [request for _, requests in draw_round(0) for request in requests]
    seeds = [request.seed for engine in engines for _, request in engine.asked[:1]]
    assert sorted(seeds) == sorted(request.seed for request in responses), "one for each engine"
    by_group, together, _ = stream([SimulatedEngine(STEP, write) for _ in range(24)])
    assert plain(batch.groups) == plain(by_group.groups), "the answering engine does not matter"
    assert alone < together


def test_corrections_stay_near_their_group_unless_another_engine_has_far_less_to_do() -> None:
    (prompt,) = make_prompts(0, 1)
    small, large = (SampleRequest(prompt.token_ids, seed, seed * 10) for seed in (1, 2))
    sampler = Sampler([SimulatedEngine(STEP, write) for _ in range(2)], RandomScore(), stall_timeout=100)

    async def work() -> None:
        busy = asyncio.create_task(sampler.answer(prompt, [large]))
        await asyncio.sleep(0)  # engine 0 has 20 tokens to write
        assert sampler.place([small]) == 1
        assert sampler.place([large], near=0) == 0
        assert sampler.place([small], near=0) == 1
        await busy
        assert sampler.place([small]) == 0

    in_virtual_time(work())


def test_requests_of_one_moment_go_out_together() -> None:
    sizes = []

    class Counting(SimulatedEngine):
        async def submit(self, requests: Sequence[tuple[int, SampleRequest]], version: int) -> None:
            sizes.append(len(requests))
            await super().submit(requests, version)

    stream([Counting(STEP, write)])
    assert sizes[0] == 6 * 4


# --- what goes wrong -------------------------------------------------------------------------------


def test_without_a_successor_the_death_is_raised_and_the_others_are_told_to_stop() -> None:
    dying, living = SimulatedEngine(STEP, write, dies_at=0.05), SimulatedEngine(STEP, write)
    with pytest.raises(EngineError, match="engine 0 died: it has ended"):
        stream([dying, living])
    assert living.aborted


def test_whoever_asks_after_the_last_engine_was_lost_is_told_so_too() -> None:
    """The run waits for room in the cluster whichever of its askers is heard first."""

    async def lost(index: int) -> SimulatedEngine:
        raise EngineLostError(f"engine {index} was lost with its node")

    dying = SimulatedEngine(STEP, write, dies_at=0.05)
    sampler = Sampler([dying], RandomScore(), stall_timeout=100, revive=lost)
    prompt = make_prompts(0, 1)[0]
    asked = [(prompt, SampleRequest(prompt.token_ids, 0, 20))]

    async def twice() -> None:
        for said in ("engine 0 was lost with its node", "no engine is left"):
            with pytest.raises(EngineLostError, match=said):
                await sampler.answers(asked)

    in_virtual_time(twice())


def test_an_engine_that_hangs_is_ended_and_replaced() -> None:
    hanging = SimulatedEngine(STEP, write, hangs_at=0.05)

    async def revive(index: int) -> SimulatedEngine:
        return SimulatedEngine(STEP, write)

    batch, seconds, metrics = stream([hanging], revive=revive, stall_timeout=30.0)
    assert hanging.end == "no answer within 30 seconds (--engine-stall-timeout)"
    assert plain(batch.groups) == plain(corrected(at_once(0)))
    assert 30 < seconds < 40
    assert metrics["engine_deaths"] == 1


def test_a_refusal_ends_everything_and_leaves_the_sampler_usable() -> None:
    class Refusing(SimulatedEngine):
        refuses = True

        async def take(self, timeout: float) -> list[tuple[int, Sample]]:
            if self.refuses:
                self.refuses = False
                self._running.clear()
                raise EngineError("asked to sample with policy version 0, the engine has none")
            return await super().take(timeout)

    sampler = Sampler([Refusing(STEP, write)], RandomScore(), stall_timeout=100)
    prompt = make_prompts(0, 1)[0]
    asked = [(prompt, SampleRequest(prompt.token_ids, 0, 20))]

    async def twice() -> list[Sample]:
        with pytest.raises(EngineError, match="the engine has none"):
            await sampler.answers(asked)
        return await sampler.answers(asked)

    samples, _ = in_virtual_time(twice())
    assert samples[0].token_ids.tolist() == write(asked[0][1])


def test_when_it_is_closed_over_what_is_asked_nothing_is_left_pending(caplog) -> None:
    """asyncio complains of such tasks, after whatever else is said at the end of a run."""

    class Far(SimulatedEngine):
        async def abort(self, numbers: Collection[int]) -> None:
            await asyncio.sleep(0.5)

    endless = [2] * 10**5  # drawing that many for each request would keep the sampler's loop busy
    sampler = Sampler([Far(STEP, lambda _: endless)], RandomScore(), stall_timeout=100)
    prompts = make_prompts(0, 50)
    asked = [(prompt, SampleRequest(prompt.token_ids, 0, 10**5)) for prompt in prompts]
    sampler.start(sampler.answers(asked))
    time.sleep(0.1)
    sampler.close()
    del sampler
    gc.collect()
    assert caplog.text == ""


def test_a_verifier_that_raises_takes_the_requests_back() -> None:
    async def broken(prompt: Prompt, sample: Sample) -> None:
        raise RuntimeError("no verifier")

    engine = SimulatedEngine(STEP, write)
    with pytest.raises(RuntimeError, match="no verifier"):
        stream([engine], score=broken)
    assert engine.aborted
    assert not engine._running


@pytest.mark.parametrize(("length", "says"), [(0, "empty prompt"), (64, "64 tokens leaves no room")])
def test_a_prompt_that_cannot_be_answered_is_refused(length: int, says: str) -> None:
    engine = SimulatedEngine(STEP, write)
    sampler = Sampler([engine], RandomScore(), stall_timeout=100, max_context=64)
    request = SampleRequest(token_ids([3] * length), 0, 4)
    with pytest.raises(ValueError, match=says):
        in_virtual_time(sampler.answers([(make_prompts(0, 1)[0], request)]))
    assert engine.asked == []


# --- recordings ------------------------------------------------------------------------------------


def test_a_replay_gives_the_recorded_groups() -> None:
    recorded, expected = corrected(at_once(0)), corrected(at_once(0))
    assert plain(replay(recorded, OPERATOR, CONTEXT)) == plain(expected)


def test_a_replay_of_fewer_corrections_is_refused() -> None:
    recorded = corrected(at_once(0))
    victim = next(group for group in recorded if group.corrections)
    victim.corrections.pop()
    with pytest.raises(ValueError, match="fewer corrections than this algorithm asks for"):
        replay(recorded, OPERATOR, CONTEXT)


def test_a_replay_without_an_operator_leaves_the_corrections_out() -> None:
    algorithm = credit_of("gspo")
    context = replace(CONTEXT, algorithm=algorithm)
    groups = replay(corrected(at_once(0)), find_operator(algorithm), context)
    assert [group.corrections for group in groups] == [[]] * 6


# --- a real engine ---------------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.slow
def test_a_real_engine_that_is_killed_is_replaced_and_finishes_its_groups(tmp_path: Path) -> None:
    checkpoint = make_qwen3(tmp_path / "model", 0)
    rollout = replace(ROLLOUT, rollout_max_response_len=120, rollout_max_context_len=500)
    rollout = replace(rollout, vllm_dtype="float32", vllm_kv_cache_bytes=128 * 1024**2)
    context = replace(CONTEXT, rollout=rollout, max_context=500)
    chosen = engine_settings(rollout, checkpoint, "gloo", gpus=(), num_threads=1)

    # started side by side, since a start takes seconds of one core
    first, second = (Engine(chosen, tmp_path / f"engine{number}.log") for number in range(2))
    revived: list[int] = []
    scored: list[Sample] = []

    async def revive(index: int) -> ThreadedEngine:
        await asyncio.to_thread(second.wait_ready, 200)
        revived.append(index)
        return ThreadedEngine(second)

    async def score(prompt: Prompt, sample: Sample) -> None:
        scored.append(sample)
        judge(prompt, sample)
        if len(scored) == 5:
            os.kill(first.pid, signal.SIGKILL)

    def prompts(number: int) -> list[tuple[Prompt, Sequence[SampleRequest]]]:
        return [
            (prompt, [replace(r, max_tokens=120) for r in requests]) for prompt, requests in draw_round(0)
        ]

    try:
        first.wait_ready(200)
        with Sampler([ThreadedEngine(first)], score, stall_timeout=100, revive=revive) as sampler:
            mended = sampler.run(sample_batch(GroupSampler(sampler, OPERATOR, ALL), prompts, context))
            metrics = sampler.take_metrics()
            whole = sampler.run(sample_batch(GroupSampler(sampler, OPERATOR, ALL), prompts, context))
        with pytest.raises(EngineDiedError):
            first.take(1.0)
    finally:
        for engine in (first, second):
            engine.close()
    assert revived == [0]
    assert metrics["engine_deaths"] == 1
    assert metrics["requests_asked_again"] >= 1
    for ours, theirs in zip(mended.sampled, whole.sampled, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert np.abs(ours.logprobs - theirs.logprobs).max() < 1e-4  # batches of other sizes
    assert any(group.corrections for group in mended.groups)


def test_the_tail_of_sampling_is_from_the_first_sample_to_the_last_since_the_metrics_were_taken():
    meter = Meter(2)
    meter.asked(1)
    nothing = {"engine_requests_max": 1, "engine_requests_min": 0, "engine_deaths": 0}
    assert meter.take() == {**nothing, "requests_asked_again": 0, "sampling_tail_seconds": 0}
    for at in (30.0, 31.0, 32.5):
        meter.finished(at)
    assert meter.take()["sampling_tail_seconds"] == 2.5
    assert meter.take()["sampling_tail_seconds"] == 0
