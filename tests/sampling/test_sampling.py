"""The same groups in any order of finishing and after any death; ahead of training none is lost or old."""

import asyncio
import gc
import random
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated_engines import SimulatedEngine, StepTime, in_virtual_time

from megatron_ibpo import credit
from megatron_ibpo.basics.records import Group, Prompt, SampleRequest, token_ids
from megatron_ibpo.config import RolloutConfig
from megatron_ibpo.credit import CreditContext, Vocabulary, any_group, credit_of, find_operator
from megatron_ibpo.engines import EngineError, EngineLostError
from megatron_ibpo.sampling import Sampler
from megatron_ibpo.sampling.ahead import Ahead, Pace
from megatron_ibpo.sampling.groups import GroupSampler, Rules, replay, sample_batch
from megatron_ibpo.sampling.requests import Meter, group_requests
from support.credit_cases import correct_groups, plain
from support.samples import sample_of
from support.sampling_cases import ROLLOUT, STEP, judge, make_prompts


def correction_prompt(prompt, wrong, references):
    return np.concatenate([prompt.head_ids, wrong[:3], *[r[:3] for r in references], prompt.tail_ids])


CONTEXT = CreditContext(credit_of("ibpo"), ROLLOUT, Vocabulary(correction_prompt), 400, seed=3, step=2)
OPERATOR = find_operator(CONTEXT.algorithm)


def write(request):
    """What an engine answers depends on the request alone."""
    draw = random.Random(request.seed + 1000 * int(request.prompt_token_ids.sum()))
    return [draw.randrange(2, 60) for _ in range(draw.randint(1, request.max_tokens))]


async def revive(index, takes=0.0):
    await asyncio.sleep(takes)
    return SimulatedEngine(STEP, write)


def scoring(seed=0):
    """A verifier that takes its time, more or less of it."""
    draw = random.Random(seed)

    async def score(prompt, sample):
        await asyncio.sleep(draw.uniform(0, 0.3))
        judge(prompt, sample)

    return score


def sampler_of(*engines, score=None, **options):
    return Sampler(engines, score or scoring(), **{"stall_timeout": 100.0} | options)


def alone():
    (prompt,) = make_prompts(0, 1)
    return prompt, SampleRequest(prompt.token_ids, 0, 20)


def draw_round(number):
    prompts, size = make_prompts(100 * number), ROLLOUT.n_samples_per_prompt
    requests = group_requests(prompts, ROLLOUT, seed=CONTEXT.seed, step=CONTEXT.step)
    return [(prompt, requests[i * size : (i + 1) * size]) for i, prompt in enumerate(prompts)]


ALL = Rules(ROLLOUT.rollout_batch_size, 1, any_group, any_group)


def at_once(number):
    """The groups of a round by the plain way, without corrections: sample all, score all."""
    groups = []
    for prompt, requests in draw_round(number):
        samples = [answered(request) for request in requests]
        for index, sample in enumerate(samples):
            sample.index = index
            judge(prompt, sample)
        groups.append(Group(prompt, samples))
    return groups


def answered(request):
    ids = write(request)
    finish = "stop" if len(ids) < request.max_tokens else "length"
    return sample_of(request.prompt_token_ids, ids, 0.0, finish_reason=finish)


def corrected(groups):
    def score(pairs):
        return [judge(*pair) for pair in pairs]

    correct_groups(groups, CONTEXT, OPERATOR, lambda requests: [answered(r) for r in requests], score)
    return groups


def stream(engines, rules=ALL, **options):
    """(batch, seconds, metrics) of the engines in virtual time."""
    sampler = sampler_of(*engines, **options)

    async def work():
        try:
            return await sample_batch(GroupSampler(sampler, OPERATOR, rules), draw_round, CONTEXT)
        finally:
            await sampler.settle()

    batch, seconds = in_virtual_time(work())
    return batch, seconds, sampler.take_metrics()


speeds_and_deaths = st.tuples(st.floats(0.001, 0.2), st.none() | st.floats(0.01, 1.0))


