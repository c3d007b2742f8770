"""The journal in sampling: storing samples, and reusing those that a resumed run finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_ibpo.basics.records import Correction, Group, Prompt, Sample
from megatron_ibpo.credit import CreditContext, Operator
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
from megatron_ibpo.sampling.groups import Batch

EXPIRED = "expired"
"""Reason of a dropped group whose prompt is sampled again."""


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
    """The journal as `groups.Memory`, and its batches of steps that are trained again."""

    journal: Journal
    recovered: Recovered
    with_room: Callable[[Callable[[], None]], None]
    """Runs a write, waiting while the disk is full."""

    def recall(self, key: SampleKey) -> Sample | None:
        return self.recovered.samples.get(key)

    def keep(self, key: SampleKey, sample: Sample) -> None:
        self.with_room(lambda: self.journal.sampled(key, sample))

    def close(self, step: int, batch: Batch) -> ClosedBatch:
        """Record the batch of the `step`-th step before it is trained on."""
        groups = zip(batch.groups, batch.attempts, strict=True)
        closed = ClosedBatch(
            step,
            tuple(
                ClosedGroup(
                    group.prompt.index,
                    attempt,
                    len(group.responses),
                    len(group.corrections),
                    group.skipped_pairs,
                )
                for group, attempt in groups
            ),
            tuple(DroppedGroup(*dropped) for dropped in batch.dropped),
        )
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
        """Return the batch's groups as they were.

        Args:
            draw: position → (the prompt, the context that its corrections were drawn by).
        """
        return [self._group(closed, *draw(closed.prompt_index), operator) for closed in batch.groups]

    def _group(
        self, closed: ClosedGroup, prompt: Prompt, context: CreditContext, operator: Operator
    ) -> Group:
        samples = [self.recovered.samples[key] for key in closed.sample_keys()]
        responses, corrections = samples[: closed.responses], samples[closed.responses :]
        prompt = as_opened(prompt, responses)
        group = Group(prompt, responses, [Correction(0, (), sample) for sample in corrections])
        return replay([group], operator, context)[0]


def replay(groups: list[Group], operator: Operator, context: CreditContext) -> list[Group]:
    """Return the recorded groups as if they had been sampled now. The operator's requests for a group are
    answered by its recorded corrections, in order.

    Raises:
        ValueError: there are fewer of them than the operator requests.
    """
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
