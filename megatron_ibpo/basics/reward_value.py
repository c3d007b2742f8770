"""Rewards as user code returns them, a number or a mapping with the number as `score`; and the errors for
faults of a response and of a label."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from megatron_ibpo.basics.text import shown

RESPONSE_ERROR = "response_error"
"""Detail of a response that could not be judged through its own fault: 1."""
WRONG = {"score": 0.0, RESPONSE_ERROR: 1.0}
"""Value of such a response."""


class ResponseError(Exception):
    """Raised by a reward function for a fault of the response: it asks for more than can be computed, or a
    judge fails on it. Its reward is 0, with the detail `response_error`, which metrics count. Every other
    exception is an error of the verifier or the label, and gives no reward at all."""


class LabelError(ValueError):
    """A label that cannot be graded; the text says which one and why."""


LARGEST_REWARD = 1e9
"""Largest absolute value of a reward, and of a verifier's further numbers: squares and sums stay finite."""

MOST_DETAILS = 1024
"""Most further numbers of one reward. Each is a metric of every step: an episode's rewards of single turns
fit, a server that makes up names does not."""
LONGEST_NAME = 128
"""Most characters of the name of a further number."""


def read_reward(value: Any) -> tuple[float, dict[str, float]]:
    """Return the reward and the further numbers in the value of a reward function or of an environment: a
    number, or a mapping with the number as `score` and further numbers.

    Raises:
        TypeError, ValueError: it is neither, a number is not finite or larger than LARGEST_REWARD, there are
            more than MOST_DETAILS, or a name cannot be printed or is longer than LONGEST_NAME.
    """
    parts = {"score": value} if not isinstance(value, Mapping) else dict(value)
    if "score" not in parts:
        raise ValueError(f"expected a number, or a mapping with a score; got {shown(value)}")
    if len(parts) > 1 + MOST_DETAILS:
        raise ValueError(
            f"at most {MOST_DETAILS:,} numbers may stand beside the score, got {len(parts) - 1:,}"
        )
    for name, number in parts.items():
        kind = "number" if value is number else f"number as {name!r}"
        if not isinstance(name, str):
            raise TypeError(f"names must be text, got {shown(name)}")
        if not name.isprintable() or len(name) > LONGEST_NAME:
            raise ValueError(f"names have at most {LONGEST_NAME} printable characters, got {shown(name)}")
        if not isinstance(number, Real):
            raise TypeError(f"expected a {kind}, got {type(number).__name__} {shown(number)}")
        size: Any = abs(number)  # an integer may be too large for a float
        if not size <= LARGEST_REWARD:  # as NaN is not
            raise ValueError(f"expected a {_too_large(kind, number)}")
    return float(parts.pop("score")), {name: float(number) for name, number in parts.items()}


def _too_large(kind: str, number: Real) -> str:
    try:
        got = float(number)
    except OverflowError:  # an integer of more than 308 digits
        return f"{kind} of at most {LARGEST_REWARD:g} in size, got a longer one: scale it"
    if not math.isfinite(got):
        return f"finite {kind}, got {got}"
    return f"{kind} of at most {LARGEST_REWARD:g} in size, got {got:g}: scale it"
