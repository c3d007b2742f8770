"""Rows left out of a source, counted by reason; the first few are named."""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

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
        if (more := self.counts[BAD_ROW] - len(bad)) > 0 and bad:
            lines.append(f"  and {counted(more, 'more bad row')}")
        return lines
