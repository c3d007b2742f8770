"""One step's groups: prompts → scored responses → scored corrections, each group at its own pace. The journal
stores their samples, and a resumed run does not sample again what it finds there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_ibpo.basics.records import Correction, Group, Prompt, Sample, SampleRequest
from megatron_ibpo.credit import AfterCredit, CreditContext, GroupFilter, Operator, fill_batch
from megatron_ibpo.credit.metrics import sampled_metrics
from megatron_ibpo.journal import (
    ClosedBatch,
    ClosedGroup,
    DroppedGroup,
    Journal,
    Recovered,
    SampleKey,
    read_journal,
)
from megatron_ibpo.sampling.episodes import as_opened
from megatron_ibpo.sampling.requests import run_concurrently
from megatron_ibpo.sampling.sampler import Sampler

EXPIRED = "expired"
"""Reason of a dropped group whose prompt is sampled again."""
DrawRound = Callable[[int], Sequence[tuple[Prompt, Sequence[SampleRequest]]]]
"""Round 0, 1, … of a step → its prompts, each with the requests for its responses."""
OnSample = Callable[[Sample], None] | None
"""Called with each new sample once it is scored."""


@dataclass(frozen=True)
class Rules:
    """Rules for the groups that a batch takes."""

    num_groups: int
    max_rounds: int
    usable: GroupFilter
    """Groups that it refuses are never taken (--group-filter)."""
    preferred: GroupFilter
    """Groups that it refuses only fill the batch up after the last round (dynamic sampling)."""
    after_credit: AfterCredit | None = None
    """Test that may still make such a group preferred, once it has corrections; None: no test."""


@dataclass(frozen=True)
class Batch:
    """The groups of one step."""

    groups: list[Group]
    """Groups in the order of the prompts, with corrections attached."""
    sampled: list[Sample]
    """Samples drawn for the batch, in the same order, including discarded ones."""
    metrics: dict[str, float]
    attempts: tuple[int, ...]
    """Number of earlier attempts at each group's prompt."""
    dropped: tuple[DroppedGroup, ...] = ()
    """Groups that were sampled and are never trained on."""


@dataclass(eq=False)
class Drawn:
    """A group, and the engine with the cache of its prompt."""

    group: Group
    attempt: int
    """Number of earlier attempts at its prompt."""
    engine: int
    usable: bool
    preferred: bool
    on_sample: OnSample = None
    is_followed_up: bool = False

    @property
    def is_accepted(self) -> bool:
        """True if the batch takes the group as long as there is room."""
        return self.usable and self.preferred


@dataclass(frozen=True, eq=False)
class GroupSampler:
    """Sampling of single groups: their responses, and the operator's follow-ups."""

    sampler: Sampler
    operator: Operator
    rules: Rules
    memory: JournalMemory | None = None

    async def respond(
        self, prompt: Prompt, requests: Sequence[SampleRequest], attempt: int = 0, on_sample: OnSample = None
    ) -> Drawn:
        """Return the scored responses to a prompt."""
        engine = self.sampler.place(requests)
        keys = [SampleKey(prompt.index, attempt, "response", index) for index in range(len(requests))]
        responses = await self._scored_samples(prompt, requests, keys, engine, on_sample)
        group = Group(as_opened(prompt, responses), responses)
        usable, preferred = self.rules.usable(group), self.rules.preferred(group)
        return Drawn(group, attempt, engine, usable, preferred, on_sample)

    async def follow_up(self, drawn: Drawn, context: CreditContext) -> None:
        """Sample the operator's follow-ups for a group whose responses are scored."""
        group = drawn.group
        drawn.is_followed_up = True
        follow_ups = self.operator.follow_ups(group, context)
        requests = [follow_up.request for follow_up in follow_ups]
        keys = [
            SampleKey(group.prompt.index, drawn.attempt, "correction", index)
            for index in range(len(requests))
        ]
        samples = await self._scored_samples(group.prompt, requests, keys, drawn.engine, drawn.on_sample)
        self.operator.attach(group, follow_ups, samples)

    async def reconsider(self, drawn: Drawn, context: CreditContext) -> None:
        """Sample the follow-ups of a group that is usable but not preferred, if they may make it
        preferred."""
        after_credit = self.rules.after_credit
        if after_credit is None or not drawn.usable or drawn.preferred:
            return
        await self.follow_up(drawn, context)
        drawn.preferred = after_credit(drawn.group, context, self.operator)

    async def _scored_samples(
        self,
        prompt: Prompt,
        requests: Sequence[SampleRequest],
        keys: Sequence[SampleKey],
        engine: int,
        on_sample: OnSample,
    ) -> list[Sample]:
        """Return a scored sample for every request; stored ones are not sampled again."""
        memory = self.memory
        stored = {} if memory is None else memory.recovered.samples
        samples = {index: stored[key] for index, key in enumerate(keys) if key in stored}
        missing = [index for index in range(len(requests)) if index not in samples]

        def scored(number: int, sample: Sample) -> None:
            index = missing[number]
            sample.index = index
            samples[index] = sample
            if memory is not None:
                memory.keep(keys[index], sample)
            if on_sample is not None:
                on_sample(sample)

        if missing:
            await self.sampler.answer(prompt, [requests[i] for i in missing], engine, scored)
        return [samples[index] for index in range(len(requests))]