@settings(max_examples=40)
@given(st.lists(speeds_and_deaths, min_size=1, max_size=4), st.floats(0.0, 2.0), st.integers(0, 2**16))
def test_groups_do_not_depend_on_who_answers_first_or_dies(engines, takes, seed):
    fleet = [SimulatedEngine(StepTime(speed, 0.001), write, dies_at=dies) for speed, dies in engines]
    batch, _, metrics = stream(fleet, score=scoring(seed), revive=partial(revive, takes=takes))
    expected = corrected(at_once(0))
    assert plain(batch.groups) == plain(expected)
    assert sum(len(group.corrections) for group in batch.groups) > 5
    responses = [response for group in expected for response in group.responses]
    corrections = [correction.response for group in expected for correction in group.corrections]
    assert plain(batch.sampled) == plain(responses + corrections)
    deaths = sum(engine.end is not None for engine in fleet)
    assert metrics["engine_deaths"] == deaths
    assert deaths or metrics["requests_asked_again"] == 0


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 2**16), st.booleans())
@example(wanted=9, most=4, seed=0, after_credit=True)
def test_dynamic_sampling_as_a_stream_equals_rounds(wanted, most, seed, after_credit):
    """After credit, unsolved groups whose corrections differ are as good as those that are informative."""

    def usable(group):
        return group.prompt.index % 5 != 1

    def preferred(group):
        informative = credit.is_informative(group)
        return informative or (after_credit and credit.leaves_gradient(group, CONTEXT, OPERATOR))

    rules = Rules(wanted, most, usable, credit.is_informative, *[credit.leaves_gradient] * after_credit)
    engines = [SimulatedEngine(STEP, write) for _ in range(2)]
    batch, _, _ = stream(engines, rules, score=scoring(seed))
    rounds = (lambda number: corrected(at_once(number))) if after_credit else at_once
    groups, metrics = credit.fill_batch(rounds, wanted, most, usable=usable, preferred=preferred)
    assert plain(batch.groups) == plain(groups if after_credit else corrected(groups))
    asked = sum(len(engine.asked) for engine in engines)
    assert len(batch.sampled) == asked, "also what was corrected and passed over"
    if not after_credit:
        of_all = batch.metrics.keys() - metrics.keys()
        assert {name: batch.metrics[name] for name in metrics} == metrics
        assert of_all == {"responses_sampled", "reward_sampled"}
        assert batch.metrics["responses_sampled"] == metrics["sampling_rounds"] * 6 * 4
        corrections = sum(len(group.corrections) for group in groups)  # and none of what is discarded
        assert asked == metrics["sampling_rounds"] * 6 * 4 + corrections
    unsolved = [group for group in groups if not any(response.correct for response in group.responses)]
    assert unsolved or (wanted, most, after_credit) != (9, 4, True)


def test_the_answers_of_mixed_prompts_come_in_order_and_scored():
    prompts = make_prompts(0, 3)
    asked = [(prompts[i % 3], SampleRequest(prompts[i % 3].token_ids, i, 30)) for i in range(12)]
    engines = [SimulatedEngine(STEP, write) for _ in range(3)]
    told = {}
    samples, _ = in_virtual_time(sampler_of(*engines).answer_all(asked, told.__setitem__))
    assert told == dict(enumerate(samples)), "each one as it is scored"
    assert list(told) != sorted(told), "and not in order"
    assert [s.token_ids.tolist() for s in samples] == [write(request) for _, request in asked]
    assert all(sample.is_scored for sample in samples)
    for engine in engines:  # a prompt each
        assert len({int(request.prompt_token_ids[0]) for _, request in engine.asked}) == 1


def test_a_group_is_corrected_while_others_are_still_sampled():
    first, second = make_prompts(0, 2)
    rollout = replace(ROLLOUT, rollout_max_response_len=2000)
    context = replace(CONTEXT, rollout=rollout, max_context=10_000)
    requests = group_requests([first, second], rollout, seed=0, step=0)

    def is_of_first(request):
        return request.prompt_token_ids[0] == first.token_ids[0]

    async def score(prompt, sample):
        sample.reward, sample.correct = float(sample.index), False

    engine = SimulatedEngine(STEP, lambda request: [3] * (10 if is_of_first(request) else 2000))
    groups = GroupSampler(sampler_of(engine, score=score), OPERATOR, Rules(2, 1, any_group, any_group))
    drawn = [(first, requests[:4]), (second, requests[4:])]
    batch, seconds = in_virtual_time(sample_batch(groups, lambda _: drawn, context))
    assert [len(group.corrections) for group in batch.groups] == [4, 4]
    first_corrections = [time for time, request in engine.asked[8:] if is_of_first(request)]
    assert len(first_corrections) == 4
    assert max(first_corrections) < 1 < 20 < seconds


