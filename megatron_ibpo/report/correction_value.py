"""The value of a run's corrections by its own figures: success by composition of groups, and measured
price."""

from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any

from megatron_ibpo.credit.break_even import ACCOMPANIED, ALONE, skill_needed
from megatron_ibpo.evaluate.pass_at_k import wilson

_COMPOSITIONS = {ALONE: "no other response", ACCOMPANIED: "another response"}
_VERDICT = {
    True: ", so these are",
    False: ", so these are not",
    None: "; there were too few to tell whether these are",
}
_ORIGIN = (
    "That goes by success and cost in this run. Whether a run without corrections would have learned more "
    "for the same cost, only such a run tells (ibpo compare). On the default task GSPO reached a training "
    "reward of .75 with 58 % of the operations of IBPO, over five seeds (docs/paper_claims.md)."
)

Row = Mapping[str, Any]


def break_even(steps: Sequence[Row]) -> dict[str, Any] | None:
    """Return how a run's corrections compare with the break-even law of `credit.break_even`.

    Args:
        steps: rows of the metrics log.

    Returns:
        price (κ) and, for each composition that has corrections and responses, `resample` and `skill` (p and
        q, each with low and high of Wilson's 95 % interval), `needed` (the skill from which corrections pay)
        and `pays`: True or False if the intervals leave no doubt, else None. None without any such
        composition.
    """
    # runs of version 0.1 recorded a price beside the suffixes of reset-groups, which are no corrections
    priced_rows = [row for row in steps if row.get("correction_price") is not None and "corrections" in row]
    if not priced_rows:
        return None

    def total(name: str) -> float:
        return fsum(row[name] for row in priced_rows)

    price = fsum(row["correction_price"] * row["corrections"] for row in priced_rows) / total("corrections")
    result: dict[str, Any] = {"price": price}
    for composition in (ALONE, ACCOMPANIED):
        responses, corrections = total(f"responses_{composition}"), total(f"corrections_{composition}")
        if responses and corrections:
            resample = _share(total(f"responses_{composition}_correct"), responses)
            skill = _share(total(f"corrections_{composition}_correct"), corrections)
            result[composition] = _standing(resample, skill, price, first=composition == ALONE)
    return result


def _standing(
    resample: dict[str, float], skill: dict[str, float], price: float, *, first: bool
) -> dict[str, Any]:
    needed = {name: skill_needed(value, price, first=first) for name, value in resample.items()}
    pays = None
    if skill["low"] > needed["high"]:
        pays = True
    elif skill["high"] < needed["low"]:
        pays = False
    return {"resample": resample, "skill": skill, "needed": needed["estimate"], "pays": pays}


def _share(successes: float, trials: float) -> dict[str, float]:
    low, high = wilson(successes / trials, int(trials))
    return {"estimate": successes / trials, "low": max(low, 0.0), "high": min(high, 1.0)}


def break_even_lines(comparison: dict[str, Any] | None) -> list[str]:
    """Return the same in sentences for the user, and where they come from; empty if there is nothing to
    say."""
    sentences = [
        _sentence(name, comparison[name]) for name in _COMPOSITIONS if comparison and name in comparison
    ]
    if not comparison or not sentences:
        return []
    return [f"A correction costs as much as {comparison['price']:.1f} responses.", *sentences, _ORIGIN]


def _sentence(composition: str, standing: dict[str, Any]) -> str:
    skill, resample, needed = standing["skill"], standing["resample"], standing["needed"]
    rates = (
        f"If {_COMPOSITIONS[composition]} to the prompt is right, {skill['estimate']:.0%} of corrections and "
        f"{resample['estimate']:.0%} of retries succeed."
    )
    if resample["estimate"] == 0:
        reason = "no retry succeeded" + (", and no correction" if skill["estimate"] == 0 else "")
        return f"{rates} Whether corrections are worth their cost cannot be told: {reason}."
    if needed <= 1:
        return f"{rates} Corrections are worth their cost from {needed:.0%} on{_VERDICT[standing['pays']]}."
    sure = "" if standing["pays"] is False else "; there were too few to be sure"
    return f"{rates} Corrections cannot be worth their cost where retries succeed so often{sure}."