async def sample_batch(groups: GroupSampler, draw: DrawRound, context: CreditContext) -> Batch:
    """Return the batch of one step. Raises ValueError if no group is usable or a prompt leaves no room for a
    response, and EngineError if an engine died and cannot be replaced.

    When the last response of a group is scored, the operator's follow-ups are requested at once, while other
    groups are still being sampled. A group that may yet be discarded waits for the end of its round, unless
    its corrections decide. The result does not depend on the order in which groups finish.
    """
    rules = groups.rules

    async def one_group(prompt: Prompt, requests: Sequence[SampleRequest], certain: bool) -> Drawn:
        drawn = await groups.respond(prompt, requests)
        await groups.reconsider(drawn, context)
        if certain and drawn.is_accepted and not drawn.is_followed_up:
            await groups.follow_up(drawn, context)
        return drawn

    rounds: list[list[Drawn]] = []
    num_accepted = 0
    while len(rounds) < rules.max_rounds and num_accepted < rules.num_groups:
        round_prompts = draw(len(rounds))
        # earlier ones in the round can take at most one place each
        rounds.append(
            await run_concurrently(
                one_group(prompt, requests, certain=num_accepted + position < rules.num_groups)
                for position, (prompt, requests) in enumerate(round_prompts)
            )
        )
        num_accepted += sum(drawn.is_accepted for drawn in rounds[-1])
    by_group = {drawn.group: drawn for drawn_of_round in rounds for drawn in drawn_of_round}
    batch, metrics = fill_batch(
        lambda number: [drawn.group for drawn in rounds[number]],
        rules.num_groups,
        len(rounds),
        usable=lambda group: by_group[group].usable,
        preferred=lambda group: by_group[group].preferred,
    )
    late = [by_group[group] for group in batch if not by_group[group].is_followed_up]
    await run_concurrently(groups.follow_up(drawn, context) for drawn in late)
    batch_set = set(batch)
    not_taken = [group for group in by_group if group not in batch_set]
    sampled = [response for group in by_group for response in group.responses]
    sampled += [correction.response for group in [*batch, *not_taken] for correction in group.corrections]
    dropped = tuple(DroppedGroup(group.prompt.index, 0, "not taken") for group in not_taken)
    metrics |= sampled_metrics(by_group)
    return Batch(batch, sampled, metrics, (0,) * len(batch), dropped)


