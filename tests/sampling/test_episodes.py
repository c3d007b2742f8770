"""Episodes of many turns: what was sampled is trained on, nothing is lost, and no fault is a reward."""

import asyncio
import random
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engines import SimulatedEngine, StepTime, in_virtual_time

from megatron_ibpo.basics.records import Group, Prompt, SampleRequest, token_ids
from megatron_ibpo.basics.sampling_mask import sampling_mask
from megatron_ibpo.config import EnvironmentConfig, RolloutConfig
from megatron_ibpo.credit import CreditContext, Vocabulary, any_group, assign_credit, credit_of, find_operator
from megatron_ibpo.engines import EngineError
from megatron_ibpo.environments import EpisodeFaultError, EpisodeScore, Opening, Turn
from megatron_ibpo.journal import Journal, SampleKey, read_journal
from megatron_ibpo.sampling import Sampler
from megatron_ibpo.sampling.episodes import Episodes, Transcript, as_opened
from megatron_ibpo.sampling.groups import GroupSampler, JournalMemory, Rules
from megatron_ibpo.sampling.requests import group_requests, with_beginning
from support.credit_cases import plain, template
from support.samples import sample_of

EOS, OPENS, ANSWERS, BEGINS = 0, 1, 2, 3
"""Ids of the chat format below: end of turn, start of the opening, of an answer, of the policy's turn."""
STEP = StepTime(fixed=0.01, per_sequence=0.0001)


class TinyChat:
    """Contents are ids already."""

    def open(self, messages, tools):
        return [OPENS, *messages[-1]["content"], BEGINS]

    def read(self, ids, tools=None):
        return {"role": "assistant", "content": list(ids[:-1])}

    def extend(self, ids, messages):
        assert ids[-1] == EOS
        return [ANSWERS, *messages[-1]["content"], BEGINS]


class Countdowns:
    """Sessions that answer each message with its sum and the turns left, of which there are as many as the
    label says. What ends on an even sum is right. Each fault is taken by the next `step` or `score`."""

    def __init__(self, seconds=0.005, faults=()):
        self.seconds, self.faults, self.seeds, self.closed = seconds, list(faults), [], 0

    async def open(self, target, question, label, metadata, seed):
        self.seeds.append(seed)
        return Countdown(self, int(label), seed)


class Countdown:
    def __init__(self, sessions, turns, seed):
        self.sessions, self.turns, self.last = sessions, turns, 0
        self.opening = Opening([{"role": "user", "content": [10 + seed % 7, 20]}])

    def _maybe_fault(self):
        if self.sessions.faults and (kind := self.sessions.faults.pop(0)):
            raise EpisodeFaultError(kind, f"made to {kind}")

    async def step(self, message):
        self._maybe_fault()
        await asyncio.sleep(self.sessions.seconds)
        self.turns -= 1
        self.last = sum(message["content"])
        answer = {"role": "user", "content": [30 + self.last % 9, 40 + self.turns % 9]}
        return Turn([answer], done=self.turns <= 0)

    async def score(self):
        self._maybe_fault()
        return EpisodeScore(float(self.last % 2 == 0), {"last": float(self.last)})

    async def close(self):
        self.sessions.closed += 1


def prompt_of(index=0, turns=3):
    return Prompt(index, token_ids([9, BEGINS]), 1, str(turns), "", "", {"environment": "tiny:Countdown"})


def written(request):
    rng = random.Random(request.seed + len(request.prompt_token_ids))
    return [*(rng.randrange(50, 60) for _ in range(rng.randrange(1, 6))), EOS]


