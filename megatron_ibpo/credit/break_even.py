"""The law for when correcting a wrong response pays, and the counts of a step that it needs.

A prompt has been answered G times. One more response costs 1 and is correct with probability p. A correction
of a wrong one costs κ and is correct with probability q. Both p and q are those of prompts whose group is
*composed* like this one, since a group without a correct response is most often of a hard prompt. There are
two possible aims:

*Another correct text* beside the existing ones (a positive to learn from, a credit for the wrong one). A
budget B that is much larger than κ buys q·B/κ correct corrections or p·B correct responses, so corrections
pay where

    q > κ·p,

and never where p > 1/κ, whatever the skill.

*A first correct text*, in a group that has none and therefore no gradient at all. Only the first success
counts. With tries that are independent given the prompt, B buys one with probability 1 - (1 - q)^(B/κ) or 1 -
(1 - p)^B. Whatever B is, the former is larger where

    q > 1 - (1 - p)^κ,

which is κ·p for small p, and a little less than that otherwise.

Two assumptions make the law too kind to corrections. A correct correction is worth as much to training as a
correct response; in fact one that copies its reference, or is trained under a prompt that is never asked, is
worth less. And nothing better can be bought, such as groups of other prompts. One assumption makes it a
little too strict for a first text: all prompts of a composition have the same p. Where they differ, 1 - (1 -
p)^κ at the mean of p is more than its mean over prompts (Jensen's inequality: (1 - p)^κ is convex for κ ≥ 1).
"""

from collections.abc import Sequence

from megatron_ibpo.basics.records import Group
from megatron_ibpo.credit.operator import Operator

ALONE, ACCOMPANIED = "alone", "accompanied"
"""Compositions of a group: no correct response among the others, or some."""


def learns_from_corrections(operator: Operator) -> bool:
    """Return whether the texts of corrections are trained on; the law says nothing of those that only earn a
    bonus."""
    return operator.ibpo_joint or operator.ibpo_plain_prompt != "none"


def skill_needed(resample: float, price: float, *, first: bool) -> float:
    """Return the success rate of corrections above which they pay; above 1: they never do.

    Args:
        resample: p, success rate of one more response.
        price: κ, price of a correction in responses.
        first: the group needs its first correct text; otherwise another one.
    """
    return 1 - (1 - resample) ** price if first else price * resample


def composition_counts(groups: Sequence[Group]) -> dict[str, float]:
    """Return the counts that give p and q of both compositions, over any number of steps.

    p: each response of a group is one more try at a prompt that G - 1 others answered. So among the responses
    whose siblings are all wrong, the share of correct ones is p for groups without a correct response (to be
    exact, for groups of G - 1). The same holds for those with a correct sibling. No further sample is needed.

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
            siblings = ACCOMPANIED if successes - response.correct else ALONE
            counts[f"responses_{siblings}"] += 1
            counts[f"responses_{siblings}_correct"] += response.correct
        composition = ACCOMPANIED if successes else ALONE
        for correction in group.corrections:
            if correction.response.reward is not None:
                counts[f"corrections_{composition}"] += 1
                counts[f"corrections_{composition}_correct"] += correction.response.correct
    return counts
