"""Recorded samples instead of engines: --load-debug-rollout-data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_ibpo.credit import CreditContext, correct_groups, find_operator
from megatron_ibpo.records import Group, Prompt, Sample, SampleRequest
from megatron_ibpo.report.rollout_data import load_groups, rollout_path

__all__ = ["RecordedRollouts"]


class RecordedRollouts:
    """Gives each step the groups that were recorded for it; what the algorithm asks for beyond them it finds
    among the recorded corrections, in order."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def groups(self, step: int, context: CreditContext) -> list[Group]:
        """The recorded groups of step `step` (counted from 0), corrections attached as the algorithm asks.

        Raises:
            ValueError: the recording is missing or damaged, or holds fewer corrections than are asked for.
        """
        _, groups = load_groups(rollout_path(self._directory, step + 1))
        recorded = [correction.response for group in groups for correction in group.corrections]
        for group in groups:
            group.corrections, group.skipped_pairs = [], 0

        def sample(requests: Sequence[SampleRequest]) -> list[Sample]:
            if len(recorded) < len(requests):
                raise ValueError(
                    "the recorded rollouts hold fewer corrections than this algorithm asks for: replay with "
                    "the settings they were recorded with"
                )
            return recorded[: len(requests)]

        correct_groups(groups, context, find_operator(context.algorithm), sample, _scored_already)
        return groups

    def metrics(self) -> dict[str, float]:
        return {}


def _scored_already(pairs: Sequence[tuple[Prompt, Sample]]) -> None:
    """Recorded samples have their rewards."""