class Table:
    def __init__(self, write=written, *, sessions=None, chat=None, max_context=None, dies_at=None, **limits):
        self.sessions, self.write, self.dies_at = sessions or Countdowns(), write, dies_at
        limits = EnvironmentConfig(**{"allowed_environments": ("tiny:Countdown",)} | limits)
        self.episodes = Episodes(self.sessions, chat or TinyChat(), limits, 3, 1.0, max_context)

    def sampler(self):
        self.engine = SimulatedEngine(STEP, self.write, dies_at=self.dies_at)

        async def revive(index):
            return SimulatedEngine(STEP, self.write)

        async def scored(prompt, sample):
            assert sample.is_scored, "the environment gives the reward"

        return Sampler([self.engine], scored, stall_timeout=1e6, revive=revive, episodes=self.episodes)

    def play(self, prompt, max_tokens=200, number=1, **more):
        requests = [SampleRequest(prompt.token_ids, 100 + i, max_tokens) for i in range(number)]
        return in_virtual_time(self.sampler().answer(prompt, requests, **more))[0]


def turns_of(sample):
    edges = np.flatnonzero(np.diff(sample.loss_mask.astype(int), prepend=0, append=0))
    return [sample.token_ids[a:b].tolist() for a, b in zip(edges[::2], edges[1::2], strict=True)]


def test_the_environment_sees_the_last_allowed_turn_before_scoring():
    table = Table(max_turns=2)
    (sample,) = table.play(prompt_of(turns=5))
    *_, last = turns_of(sample)
    assert sample.reward_details["turns"] == 2
    assert sample.reward_details["last"] == sum(last[:-1])


def test_an_episode_is_one_sample_of_the_engines_own_ids():
    table = Table()
    (sample,) = table.play(prompt_of(turns=3))
    asked = [request for _, request in table.engine.asked]
    assert sample.prompt_token_ids.tolist() == asked[0].prompt_token_ids.tolist()
    assert turns_of(sample) == [written(request) for request in asked]
    whole = [*sample.prompt_token_ids, *sample.token_ids]
    for request in asked:  # each turn is asked for by a beginning of the whole
        assert whole[: len(request.prompt_token_ids)] == request.prompt_token_ids.tolist()
    assert len({request.seed for request in asked}) == 3
    assert not sample.logprobs[~sample.loss_mask].any()
    assert (sample.finish_reason, sample.reward) == ("stop", sample.reward_details["last"] % 2 == 0)
    assert sample.reward_details["turns"] == 3
    assert table.sessions.closed == 1
    table.play(prompt_of(), held_out=True)
    assert len(set(table.sessions.seeds)) == 2, "those of evaluation are others"


def test_tool_calls_are_counted_and_untokenizable_answers_are_faults():
    class Calls(TinyChat):
        def read(self, ids, tools=None):
            return super().read(ids) | {"tool_calls": [{}, {}], "malformed_tool_calls": ["{"]}

    class Refuses(TinyChat):
        def extend(self, ids, messages):
            raise ValueError("no token for '☃'")

    (calls,), (refused,) = (Table(chat=chat).play(prompt_of(turns=2)) for chat in (Calls(), Refuses()))
    assert calls.reward_details["tool_calls"] == 4
    assert calls.reward_details["malformed_calls"] == 2
    assert refused.reward is None
    assert "cannot be written: no token for '☃'" in str(refused.reward_error)


@pytest.mark.parametrize(
    ("limits", "tokens", "room", "turns"),
    [({"max_turns": 2}, 200, 999, 2), ({}, 9, 999, 2), ({}, 200, 13, 2), ({"max_turn_len": 2}, 200, 999, 1)],
)
def test_a_truncated_episode_is_scored_and_counts_as_truncated(limits, tokens, room, turns):
    def three(request):
        return [50, 51, EOS][: request.max_tokens]

    table = Table(three, max_context=room, **limits)
    (sample,) = table.play(prompt_of(turns=5), tokens)
    assert (sample.finish_reason, len(turns_of(sample))) == ("length", turns)
    assert sample.reward is not None
    assert len(sample.token_ids) <= tokens
    assert bool(sample.loss_mask[-1])  # nothing without an answer is kept


def test_an_opening_that_leaves_no_room_is_refused():
    with pytest.raises(ValueError, match="opening of 4 tokens leaves no room for a turn in a context of 4"):
        Table(max_context=4).play(prompt_of())