def test_groups_stay_together_and_spread_over_engines(monkeypatch):
    sizes, submit = [], SimulatedEngine.submit

    async def counted(engine, requests, version):
        sizes.append(len(requests))
        await submit(engine, requests, version)

    monkeypatch.setattr(SimulatedEngine, "submit", counted)
    engines = [SimulatedEngine(STEP, write) for _ in range(3)]
    _, _, metrics = stream(engines)
    assert sizes[:3] == [8, 8, 8]
    of_prompts = [{int(request.prompt_token_ids[0]) for _, request in engine.asked[:8]} for engine in engines]
    assert [len(prompts) for prompts in of_prompts] == [2, 2, 2]
    assert set.union(*of_prompts) == {prompt.token_ids[0] for prompt in make_prompts(0)}
    assert metrics["engine_requests_max"] >= metrics["engine_requests_min"] >= 8
    assert metrics["sampling_tail_seconds"] > 0


def test_where_prefixes_are_not_cached_single_requests_are_spread():
    engines = [SimulatedEngine(STEP, write) for _ in range(24)]
    batch, alone, _ = stream(engines, prefix_caching=False)
    responses = [request for _, requests in draw_round(0) for request in requests]
    seeds = [request.seed for engine in engines for _, request in engine.asked[:1]]
    assert sorted(seeds) == sorted(request.seed for request in responses), "one for each engine"
    by_group, together, _ = stream([SimulatedEngine(STEP, write) for _ in range(24)])
    assert plain(batch.groups) == plain(by_group.groups), "the answering engine does not matter"
    assert alone < together


def test_a_lost_engine_or_failing_verifier_aborts_all_requests():
    async def broken(prompt, sample):
        raise RuntimeError("no verifier")

    dying, living, alone = (SimulatedEngine(STEP, write, dies_at=dies) for dies in (0.05, None, None))
    with pytest.raises(EngineError, match="engine 0 died: it has ended"):
        stream([dying, living])
    with pytest.raises(RuntimeError, match="no verifier"):
        stream([alone], score=broken)
    assert living.aborted
    assert alone.aborted
    assert not alone._running


def test_later_requests_also_learn_that_the_last_engine_is_lost():
    """The run waits for room in the cluster whichever of its askers is heard first."""

    async def lost(index):
        raise EngineLostError(f"engine {index} was lost with its node")

    sampler = sampler_of(SimulatedEngine(STEP, write, dies_at=0.05), revive=lost)

    async def twice():
        for said in ("engine 0 was lost with its node", "no engine is left"):
            with pytest.raises(EngineLostError, match=said):
                await sampler.answer_all([alone()])

    in_virtual_time(twice())


def test_an_engine_that_hangs_is_ended_and_replaced():
    hanging = SimulatedEngine(STEP, write, hangs_at=0.05)
    batch, seconds, _ = stream([hanging], revive=revive, stall_timeout=30.0)
    assert hanging.end == "no answer within 30 seconds (--engine-stall-timeout)"
    assert plain(batch.groups) == plain(corrected(at_once(0)))
    assert 30 < seconds < 40


def test_a_refusal_ends_everything_and_leaves_the_sampler_usable(monkeypatch):
    engine, asked = SimulatedEngine(STEP, write), [alone()]

    async def refuse(timeout):
        monkeypatch.undo()
        engine._running.clear()
        raise EngineError("asked to sample with policy version 0, the engine has none")

    async def twice():
        sampler = sampler_of(engine)
        with pytest.raises(EngineError, match="the engine has none"):
            await sampler.answer_all(asked)
        return await sampler.answer_all(asked)

    monkeypatch.setattr(engine, "take", refuse)
    samples, _ = in_virtual_time(twice())
    assert samples[0].token_ids.tolist() == write(asked[0][1])


def test_closing_the_sampler_leaves_no_pending_task(caplog, monkeypatch):
    """asyncio complains of such tasks, after whatever else is said at the end of a run."""
    endless = [2] * 10**5  # drawing that many for each request would keep the sampler's loop busy
    engine = SimulatedEngine(STEP, lambda _: endless)
    monkeypatch.setattr(engine, "abort", lambda numbers: asyncio.sleep(0.5))  # it is far
    sampler = sampler_of(engine)
    asked = [(prompt, SampleRequest(prompt.token_ids, 0, 10**5)) for prompt in make_prompts(0, 50)]
    sampler.start(sampler.answer_all(asked))
    time.sleep(0.1)
    sampler.close()
    del sampler
    gc.collect()
    assert caplog.text == ""


