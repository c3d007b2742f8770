"""Sampling ahead of training: nothing is older than allowed, nothing is lost, and what is cut is counted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engines import SimulatedEngine, StepTime, in_virtual_time

from megatron_ibpo.basics.records import Group, Prompt, Sample, SampleRequest, token_ids
from megatron_ibpo.config import RolloutConfig
from megatron_ibpo.credit import (
    CreditContext,
    Vocabulary,
    any_group,
    assign_credit,
    credit_of,
    find_operator,
    is_informative,
    leaves_gradient,
)
from megatron_ibpo.sampling import Sampler
from megatron_ibpo.sampling.ahead import Ahead, Pace, _Flight
from megatron_ibpo.sampling.groups import Batch, GroupSampler, Rules
from megatron_ibpo.sampling.requests import group_requests

STEP = StepTime(fixed=0.01, per_sequence=0.001)
WANTED, SIZE, STEPS = 3, 2, 6
ROLLOUT = RolloutConfig(rollout_batch_size=WANTED, n_samples_per_prompt=SIZE, rollout_max_response_len=400)


def correction_prompt(prompt: Prompt, wrong: np.ndarray, references: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([prompt.head_ids, wrong[:3], *[r[:3] for r in references], prompt.tail_ids])


def ids_of(samples: Sequence[Sample]) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in samples]


CONTEXT = CreditContext(credit_of("ibpo"), ROLLOUT, Vocabulary(correction_prompt), 900, seed=3, step=0)
OPERATOR = find_operator(CONTEXT.algorithm)


def draw(ordinal: int, attempt: int) -> tuple[Prompt, list[SampleRequest], CreditContext]:
    prompt = Prompt(ordinal, token_ids([ordinal % 50 + 2, 7]), 1, "", "", "")
    step = ordinal // WANTED
    requests = group_requests([prompt], ROLLOUT, seed=3, step=step, attempt=attempt)
    return prompt, requests, replace(CONTEXT, step=step)


def long_tailed(request: SampleRequest) -> list[int]:
    rng = random.Random(request.seed)
    length = max(2, min(400, round(rng.lognormvariate(0.0, 1.2) * 30)))
    return [rng.randrange(2, 60) for _ in range(length)]


async def score(prompt: Prompt, sample: Sample) -> None:
    sample.correct = int(sample.token_ids.sum()) % 3 == 0
    sample.reward = float(sample.correct)


@dataclass
class Loop:
    """A training loop in virtual time: take a batch, train, give the engines new weights."""

    pace: Pace
    training: float = 0.5
    rules: Rules = field(default_factory=lambda: Rules(WANTED, 1, any_group, any_group))
    num_engines: int = 2
    steps: int = STEPS
    batches: list[Batch] = field(default_factory=list)

    def run(self) -> Loop:
        in_virtual_time(self._work())
        return self

    async def _work(self) -> None:
        engines = [SimulatedEngine(STEP, long_tailed) for _ in range(self.num_engines)]
        sampler = Sampler(engines, score, stall_timeout=1e6)
        ahead = Ahead(GroupSampler(sampler, OPERATOR, self.rules), draw, self.pace, version=0)
        for step in range(self.steps):
            self.batches.append(await ahead.batch())
            await asyncio.sleep(self.training)
            await asyncio.gather(*(engine.update(step + 1, 0.05) for engine in engines))
            sampler.version = step + 1
            await ahead.advance(step + 1)
        await ahead.close()

    @property
    def groups(self) -> list[Group]:
        return [group for batch in self.batches for group in batch.groups]


paces = st.builds(
    Pace,
    staleness=st.integers(0, 3),
    over_sampling=st.sampled_from([0, 0, 2, 5]),
    keep_order=st.booleans(),
    last_step=st.sampled_from([None, STEPS]),
)


@settings(max_examples=50)
@given(pace=paces, training=st.floats(0.0, 3.0), engines=st.integers(1, 3))
def test_no_token_is_older_than_allowed_and_every_prompt_is_trained_once_or_given_up_and_asked_again(
    pace, training, engines
):
    loop = Loop(pace, training, num_engines=engines).run()
    for step, batch in enumerate(loop.batches):
        assert len(batch.groups) == WANTED
        oldest = min(version for group in batch.groups for s in group.samples for _, version in s.versions)
        assert step - pace.staleness <= oldest <= step
        assert batch.metrics["staleness_max"] == step - oldest
    trained = [group.prompt.index for group in loop.groups]
    assert len(set(trained)) == len(trained)
    dropped = [own for batch in loop.batches for own in batch.dropped]
    assert sum(batch.metrics["groups_expired"] for batch in loop.batches) == len(dropped)
    if not pace.over_sampling:  # then a batch waits for what would become too old
        assert dropped == []
    attempts = [attempt for batch in loop.batches for attempt in batch.attempts]
    for index, attempt in zip(trained, attempts, strict=True):
        assert sorted(a for i, a, _ in dropped if i == index) == list(range(attempt))


def test_in_order_the_prompts_and_seeds_are_those_of_sampling_step_by_step():
    steps, ahead = Loop(Pace(0)).run(), Loop(Pace(2, keep_order=True)).run()
    assert [g.prompt.index for g in ahead.groups] == list(range(WANTED * STEPS))
    for one, other in zip(steps.groups, ahead.groups, strict=True):
        assert ids_of(one.responses) == ids_of(other.responses)


def test_a_response_goes_on_with_new_weights_and_says_which_tokens_are_whose():
    loop = Loop(Pace(2), training=0.3).run()
    partial = [s for group in loop.groups for s in group.samples if len(s.versions) > 1]
    assert len(partial) == sum(batch.metrics["partial_rollouts"] for batch in loop.batches) > 5
    for sample in partial:
        starts, versions = zip(*sample.versions, strict=True)
        assert starts[0] == 0
        assert list(starts) == sorted(set(starts))
        assert list(versions) == sorted(set(versions))
        assert starts[-1] < len(sample.token_ids)


def test_over_sampling_shows_that_it_prefers_short_responses():
    def bias(pace: Pace) -> float:
        batches = Loop(pace, 0.1, steps=40).run().batches
        return float(np.mean([b.metrics["length_bias"] for b in batches if "length_bias" in b.metrics]))

    assert bias(Pace(2, over_sampling=6)) < bias(Pace(2)) - 0.05


def test_what_a_filter_refuses_is_replaced_and_counted_but_not_for_good():
    def even(group: Group) -> bool:
        return group.prompt.index % 2 == 0

    def never(group: Group) -> bool:
        return False

    loop = Loop(Pace(1), rules=Rules(WANTED, 4, even, any_group)).run()
    assert all(group.prompt.index % 2 == 0 for group in loop.groups)
    refused = sum(batch.metrics["groups_refused"] for batch in loop.batches)
    assert refused >= WANTED * (STEPS - 1)
    assert refused == sum(reason == "not taken" for batch in loop.batches for *_, reason in batch.dropped)
    nothing_better = Loop(Pace(1), rules=Rules(WANTED, 2, any_group, never)).run()
    assert all(len(batch.groups) == WANTED for batch in nothing_better.batches)
    with pytest.raises(ValueError, match="--group-filter refused all"):
        Loop(Pace(1), rules=Rules(WANTED, 2, never, any_group)).run()


def test_ahead_of_training_too_an_unsolved_group_is_kept_for_its_corrections():
    rules = Rules(WANTED, 4, any_group, is_informative, leaves_gradient)
    loop = Loop(Pace(1), rules=rules).run()
    unsolved = [g for g in loop.groups if not any(response.correct for response in g.responses)]
    assert unsolved
    for group in unsolved:
        assert leaves_gradient(group, CONTEXT, OPERATOR)
        assert len(group.corrections) == len(group.responses), "asked once"


def test_an_advantage_comes_from_the_samples_as_they_were_whatever_sampled_them():
    """The bonus of a wrong response is that of its correction, though other weights wrote that one."""
    loop = Loop(Pace(2), training=0.3).run()
    assert any(
        correction.response.policy_version > group.responses[correction.target].policy_version
        for group in loop.groups
        for correction in group.corrections
    )
    for batch in loop.batches:
        credited = [s.advantage for s in assign_credit(batch.groups, CONTEXT).sequences]
        for sample in (sample for group in batch.groups for sample in group.samples):
            sample.versions = ((0, 0),)
        assert [s.advantage for s in assign_credit(batch.groups, CONTEXT).sequences] == credited


@pytest.mark.parametrize("over_sampling", [0, 8])
def test_a_group_that_ends_does_not_look_at_all_the_others(over_sampling, monkeypatch):
    """Groups under way are looked at a few times each for a batch, however many there are of them."""
    looks: list[str] = []

    def counted(flight: _Flight, name: str) -> object:
        looks.append(name)
        return object.__getattribute__(flight, name)

    def looks_for_each(wanted: int) -> float:
        looks.clear()
        rules = Rules(wanted, 1, any_group, any_group)
        loop = Loop(Pace(1, over_sampling), rules=rules, num_engines=wanted // 4, steps=4).run()
        return looks.count("state") / len(loop.groups)

    monkeypatch.setattr(_Flight, "__getattribute__", counted)
    assert looks_for_each(32) < 1.5 * looks_for_each(8)