@pytest.mark.parametrize("kind", ["death", "step_timeout", "episode_timeout", "wire", "error"])
def test_a_faulty_episode_is_replayed_once_with_the_same_seeds(kind):
    calm, faulty = Table(), Table(sessions=Countdowns(faults=["", "", kind]))
    (wanted,), (found,) = calm.play(prompt_of()), faulty.play(prompt_of())
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert (found.reward, found.reward_error) == (wanted.reward, None)
    assert len(set(faulty.sessions.seeds)) == 1
    assert faulty.episodes.take_metrics() == {f"environment_faults/{kind}": 1.0, "episodes_replayed": 1.0}
    assert faulty.sessions.closed == 2


def in_a_group(lost):
    others = Table().play(prompt_of(), number=7)
    return Group(as_opened(prompt_of(), [lost, *others]), [lost, *others]), others


def test_an_episode_faulting_twice_is_unscored_and_its_group_trains():
    table = Table(sessions=Countdowns(0.0, ["", "", "death", "", "", "", "wire"]))
    (lost,) = table.play(prompt_of())
    assert (lost.reward, lost.correct, len(turns_of(lost))) == (None, False, 3)
    assert lost.reward_error == "tiny:Countdown: made to wire"
    assert table.episodes.take_metrics()["episodes_unscored"] == 1.0
    group, others = in_a_group(lost)
    assert {sample.reward for sample in others} == {0.0, 1.0}
    credit = assign_credit([group], replace(CONTEXT, algorithm=credit_of("gspo")))
    advantages = {sequence.index: sequence.advantage for sequence in credit.sequences}
    assert advantages.pop(0, 0.0) == 0.0
    assert all(advantages.values())
    assert sum(advantages.values()) == pytest.approx(0.0, abs=1e-9)


def test_a_group_trains_without_an_environment_that_never_starts():
    class Never(Countdowns):
        async def open(self, *_):
            raise EpisodeFaultError("death", "it did not start")

    (lost,) = Table(sessions=Never()).play(prompt_of())
    assert (lost.reward, len(lost.token_ids), lost.policy_version) == (None, 0, 0)
    group, others = in_a_group(lost)
    assert group.prompt.token_ids.tolist() == others[0].prompt_token_ids.tolist()
    credit = assign_credit([group], replace(CONTEXT, algorithm=credit_of("ibpo")))
    assert all(len(s.response_token_ids) for s in credit.sequences if s.has_advantage)


def test_a_listener_hears_every_turn_as_the_engine_wrote_it():
    prompt, turns = prompt_of(turns=3), []
    sampler = Table().sampler()
    sampler.on_sample = turns.append
    (sample,) = in_virtual_time(sampler.answer(prompt, [SampleRequest(prompt.token_ids, 100, 200)]))[0]
    assert [turn.token_ids.tolist() for turn in turns] == turns_of(sample)
    assert len(turns) > 1


def test_a_row_with_a_null_environment_plays_one_turn():
    # a table has its columns in every row, if only as null
    plain = replace(prompt_of(), metadata={"environment": None})

    async def scored(prompt, sample):
        sample.reward = 1.0

    sampler = Sampler([SimulatedEngine(STEP, written)], scored, stall_timeout=1e6)
    (sample,) = in_virtual_time(sampler.answer(plain, [SampleRequest(plain.token_ids, 1, 200)]))[0]
    assert (sample.reward, len(turns_of(sample))) == (1.0, 1)
    assert as_opened(plain, [sample]) is plain


def test_a_row_that_names_an_unlisted_environment_loads_nothing():
    hostile = replace(prompt_of(), metadata={"environment": "os:system"})
    request = [SampleRequest(hostile.token_ids, 1, 200)]
    table = Table()

    async def scored(prompt, sample):
        assert sample.is_scored, "it is an episode"

    without = Sampler([SimulatedEngine(STEP, written)], scored, stall_timeout=1e6)
    for sampler in (table.sampler(), without):
        (sample,) = in_virtual_time(sampler.answer(hostile, request))[0]
        assert (sample.reward, len(sample.token_ids)) == (None, 0), sampler
        assert re.search("environment 'os:system': .*--allowed-environments$", sample.reward_error), sampler
    assert table.sessions.seeds == [], "no session was opened"