@dataclass
class UnderWay:
    """Prompts that are in no batch yet when sampling runs ahead. Stored in checkpoints as JSON."""

    cursor: int
    """Position of the first prompt that was never sampled."""
    open: set[tuple[int, int]] = field(default_factory=set)
    """(position, attempt) of the others."""

    def close(self, batch: ClosedBatch) -> None:
        """Note that the batch is taken."""
        self.ask(index for index, _ in batch.settled)
        self.open -= set(batch.settled)
        self.open |= {(d.prompt_index, d.attempt + 1) for d in batch.dropped if d.reason == EXPIRED}

    def ask(self, positions: Iterable[int]) -> None:
        """Note that these prompts, and all before them, were requested."""
        end = max([self.cursor, *(position + 1 for position in positions)])
        self.open |= {(position, 0) for position in range(self.cursor, end)}
        self.cursor = end

    def as_json(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "open": sorted(self.open)}


@dataclass
class JournalMemory:
    """Scored samples in the journal, those that an earlier process stored too, and its batches of steps that
    are trained again."""

    journal: Journal
    recovered: Recovered
    with_room: Callable[[Callable[[], None]], None]
    """Runs a write, waiting while the disk is full."""

    def keep(self, key: SampleKey, sample: Sample) -> None:
        """Store a scored sample."""
        self.with_room(lambda: self.journal.sampled(key, sample))

    def close(self, step: int, batch: Batch) -> ClosedBatch:
        """Record the batch of the `step`-th step before it is trained on."""
        groups = tuple(
            ClosedGroup(g.prompt.index, attempt, len(g.responses), len(g.corrections), g.skipped_pairs)
            for g, attempt in zip(batch.groups, batch.attempts, strict=True)
        )
        closed = ClosedBatch(step, groups, batch.dropped)
        self.with_room(lambda: self.journal.closed(closed))
        return closed

    def view_after(self, step: int) -> JournalMemory:
        """Return the journal's view of the steps after `step`, with this process's own records."""
        return replace(self, recovered=read_journal(self.journal.directory, step))

    def batch(self, step: int) -> ClosedBatch | None:
        """Return the batch of the `step`-th step, if an earlier process closed it."""
        return next((batch for batch in self.recovered.batches if batch.step == step), None)

    def open_groups(self) -> dict[tuple[int, int], int]:
        """Return (prompt index, attempt) → oldest weights, for groups that no batch has taken."""
        settled = {group for batch in self.recovered.batches for group in batch.settled}
        oldest: dict[tuple[int, int], int] = {}
        for key, sample in self.recovered.samples.items():
            if key.group not in settled:
                oldest[key.group] = min(sample.policy_version, oldest.get(key.group, sample.policy_version))
        return oldest

    def groups(
        self, batch: ClosedBatch, draw: Callable[[int], tuple[Prompt, CreditContext]], operator: Operator
    ) -> list[Group]:
        """Return the batch's groups as they were; `draw` gives, for a position, its prompt and the context
        that its corrections were drawn by."""
        groups = []
        for closed in batch.groups:
            prompt, context = draw(closed.prompt_index)
            samples = [self.recovered.samples[key] for key in closed.sample_keys()]
            responses, corrections = samples[: closed.responses], samples[closed.responses :]
            recorded = [Correction(0, (), sample) for sample in corrections]
            groups += replay([Group(as_opened(prompt, responses), responses, recorded)], operator, context)
        return groups


def replay(groups: list[Group], operator: Operator, context: CreditContext) -> list[Group]:
    """Return the recorded groups as if they had been sampled now. The operator's requests for a group are
    answered by its recorded corrections, in order. Raises ValueError if there are fewer of them than the
    operator requests."""
    for group in groups:
        recorded = [correction.response for correction in group.corrections]
        group.corrections, group.skipped_pairs = [], 0
        follow_ups = operator.follow_ups(group, context)
        if len(recorded) < len(follow_ups):
            raise ValueError(
                f"the recorded rollouts hold fewer corrections than this algorithm asks for ({len(recorded)} "
                f"of {len(follow_ups)} for prompt {group.prompt.index}): replay with the settings they were "
                "recorded with"
            )
        operator.attach(group, follow_ups, recorded[: len(follow_ups)])
    return groups
