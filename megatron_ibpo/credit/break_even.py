"""When does correcting a wrong response pay? The law, and what of a step it needs to know.

A prompt has been answered G times. For the price of one more response, 1, there is another one, which is
correct with probability p; for the price κ there is a correction of a wrong one, which is correct with
probability q. Both p and q are those of prompts whose group is *composed* like this one, since a group
without a correct response is most often of a hard prompt. Two things may be wanted:

*Another correct text* beside those that there are (a positive to learn from, a credit for the wrong one). For
an amount B that is much larger than κ there are q·B/κ correct corrections or p·B correct responses, so
corrections pay where

    q > κ·p,

and never where p > 1/κ, whatever the skill.

*A first correct text*, in a group that has none and therefore no gradient at all. Only the first success
counts. With tries that are independent given the prompt, B buys one with probability 1 - (1 - q)^(B/κ) or
1 - (1 - p)^B. Whatever B is, the former is larger where

    q > 1 - (1 - p)^κ,

which is κ·p for small p, and a little less than that otherwise.

Assumed, and so the law is too kind to corrections: a correct correction is worth as much to training as a
correct response (one that copies its reference, or is trained under a prompt that is never asked, is worth
less), and nothing better can be bought, such as groups of other prompts. Assumed, and so it is a little too
strict for a first text: all prompts of a composition have the same p. Where they differ, 1 - (1 - p)^κ at the
mean of p is more than its mean over prompts (Jensen's inequality: (1 - p)^κ is convex for κ ≥ 1).
"""

from collections.abc import Sequence

from megatron_ibpo.basics.records import Group
from megatron_ibpo.credit.operator import Operator

ALONE, ACCOMPANIED = "alone", "accompanied"
"""Compositions: no correct response among the others, or some."""


def learns_from_corrections(operator: Operator) -> bool:
    """Whether their texts are trained on; the law says nothing of corrections that only earn a bonus."""
    return operator.ibpo_joint or operator.ibpo_plain_prompt != "none"


def skill_needed(resample: float, price: float, *, first: bool) -> float:
    """The success of corrections from which on they pay; above 1: they never do.

    Args:
        resample: p, success of one more response.
        price: κ, price of a correction in responses.
        first: the first correct text of its group is wanted; otherwise another one.
    """
    return 1 - (1 - resample) ** price if first else price * resample


def rarity_needed(skill: float, price: float, *, first: bool) -> float:
    """The success of one more response up to which corrections of success `skill` pay: `skill_needed` the
    other way round."""
    return 1 - (1 - skill) ** (1 / price) if first else skill / price


def price_by_length(
    prompt: float, solutions: int, *, written: float, trained: float, joint: bool = True
) -> float:
    """κ where everything costs in proportion to tokens: a correction reads the prompt and `solutions` whole
    solutions and writes another one.

    Args:
        prompt: its length, in lengths of a response.
        solutions: K, that a correction prompt shows; responses are taken to be equally long.
        written: price of writing a token, in prices of reading one: 1 in operations, and on an engine that
            decodes few sequences at once ten and more.
        trained: the same of training on one: 3 in operations.
        joint: the correction is trained on under its own long prompt; otherwise under the plain one, as any
            response.
    """
    response = prompt + written + trained * (prompt + 1)
    read = prompt + solutions
    return (read + written + trained * ((read if joint else prompt) + 1)) / response


def composition_counts(groups: Sequence[Group]) -> dict[str, float]:
    """Counts from which p and q of both compositions follow, over any number of steps.

    p: a response of a group is one more try at a prompt that G - 1 others answered. So of the responses whose
    siblings are all wrong, those that are correct are p of groups without a correct response (to be exact, of
    groups of G - 1), and of those with a correct sibling likewise. No further sample is needed.

    q: corrections by whether their group has a correct response. Unscored samples are left out.
    """
    counts = {
        f"{kind}_{composition}{correct}": 0.0
        for composition in (ALONE, ACCOMPANIED)
        for kind in ("responses", "corrections")
        for correct in ("", "_correct")
    }
    for group in groups:
        responses = [response for response in group.responses if response.reward is not None]
        successes = sum(response.correct for response in responses)
        for response in responses if len(responses) > 1 else ():
            others = ACCOMPANIED if successes - response.correct else ALONE
            counts[f"responses_{others}"] += 1
            counts[f"responses_{others}_correct"] += response.correct
        composition = ACCOMPANIED if successes else ALONE
        for correction in group.corrections:
            if correction.response.reward is not None:
                counts[f"corrections_{composition}"] += 1
                counts[f"corrections_{composition}_correct"] += correction.response.correct
    return counts