def test_messages_far_longer_than_the_context_are_never_encoded():
    class Endless(Countdowns):
        opening, answer = "q", "a" * 128 * 41

        async def open(self, *arguments):
            session = await super().open(*arguments)
            session.opening = Opening([{"role": "user", "content": self.opening}])
            return session

    class Chat(TinyChat):
        def open(self, messages, tools):
            return [OPENS, len(messages[-1]["content"]), BEGINS]

        def extend(self, ids, messages):
            raise AssertionError("no tokenizer is given this")

    async def step(session, message):
        return Turn([{"role": "user", "content": Endless.answer}])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Countdown, "step", step)
        patch.setattr(Countdown, "last", 1, raising=False)
        (cut,) = Table(sessions=Endless(), chat=Chat(), max_context=40).play(prompt_of())
        patch.setattr(Endless, "opening", Endless.answer)
        (lost,) = Table(sessions=Endless(), chat=Chat(), max_context=40).play(prompt_of())
    assert (len(turns_of(cut)), cut.finish_reason) == (1, "length")
    assert (lost.reward, lost.reward_error) == (
        None,
        "tiny:Countdown: its opening is far longer than the context",
    )


def test_a_long_turn_is_read_in_a_thread(monkeypatch):
    monkeypatch.setattr("megatron_ibpo.sampling.episodes.LONG_TURN", 3)
    threads = set()

    class Chat(TinyChat):
        def read(self, ids, tools=None):
            threads.add((len(ids) > 3, threading.current_thread() is threading.main_thread()))
            return super().read(ids, tools)

    episodes = Table(chat=Chat()).episodes
    for ids in ([5, 0], [5] * 9 + [0]):
        assert asyncio.run(episodes._read(ids, []))["content"] == ids[:-1]
    assert threads == {(False, True), (True, False)}


def test_an_episode_outlives_the_death_of_its_engine():
    (wanted,), (found,) = Table().play(prompt_of(turns=6)), Table(dies_at=0.12).play(prompt_of(turns=6))
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert found.reward == wanted.reward


def test_new_weights_during_an_episode_show_in_token_versions():
    table = Table(lambda _: [*[50] * 9, EOS])

    async def work():
        sampler = table.sampler()
        request = SampleRequest(prompt_of().token_ids, 1, 200)
        answer = asyncio.create_task(sampler.answer(prompt_of(turns=3), [request]))
        await asyncio.sleep(0.155)
        await table.engine.update(1, 0.0)
        sampler.version = 1
        return (await answer)[0]

    sample = in_virtual_time(work())[0]
    first, second = sample.versions
    assert (first, second[1]) == ((0, 0), 1)
    assert 10 < second[0] < 23  # within the second of three turns of ten tokens, with answers of three
    assert sample.policy_version == 0


@settings(max_examples=60)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(1, 80))
def test_no_id_of_an_earlier_turn_ever_changes(lengths, max_tokens):
    def write(request):
        turn = len([i for i in request.prompt_token_ids if i == EOS])
        return [*range(50, 50 + lengths[turn % len(lengths)]), EOS]

    table = Table(write, sessions=Countdowns(0.0))
    (sample,) = table.play(prompt_of(turns=len(lengths)), max_tokens)
    whole = [*sample.prompt_token_ids.tolist(), *sample.token_ids.tolist()]
    asked = [request.prompt_token_ids.tolist() for _, request in table.engine.asked]
    assert all(whole[: len(one)] == one for one in asked)
    is_cut = sample.finish_reason == "length"
    written_whole = [len(turn) for turn in turns_of(sample)][: -1 if is_cut else None]
    assert written_whole == [n + 1 for n in lengths][: len(asked) - is_cut]
    assert len(sample.logprobs) == len(sample.loss_mask) == len(sample.token_ids)
    assert sample.reward is not None


def sets_of(sample):
    return [sample.sampling_mask[t].tolist() for t in range(len(sample.token_ids))]