@pytest.mark.parametrize(("length", "says"), [(0, "empty prompt"), (64, "64 tokens leaves no room")])
def test_a_prompt_that_cannot_be_answered_is_refused(length, says):
    engine, (prompt, request) = SimulatedEngine(STEP, write), alone()
    too_long = replace(request, prompt_token_ids=token_ids([3] * length))
    with pytest.raises(ValueError, match=says):
        in_virtual_time(sampler_of(engine, max_context=64).answer_all([(prompt, too_long)]))
    assert engine.asked == []


def test_a_replay_gives_recorded_groups_and_the_operators_corrections():
    recorded, expected = corrected(at_once(0)), corrected(at_once(0))
    assert plain(replay(recorded, OPERATOR, CONTEXT)) == plain(expected)
    plain_algorithm = credit_of("gspo")
    groups = replay(recorded, find_operator(plain_algorithm), replace(CONTEXT, algorithm=plain_algorithm))
    assert [group.corrections for group in groups] == [[]] * 6
    next(group for group in expected if group.corrections).corrections.pop()
    with pytest.raises(ValueError, match="fewer corrections than this algorithm asks for"):
        replay(expected, OPERATOR, CONTEXT)


def test_the_sampling_tail_spans_samples_since_the_last_metrics():
    meter = Meter(2)
    meter.requested(1)
    nothing = {"engine_requests_max": 1, "engine_requests_min": 0, "engine_deaths": 0}
    assert meter.take() == {**nothing, "requests_asked_again": 0, "sampling_tail_seconds": 0}
    for at in (30.0, 31.0, 32.5):
        meter.finished(at)
    assert meter.take()["sampling_tail_seconds"] == 2.5
    assert meter.take()["sampling_tail_seconds"] == 0


# --- ahead of training

WANTED, STEPS = 3, 6
FEW = RolloutConfig(rollout_batch_size=WANTED, n_samples_per_prompt=2, rollout_max_response_len=400)
LATER = CreditContext(credit_of("ibpo"), FEW, Vocabulary(correction_prompt), 900, seed=3, step=0)


def draw(ordinal, attempt):
    prompt = Prompt(ordinal, token_ids([ordinal % 50 + 2, 7]), 1, "", "", "")
    step = ordinal // WANTED
    requests = group_requests([prompt], FEW, seed=3, step=step, attempt=attempt)
    return prompt, requests, replace(LATER, step=step)


def long_tailed(request):
    rng = random.Random(request.seed)
    length = max(2, min(400, round(rng.lognormvariate(0.0, 1.2) * 30)))
    return [rng.randrange(2, 60) for _ in range(length)]


ANY = Rules(WANTED, 1, any_group, any_group)


def run_loop(pace, training=0.5, rules=ANY, num_engines=2, steps=STEPS):
    """The batches of a training loop in virtual time: take a batch, train, give the engines new weights."""
    batches = []

    async def work():
        engines = [SimulatedEngine(STEP, long_tailed) for _ in range(num_engines)]
        sampler = sampler_of(*engines, stall_timeout=1e6)
        ahead = Ahead(GroupSampler(sampler, OPERATOR, rules), draw, pace, version=0)
        for step in range(1, steps + 1):
            batches.append(await ahead.batch())
            await asyncio.sleep(training)
            await asyncio.gather(*(engine.update(step, 0.05) for engine in engines))
            sampler.version = step
            await ahead.advance(step)
        await ahead.close()

    in_virtual_time(work())
    return batches


def groups_of(batches):
    return [group for batch in batches for group in batch.groups]


paces = st.builds(
    Pace, staleness=st.integers(0, 3), over_sampling=st.sampled_from([0, 0, 2, 5]),
    keep_order=st.booleans(), last_step=st.sampled_from([None, STEPS]),
)  # fmt: skip


