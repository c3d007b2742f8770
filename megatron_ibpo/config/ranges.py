"""The values that a field may have; stands in the field's type: `Annotated[int, at_least(1)]`."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """A rule for the value of a field. None, where the field takes it, is never asked about."""

    holds: Callable[[Any], bool]
    rule: str
    """Completes "must be …"."""


def at_least(least: float, why: str = "") -> Range:
    """Values from `least` on."""
    return Range(lambda value: value >= least, f"at least {least}" + (f" ({why})" if why else ""))


def above(bound: float, why: str = "") -> Range:
    """Values beyond `bound`."""
    return Range(lambda value: value > bound, f"above {bound}" + (f" ({why})" if why else ""))


def only(single: float, why: str) -> Range:
    """One value, for what is not built yet."""
    return Range(lambda value: value == single, f"{single} ({why})")


def each(one: Range) -> Range:
    """For a sequence: the rule of every item."""
    return Range(lambda values: all(map(one.holds, values)), f"all {one.rule}")


def or_word(word: float | str, other: Range, meaning: str = "") -> Range:
    """A value apart, such as "adaptive" or -1, or one in the other range."""
    named = f"{word} ({meaning})" if meaning else repr(word)
    return Range(lambda value: value == word or other.holds(value), f"{named} or {other.rule}")


POSITIVE = above(0)
NOT_NEGATIVE = Range(lambda value: 0 <= value < math.inf, "finite and at least 0")
BELOW_1 = Range(lambda value: 0 <= value < 1, "at least 0 and below 1")
SHARE = Range(lambda value: 0 < value <= 1, "above 0 and at most 1")
UNIT = Range(lambda value: 0 <= value <= 1, "between 0 and 1")
AROUND_1 = Range(
    lambda bounds: len(bounds) == 2 and 0 <= bounds[0] < 1 < bounds[1] < math.inf,
    "two bounds LOW HIGH with 0 <= LOW < 1 < HIGH",
)
NAMED_VALUES = Range(
    lambda settings: all("" not in text.partition("=")[:2] for text in settings), "name=value each"
)
"""The range of fields that are read by `named_values`; a recipe may give them as a mapping."""


def named_values(settings: Iterable[str]) -> dict[str, str]:
    """{name: value} of settings "name=value"; the later of two of one name wins. Names have underscores."""
    parts = (text.partition("=") for text in settings)
    return {name.strip().replace("-", "_"): value.strip() for name, _, value in parts}