def test_a_mask_restricts_only_tokens_of_the_policy():
    masked = sample_of([1], [5, EOS], sampling_mask=sampling_mask([[6, 5], [EOS]]))
    bare = replace(masked, sampling_mask=None)
    for turns, wanted in (
        ((masked, masked), [[5, 6], [EOS], [], [], [], [5, 6], [EOS]]),
        ((masked, bare), [[5, 6], [EOS], [], [], [], [], []]),
        ((bare, masked), [[], [], [], [], [], [5, 6], [EOS]]),
    ):
        script = Transcript(SampleRequest(token_ids([1]), 1, 20))
        script.say(turns[0])
        script.answer(token_ids([ANSWERS, 9, BEGINS]))
        script.say(turns[1])
        assert sets_of(script.sample) == wanted
    begun = with_beginning(replace(masked, prompt_token_ids=token_ids([1, 2, 3])), 2)
    assert (begun.token_ids.tolist(), sets_of(begun)) == ([2, 3, 5, EOS], [[], [], [5, 6], [EOS]])
    script = Transcript(SampleRequest(token_ids([1]), 1, 20))
    script.say(bare)
    script.answer(token_ids([ANSWERS]))
    assert script.sample.sampling_mask is None


def test_a_truncated_sample_without_its_record_is_refused():
    """Also where a method of the user's asked for the cut."""
    prompt = replace(prompt_of(), metadata={})

    async def scored(prompt, sample): ...

    def ask(*, needs_masks=True, held_out=False, **settings):
        sampler = Sampler(
            [SimulatedEngine(STEP, written)], scored, stall_timeout=1e6, needs_masks=needs_masks
        )
        requests = [SampleRequest(prompt.token_ids, 1, 9, **settings)]
        return in_virtual_time(sampler.answer(prompt, requests, held_out=held_out))[0]

    for cut in ({"top_p": 0.9}, {"top_k": 5}):
        with pytest.raises(EngineError, match="does not record what top-k and top-p left"):
            ask(**cut)
        assert ask(**cut, needs_masks=False)
        assert ask(**cut, held_out=True)
        assert ask(**cut, temperature=0.0)
    assert ask()


ROLLOUT = RolloutConfig(rollout_batch_size=4, n_samples_per_prompt=4, rollout_max_response_len=400)
CONTEXT = CreditContext(credit_of("ibpo"), ROLLOUT, Vocabulary(template), 900, seed=3, step=0)


async def drawn_group(sampler, memory=None):
    operator, rules, prompt = find_operator(CONTEXT.algorithm), Rules(4, 1, any_group, any_group), prompt_of()
    groups = GroupSampler(sampler, operator, rules, memory)
    drawn = await groups.respond(prompt, group_requests([prompt], ROLLOUT, seed=3, step=0))
    await groups.follow_up(drawn, CONTEXT)
    return drawn.group


def test_corrections_are_episodes_that_begin_with_the_opened_prompt():
    group = in_virtual_time(drawn_group(Table().sampler()))[0]
    opened = group.responses[0].prompt_token_ids.tolist()
    assert group.prompt.token_ids.tolist() == opened
    assert group.prompt.tail_ids.tolist() == [BEGINS]
    assert group.corrections
    for correction in group.corrections:
        asked = correction.response.prompt_token_ids.tolist()
        assert asked[: len(opened) - 1] == opened[:-1], correction
        assert len(asked) > len(opened), correction
        assert len(turns_of(correction.response)) == 3
    credit = assign_credit([group], CONTEXT)
    assert any(sequence.kind == "correction" for sequence in credit.sequences)


def test_a_resumed_run_reads_its_episodes_from_the_journal(tmp_path):
    def group(sampler):
        with Journal(tmp_path, 1 << 20, "", 0) as journal:
            memory = JournalMemory(journal, read_journal(tmp_path, 0), lambda write: write())
            return in_virtual_time(drawn_group(sampler, memory))[0]

    first, again = group(Table().sampler()), group(SimpleNamespace(place=lambda _: 0))
    assert again.prompt.token_ids.tolist() == first.prompt.token_ids.tolist()
    assert plain(again.samples) == plain(first.samples)
    assert read_journal(tmp_path, 0).samples[SampleKey(0, 0, "response", 0)].is_scored
