"""A reward made of several: their weighted sum, clipped to [0, 1]."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ibpo.basics.reward_value import LARGEST_REWARD
from megatron_ibpo.config import ConfigError, DataConfig
from megatron_ibpo.rewards.workers import Outcome

COMPOSITE = "composite"
_DECIMALS = 9
"""Decimals kept of a sum, so that .7 + .2 + .1 is 1."""


@dataclass(frozen=True)
class Part:
    """One of the rewards that are summed."""

    name: str
    weight: float

    @property
    def metric(self) -> str:
        """Name of the part's value among the details; for a function in a file, the function's name alone."""
        file, _, function = self.name.rpartition(":")
        return function if file.endswith(".py") else self.name


def parts_of(rm_type: str, data: DataConfig) -> list[Part]:
    """Return the rewards that make up a verifier: itself, or for `composite` those of --reward-part, the main
    one first. Raises ConfigError if a weight is not a number, or there are no parts."""
    if rm_type != COMPOSITE:
        return [Part(rm_type, 1.0)]
    parts = [Part(name, _weight(name, text)) for name, text in data.reward_weights.items()]
    if not parts:
        raise ConfigError("--rm-type composite: has no parts; name them, --reward-part math=0.9")
    metrics = [part.metric for part in parts]
    if (repeated_name := next((name for name in metrics if metrics.count(name) > 1), None)) is not None:
        raise ConfigError(f"--reward-part: two functions are called {repeated_name}; rename one of them")
    return parts


def check_parts(data: DataConfig) -> None:
    """Raise ConfigError for weights under which a "correct" response, whose reward reaches
    --reward-threshold, need not be right in the main part, the first."""
    main, *secondary_parts = parts_of(COMPOSITE, data)
    if COMPOSITE in (part.name for part in (main, *secondary_parts)):
        raise ConfigError("--reward-part composite: a composite cannot contain itself")
    largest_bonus = _summed([max(part.weight, 0.0) for part in secondary_parts])
    largest_reward = min(1.0, _summed([main.weight, largest_bonus]))
    threshold = data.reward_threshold
    if largest_bonus >= threshold:
        raise ConfigError(
            f"--reward-part: the parts other than {main.name} add up to {largest_bonus:g}, which reaches "
            f"--reward-threshold {threshold:g}, so a response could be correct without the first; lower "
            "their weights"
        )
    if largest_reward < threshold:
        raise ConfigError(
            f"--reward-part: all parts add up to {largest_reward:g}, below --reward-threshold {threshold:g}, "
            "so no response could be correct; raise their weights"
        )


def combined(parts: Sequence[Part], outcomes: Sequence[Outcome]) -> Outcome:
    """Return Σ weight · value, clipped to [0, 1]. The details hold each part's value under `metric`, and the
    parts' own details; on a name clash the first part's wins. An error in one part is an error of the
    whole."""
    details: dict[str, float] = {}
    weighted = []
    for part, outcome in zip(parts, outcomes, strict=True):
        if outcome.value is None:
            return Outcome(None, f"{part.name}: {outcome.error}", outcome.details, outcome.trace)
        details = {part.metric: outcome.value} | outcome.details | details
        weighted.append(part.weight * outcome.value)
    total = _summed(weighted)
    return Outcome(min(1.0, max(0.0, total)), details=details)


def _summed(numbers: Sequence[float]) -> float:
    return round(math.fsum(numbers), _DECIMALS)


def _weight(name: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        raise ConfigError(f"--reward-part {name}={text}: the weight must be a number") from None
    if not 0 < abs(weight) <= LARGEST_REWARD:
        raise ConfigError(
            f"--reward-part {name}={text}: the weight must be at most {LARGEST_REWARD:g} in size, and not 0: "
            "leave such a part out"
        )
    return weight
