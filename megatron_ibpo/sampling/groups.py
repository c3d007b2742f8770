"""One step's groups: prompts → scored responses → scored corrections, each group at its own pace."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_ibpo.basics.records import Group, Prompt, Sample, SampleRequest
from megatron_ibpo.credit import AfterCredit, CreditContext, GroupFilter, Operator, fill_batch
from megatron_ibpo.credit.metrics import sampled_metrics
from megatron_ibpo.journal import SampleKey
from megatron_ibpo.sampling.episodes import as_opened
from megatron_ibpo.sampling.requests import run_concurrently
from megatron_ibpo.sampling.sampler import Sampler

DrawRound = Callable[[int], Sequence[tuple[Prompt, Sequence[SampleRequest]]]]
"""Round 0, 1, … of a step → its prompts, each with the requests for its responses."""


OnSample = Callable[[Sample], None] | None
"""Called with each new sample once it is scored."""


@dataclass(frozen=True)
class Rules:
    """Rules for the groups that a batch takes."""

    num_groups: int
    """Number of groups in the batch."""
    max_rounds: int
    """Most rounds of prompts to sample for it."""
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
    """Metrics of `fill_batch`."""
    attempts: tuple[int, ...]
    """Number of earlier attempts at each group's prompt."""
    dropped: tuple[tuple[int, int, str], ...] = ()
    """(prompt index, attempt, reason) of groups that were sampled and are never trained on."""


class Memory(Protocol):
    """Scored samples stored beyond this process, and those that an earlier one stored."""

    def recall(self, key: SampleKey) -> Sample | None:
        """Return the stored sample, or None if it must be sampled."""
        ...

    def keep(self, key: SampleKey, sample: Sample) -> None:
        """Store a scored sample."""
        ...


@dataclass(eq=False)
class Drawn:
    """A group, and the engine with the cache of its prompt."""

    group: Group
    attempt: int
    """Number of earlier attempts at its prompt."""
    engine: int
    usable: bool
    preferred: bool
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
    memory: Memory | None = None

    async def respond(
        self, prompt: Prompt, requests: Sequence[SampleRequest], attempt: int = 0, on_sample: OnSample = None
    ) -> Drawn:
        """Return the scored responses to a prompt."""
        engine = self.sampler.place(requests)
        keys = [SampleKey(prompt.index, attempt, "response", index) for index in range(len(requests))]
        responses = await self._scored_samples(prompt, requests, keys, engine, on_sample)
        group = Group(as_opened(prompt, responses), responses)
        return Drawn(group, attempt, engine, self.rules.usable(group), self.rules.preferred(group))

    async def follow_up(self, drawn: Drawn, context: CreditContext, on_sample: OnSample = None) -> None:
        """Sample the operator's follow-ups for a group whose responses are scored."""
        group = drawn.group
        drawn.is_followed_up = True
        follow_ups = self.operator.follow_ups(group, context)
        requests = [follow_up.request for follow_up in follow_ups]
        keys = [
            SampleKey(group.prompt.index, drawn.attempt, "correction", index)
            for index in range(len(requests))
        ]
        samples = await self._scored_samples(group.prompt, requests, keys, drawn.engine, on_sample)
        self.operator.attach(group, follow_ups, samples)

    async def reconsider(self, drawn: Drawn, context: CreditContext, on_sample: OnSample = None) -> None:
        """Sample the follow-ups of a group that is usable but not preferred, if they may make it
        preferred."""
        after_credit = self.rules.after_credit
        if after_credit is None or not drawn.usable or drawn.preferred:
            return
        await self.follow_up(drawn, context, on_sample)
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
        samples = {} if memory is None else {i: s for i, key in enumerate(keys) if (s := memory.recall(key))}
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
    """Return the batch of one step.

    A response is scored as soon as it is sampled. When the last one of a group is scored, the operator's
    follow-ups are requested at once, while other groups are still being sampled. A group that may yet be
    discarded waits for the end of its round, unless its corrections decide. The result does not depend on the
    order in which groups finish.

    Raises:
        ValueError: no group is usable, or a prompt leaves no room for a response.
        EngineError: an engine died and cannot be replaced.
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
    sampled = [response for group in by_group for response in group.responses]
    batch_set = set(batch)
    in_order = [*batch, *(group for group in by_group if group not in batch_set)]
    sampled += [correction.response for group in in_order for correction in group.corrections]
    dropped = tuple((group.prompt.index, 0, "not taken") for group in by_group if group not in batch_set)
    metrics |= sampled_metrics(by_group)
    return Batch(batch, sampled, metrics, (0,) * len(batch), dropped)
