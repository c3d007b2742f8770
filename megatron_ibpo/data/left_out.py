"""Rows left out of a source: those held out for evaluation, and a count of all by reason, with the first few
named."""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.basics.text import counted

_NAMED = 5
"""Number of rows that are named; finding a line in a large file takes a while."""

BAD_ROW, TOO_LONG, DUPLICATE, NOT_CHOSEN = "bad rows", "too long prompts", "duplicates", "not chosen by only"
HELD_OUT = "held out for evaluation"
PASS_RATE, NOT_MEASURED = "outside the pass-rate window", "without a measured pass rate"


@dataclass
class Tally:
    """The counts of one source. A row counts once however often it is drawn."""

    source: str
    counts: Counter[str] = field(default_factory=Counter)
    named: dict[str, list[str]] = field(default_factory=dict)
    """Reason → places of the first few rows."""
    _seen: set[Hashable] = field(default_factory=set)

    def add(self, reason: str, key: Hashable, say: Callable[[], str]) -> None:
        """Count a row.

        Args:
            key: identifies the row.
            say: returns its place and its fault; called for the first few rows only.
        """
        if key in self._seen:
            return
        self._seen.add(key)
        self.counts[reason] += 1
        named = self.named.setdefault(reason, [])
        if len(named) < _NAMED:
            named.append(say())

    def lines(self) -> list[str]:
        """Return the lines to print: one per reason, and the bad rows that are named."""
        lines = [f"{self.source}: left out {count} {reason}" for reason, count in sorted(self.counts.items())]
        bad = self.named.get(BAD_ROW, [])
        lines += [f"  {text}" for text in bad]
        if (num_unnamed := self.counts[BAD_ROW] - len(bad)) > 0 and bad:
            lines.append(f"  and {counted(num_unnamed, 'more bad row')}")
        return lines


@dataclass(frozen=True)
class Division:
    """A division of questions: equal ones are on one side, whatever the order of the rows."""

    seed: int
    limit: int
    """Questions with a hash up to this are held out."""

    def holds_out(self, question: str) -> bool:
        """Return True if the question is not trained on."""
        return question_hash(question, self.seed) <= self.limit


def question_hash(question: str, seed: int) -> int:
    """Return a number in [0, 2^63) that depends on the question and the seed alone."""
    return derive_seed("held out", seed, question)
