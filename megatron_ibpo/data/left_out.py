"""Rows left out of a source, counted by reason, and the first few named."""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from megatron_ibpo.basics.text import counted

_NAMED = 5
"""How many are named; finding the line of a large file takes a while."""

BAD_ROW, TOO_LONG, DUPLICATE, NOT_CHOSEN = "bad rows", "too long prompts", "duplicates", "not chosen by only"
PASS_RATE, NOT_MEASURED = "outside the pass-rate window", "without a measured pass rate"


@dataclass
class Tally:
    """The count of one source. A row is counted once however often it is come upon."""

    source: str
    counts: Counter[str] = field(default_factory=Counter)
    named: dict[str, list[str]] = field(default_factory=dict)
    """Reason → where the first few are."""
    _seen: set[Hashable] = field(default_factory=set)

    def add(self, reason: str, key: Hashable, say: Callable[[], str]) -> None:
        """
        Args:
            key: tells rows apart.
            say: where it is, and what is wrong with it; called for the first few only.
        """
        if key in self._seen:
            return
        self._seen.add(key)
        self.counts[reason] += 1
        named = self.named.setdefault(reason, [])
        if len(named) < _NAMED:
            named.append(say())

    def lines(self) -> list[str]:
        """Return the lines to show: one for each reason, and the bad rows that are named."""
        lines = [f"{self.source}: left out {count} {reason}" for reason, count in sorted(self.counts.items())]
        bad = self.named.get(BAD_ROW, [])
        lines += [f"  {text}" for text in bad]
        if (more := self.counts[BAD_ROW] - len(bad)) > 0 and bad:
            lines.append(f"  and {counted(more, 'more bad row')}")
        return lines