@settings(max_examples=50)
@given(pace=paces, training=st.floats(0.0, 3.0), engines=st.integers(1, 3))
def test_no_token_is_too_old_and_no_prompt_trains_twice(pace, training, engines):
    batches = run_loop(pace, training, num_engines=engines)
    for step, batch in enumerate(batches):
        assert len(batch.groups) == WANTED
        oldest = min(version for group in batch.groups for s in group.samples for _, version in s.versions)
        assert step - pace.staleness <= oldest <= step
        assert batch.metrics["staleness_max"] == step - oldest
    trained = [group.prompt.index for group in groups_of(batches)]
    assert len(set(trained)) == len(trained)
    dropped = [own for batch in batches for own in batch.dropped]
    assert sum(batch.metrics["groups_expired"] for batch in batches) == len(dropped)
    if not pace.over_sampling:  # then a batch waits for what would become too old
        assert dropped == []
    attempts = [attempt for batch in batches for attempt in batch.attempts]
    for index, attempt in zip(trained, attempts, strict=True):
        assert sorted(a for i, a, _ in dropped if i == index) == list(range(attempt))


def test_keep_order_draws_the_prompts_and_seeds_of_synchronous_sampling():
    steps, ahead = (groups_of(run_loop(pace)) for pace in (Pace(0), Pace(2, keep_order=True)))
    assert [group.prompt.index for group in ahead] == list(range(WANTED * STEPS))
    for one, other in zip(steps, ahead, strict=True):
        for first, second in zip(one.responses, other.responses, strict=True):
            assert first.token_ids.tolist() == second.token_ids.tolist()


def test_over_sampling_shows_that_it_prefers_short_responses():
    def bias(pace):
        batches = run_loop(pace, 0.1, steps=40)
        return float(np.mean([b.metrics["length_bias"] for b in batches if "length_bias" in b.metrics]))

    assert bias(Pace(2, over_sampling=6)) < bias(Pace(2)) - 0.05


def test_groups_refused_by_a_filter_are_replaced_and_counted():
    def even(group):
        return group.prompt.index % 2 == 0

    batches = run_loop(Pace(1), rules=Rules(WANTED, 4, even, any_group))
    assert all(map(even, groups_of(batches)))
    refused = sum(batch.metrics["groups_refused"] for batch in batches)
    assert refused >= WANTED * (STEPS - 1)
    assert refused == sum(reason == "not taken" for batch in batches for *_, reason in batch.dropped)
    nothing_better = run_loop(Pace(1), rules=Rules(WANTED, 2, any_group, lambda _: False))
    assert all(len(batch.groups) == WANTED for batch in nothing_better)
    with pytest.raises(ValueError, match="--group-filter refused all"):
        run_loop(Pace(1), rules=Rules(WANTED, 2, lambda _: False, any_group))


def test_asynchronous_sampling_keeps_unsolved_groups_with_useful_corrections():
    rules = Rules(WANTED, 4, any_group, credit.is_informative, credit.leaves_gradient)
    groups = groups_of(run_loop(Pace(1), rules=rules))
    unsolved = [group for group in groups if not any(response.correct for response in group.responses)]
    assert unsolved
    for group in unsolved:
        assert credit.leaves_gradient(group, LATER, OPERATOR)
        assert len(group.corrections) == len(group.responses), "asked once"


def test_a_response_across_versions_keeps_the_advantage_of_its_samples():
    """The bonus of a wrong response is that of its correction, though other weights wrote that one."""
    batches = run_loop(Pace(2), training=0.3)
    partial = [s for group in groups_of(batches) for s in group.samples if len(s.versions) > 1]
    assert len(partial) == sum(batch.metrics["partial_rollouts"] for batch in batches) > 5
    for sample in partial:
        starts, versions = zip(*sample.versions, strict=True)
        assert starts[0] == 0, sample
        assert list(starts) == sorted(set(starts)), sample
        assert list(versions) == sorted(set(versions)), sample
        assert starts[-1] < len(sample.token_ids)
    assert any(
        correction.response.policy_version > group.responses[correction.target].policy_version
        for group in groups_of(batches)
        for correction in group.corrections
    )
    for batch in batches:
        credited = [s.advantage for s in credit.assign_credit(batch.groups, LATER).sequences]
        for sample in (sample for group in batch.groups for sample in group.samples):
            sample.versions = ((0, 0),)
        assert [s.advantage for s in credit.assign_credit(batch.groups, LATER).sequences] == credited
