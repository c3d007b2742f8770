"""Scored samples and closed batches on disk before they are trained on, so that no sample is lost when a
process dies."""

from megatron_ibpo.journal.entries import (
    ClosedBatch,
    ClosedGroup,
    DroppedGroup,
    JournalError,
    LostStepError,
    SampleKey,
)
from megatron_ibpo.journal.recovery import Recovered, read_journal
from megatron_ibpo.journal.writer import Journal

__all__ = [
    "ClosedBatch",
    "ClosedGroup",
    "DroppedGroup",
    "Journal",
    "JournalError",
    "LostStepError",
    "Recovered",
    "SampleKey",
    "read_journal",
]
