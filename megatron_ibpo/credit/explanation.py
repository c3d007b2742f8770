"""The making of a sample's advantage, in lines that a reader can check by hand.

A line reads "shaped reward r′: r + λφ = 0 + 0.6·0.5 = 0.3". The method of a run writes lines in its own words
(`Judgement.explanations`, `TokenFactors.note`, an estimator's `explain`); `credit.step_explanation` adds the
sums that all methods share. The page, the kept samples and `Step` in Python show them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

MINUS = "\u2212"
SampleKey = tuple[int, str, int]
"""(group, "response" or "correction", index in the group)."""
_DIGITS = 6
_MOST_DIGITS = 15


@dataclass(frozen=True)
class Line:
    """One line of an explanation."""

    name: str
    value: float | str | None
    """None if there is none, as the reward where a verifier failed."""
    sum: str = ""
    """The value as a sum: symbols, "=", and the numbers in their place."""
    note: str = ""

    def __str__(self) -> str:
        value = number(self.value) if isinstance(self.value, int | float) else self.value or "none"
        total = " = ".join(part for part in (self.sum, value) if part)
        return f"{self.name}: {total}" + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True)
class SampleExplanation:
    """The lines of one response or correction; `explanation["advantage"]` is the value of one."""

    lines: list[Line] = field(default_factory=list)

    def __getitem__(self, name: str) -> float | str | None:
        for line in self.lines:
            if line.name == name:
                return line.value
        raise KeyError(f"{name}: not among {', '.join(line.name for line in self.lines)}")

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))


@dataclass(frozen=True)
class GroupExplanation:
    """The explanations of a group's samples, in the order of `Group.responses` and `Group.corrections`."""

    responses: list[SampleExplanation] = field(default_factory=list)
    corrections: list[SampleExplanation] = field(default_factory=list)

    def __str__(self) -> str:
        named = [(f"response {n}", text) for n, text in enumerate(self.responses, start=1)]
        named += [(f"correction {n}", text) for n, text in enumerate(self.corrections, start=1)]
        return "\n\n".join(f"{name}\n{text}" for name, text in named)


def number(value: float, digits: int = _DIGITS) -> str:
    """Return a number with `digits` significant digits, without trailing zeros."""
    return f"{value:.{digits}g}".replace("-", MINUS)


@dataclass(frozen=True)
class ComparedRewards:
    """Rewards that are compared with each other, without those of failed verifiers. Figures that the
    explanations share are computed once."""

    values: Sequence[float]

    @cached_property
    def mean(self) -> float:
        """Mean reward."""
        return math.fsum(self.values) / len(self.values)

    @cached_property
    def std(self) -> float:
        """Population standard deviation."""
        return math.sqrt(math.fsum((value - self.mean) ** 2 for value in self.values) / len(self.values))

    @cached_property
    def are_equal(self) -> bool:
        """Return whether all rewards are equal."""
        return len(set(self.values)) < 2

    @cached_property
    def digits(self) -> int:
        """Digits with which the differences of the rewards keep about six."""
        if self.are_equal:
            return _DIGITS
        largest, spread = max(map(abs, self.values)), max(self.values) - min(self.values)
        return min(_MOST_DIGITS, _DIGITS + max(0, math.ceil(math.log10(largest / spread))))
