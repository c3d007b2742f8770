"""One step's groups: prompts → scored responses → scored corrections, each group at its own pace."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_ibpo.credit import CreditContext, GroupFilter, Operator, fill_batch
from megatron_ibpo.records import Group, Prompt, Sample, SampleRequest
from megatron_ibpo.sampling.sampler import Sampler
from megatron_ibpo.sampling.tasks import together

DrawRound = Callable[[int], Sequence[tuple[Prompt, Sequence[SampleRequest]]]]
"""The prompts of round 0, 1, … of a step, each with the requests of its responses."""


@dataclass(frozen=True)
class Rules:
    """Which groups a batch takes."""

    wanted: int
    """Groups in the batch."""
    max_rounds: int
    """Rounds of prompts that may be sampled for it."""
    usable: GroupFilter
    """Groups that it refuses are never taken (--group-filter)."""
    preferred: GroupFilter
    """Groups that it refuses fill the batch up only when the rounds are over (dynamic sampling)."""


@dataclass(frozen=True)
class Batch:
    """What a step is made of."""

    groups: list[Group]
    """In the order of the prompts; corrections attached."""
    sampled: list[Sample]
    """Everything that was sampled for it, in the same order: what was discarded, too."""
    metrics: dict[str, float]
    """What `fill_batch` measured."""


@dataclass(eq=False)
class _Drawn:
    """A group, and where the cache of its prompt is."""

    group: Group
    engine: int
    usable: bool
    preferred: bool
    is_followed_up: bool = False

    @property
    def is_taken(self) -> bool:
        """The batch takes it as long as it has room."""
        return self.usable and self.preferred


async def sample_batch(
    sampler: Sampler, draw: DrawRound, rules: Rules, operator: Operator, context: CreditContext
) -> Batch:
    """The batch of one step.

    A response is scored as soon as it is sampled. When the last one of a group is scored, what the operator
    wants sampled of the group is asked at once, while other groups are still being sampled; a group that may
    yet be discarded waits for that until its round is over. The result does not depend on who finishes first.

    Raises:
        ValueError: no group is usable, or a prompt leaves no room for a response.
        EngineError: an engine died and cannot be replaced.
    """

    async def one_group(prompt: Prompt, requests: Sequence[SampleRequest], certain: bool) -> _Drawn:
        engine = sampler.place(requests)
        responses = await sampler.answer(prompt, requests, near=engine)
        for index, response in enumerate(responses):
            response.index = index
        group = Group(prompt, responses)
        drawn = _Drawn(group, engine, rules.usable(group), rules.preferred(group))
        if certain and drawn.is_taken:
            await follow_up(drawn)
        return drawn

    async def follow_up(drawn: _Drawn) -> None:
        group = drawn.group
        drawn.is_followed_up = True
        follow_ups = operator.follow_ups(group, context)
        requests = [follow_up.request for follow_up in follow_ups]
        samples = await sampler.answer(group.prompt, requests, near=drawn.engine) if requests else []
        operator.attach(group, follow_ups, samples)

    rounds: list[list[_Drawn]] = []
    found = 0
    while len(rounds) < rules.max_rounds and found < rules.wanted:
        asked = draw(len(rounds))
        # those before it in the round can take no more than one place each
        rounds.append(
            await together(
                one_group(prompt, requests, certain=found + position < rules.wanted)
                for position, (prompt, requests) in enumerate(asked)
            )
        )
        found += sum(drawn.is_taken for drawn in rounds[-1])
    by_group = {drawn.group: drawn for drawn_of_round in rounds for drawn in drawn_of_round}
    groups, metrics = fill_batch(
        lambda number: [drawn.group for drawn in rounds[number]],
        rules.wanted,
        len(rounds),
        usable=lambda group: by_group[group].usable,
        preferred=lambda group: by_group[group].preferred,
    )
    late = [by_group[group] for group in groups if not by_group[group].is_followed_up]
    await together(follow_up(drawn) for drawn in late)
    sampled = [response for group in by_group for response in group.responses]
    sampled += [correction.response for group in groups for correction in group.corrections]
    return Batch(groups, sampled, metrics)
