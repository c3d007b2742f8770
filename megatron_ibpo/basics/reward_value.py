"""Reading what user code returns as a reward: a number, or a mapping with the number as `score`."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

LARGEST_REWARD = 1e9
"""Largest absolute value of a reward, and of each further number of a verifier: their squares and sums stay
finite."""


def read_reward(value: Any) -> tuple[float, dict[str, float]]:
    """Return the reward and the further numbers in the value of a reward function or of an environment.

    Args:
        value: a number, or a mapping with the number as `score` and further numbers.

    Raises:
        TypeError, ValueError: it is neither, or a number is not finite or larger than LARGEST_REWARD.
    """
    parts = {"score": value} if not isinstance(value, Mapping) else dict(value)
    if "score" not in parts:
        raise ValueError(f"expected a number, or a mapping with a score; got {value!r}")
    for name, number in parts.items():
        what = "number" if value is number else f"number as {name!r}"
        if not isinstance(name, str):
            raise TypeError(f"names must be text, got {name!r}")
        if not isinstance(number, Real):
            raise TypeError(f"expected a {what}, got {type(number).__name__} {number!r}")
        if not _fits(number):
            raise ValueError(f"expected a {_too_large(what, number)}")
    return float(parts.pop("score")), {name: float(number) for name, number in parts.items()}


def _fits(number: Any) -> bool:
    return bool(abs(number) <= LARGEST_REWARD)  # false for NaN as well


def _too_large(what: str, number: Real) -> str:
    try:
        got = float(number)
    except OverflowError:  # an integer of more than 308 digits
        return f"{what} of at most {LARGEST_REWARD:g} in size, got a longer one: scale it"
    if not math.isfinite(got):
        return f"finite {what}, got {got}"
    return f"{what} of at most {LARGEST_REWARD:g} in size, got {got:g}: scale it"
