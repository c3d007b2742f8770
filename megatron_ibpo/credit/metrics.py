"""Metrics of credit, measured at every step (ibpo, "What to measure every step"), and the law for when
correcting a wrong response pays. A rate without a denominator is left out of the result; counts are always
present."""

import math
from collections.abc import Iterable, Sequence

from megatron_ibpo.basics.records import Group, Sample
from megatron_ibpo.credit.estimators import is_degenerate
from megatron_ibpo.credit.operator import Operator
from megatron_ibpo.credit.pairing import is_wrong

_COUNTED = "response_error"
"""A reward detail that is a count of responses (`megatron_ibpo.rewards.ResponseError`), not a measurement."""
ALONE, ACCOMPANIED = "alone", "accompanied"
"""Compositions of a group: no correct response among the others, or some."""


def response_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return rewards, lengths and failures of the responses, without corrections. Lengths count the tokens
    that the policy wrote; `reward/NAME` is the mean of a verifier's detail over the responses that have
    it."""
    responses = [response for group in groups for response in group.responses]
    lengths = [response.num_trained_tokens for response in responses]
    scored = [response for response in responses if response.reward is not None]
    return _without_none(
        reward=_mean(response.reward for response in scored if response.reward is not None),
        accuracy=_mean(response.correct for response in scored),
        response_length=_mean(lengths),
        tokens_responses=sum(lengths),
        truncated_responses=sum(response.finish_reason == "length" for response in responses),
        reward_errors=len(responses) - len(scored),
        groups_all_correct=sum(all(r.correct for r in group.responses) for group in groups),
        groups_none_correct=sum(not any(r.correct for r in group.responses) for group in groups),
        response_errors=sum(_COUNTED in response.reward_details for response in responses),
        **_mean_details(responses),
    )


def sampled_metrics(groups: Iterable[Group]) -> dict[str, float]:
    """Return the number of all responses sampled for a batch and their mean reward, whether or not a filter
    or dynamic sampling took their groups. Filters move the mean of the groups taken towards .5."""
    responses = [response for group in groups for response in group.responses]
    mean = _mean(response.reward for response in responses if response.reward is not None)
    return _without_none(responses_sampled=len(responses), reward_sampled=mean)


def correction_metrics(groups: Sequence[Group], *, knows_answers: bool) -> dict[str, float]:
    """Return metrics of the corrections.

    correction_success: share of scored corrections that are correct. rewrite_rate, noop_rate (ŷ = y),
    reference_copy_rate (ŷ = a reference), reference_leakage_rate (`note_reference_leakage`) and
    beyond_threshold_rate (d(y, ŷ) > α): shares of all corrections. correction_steps_per_token: steps of the
    engine per token, where it drafted any. Leakage is left out unless the verifier knows answers.
    """
    corrections = [correction for group in groups for correction in group.corrections]
    responses = [correction.response for correction in corrections]
    lengths = [response.num_trained_tokens for response in responses]
    drafted, accepted = (sum(response.drafts[part] for response in responses) for part in (0, 1))
    return _without_none(
        correction_steps_per_token=1 - accepted / sum(lengths) if drafted else None,
        corrections=len(corrections),
        correction_success=_mean(r.correct for r in responses if r.reward is not None),
        rewrite_rate=_mean(correction.rewritten for correction in corrections),
        beyond_threshold_rate=_mean(correction.beyond_threshold for correction in corrections),
        noop_rate=_mean(correction.distance == 0 for correction in corrections),
        reference_copy_rate=_mean(correction.reference_distance == 0 for correction in corrections),
        reference_leakage_rate=_mean(c.reference_leakage for c in corrections if knows_answers),
        correction_distance=_mean(correction.distance for correction in corrections),
        unmodified_share=_mean(correction.unmodified_share for correction in corrections),
        correction_length=_mean(lengths),
        tokens_corrections=sum(lengths),
        truncated_corrections=sum(response.finish_reason == "length" for response in responses),
        correction_reward_errors=sum(response.reward is None for response in responses),
        skipped_pairs=sum(group.skipped_pairs for group in groups),
    )


def shaping_metrics(
    groups: Sequence[Group], phi: Sequence[Sequence[float]], shaped: Sequence[Sequence[float | None]]
) -> dict[str, float]:
    """Return the effects of shaping, with Y = r, φ = Δ and A = r' - group mean (before the division by std).

    Covariance and variances are the population's within each group, averaged over the groups. lambda_max = -2
    Cov(Y, φ) / V_φ is the largest λ that does not raise the variance of A (Theorem A.2).
    """
    covariances, phi_variances, reward_variances, shaped_variances = [], [], [], []
    for group, phi_of, shaped_of in zip(groups, phi, shaped, strict=True):
        scored = [
            (response.reward, bonus, value)
            for response, bonus, value in zip(group.responses, phi_of, shaped_of, strict=True)
            if response.reward is not None and value is not None
        ]
        if scored:
            rewards, bonuses, values = (list(column) for column in zip(*scored, strict=True))
            covariances.append(_covariance(rewards, bonuses))
            phi_variances.append(_covariance(bonuses, bonuses))
            reward_variances.append(_covariance(rewards, rewards))
            shaped_variances.append(_covariance(values, values))
    cov, v_phi = _mean(covariances), _mean(phi_variances)
    wrong_bonuses = [
        bonus
        for group, phi_of in zip(groups, phi, strict=True)
        for response, bonus in zip(group.responses, phi_of, strict=True)
        if is_wrong(response)
    ]
    return _without_none(
        shaped_reward=_mean(value for values in shaped for value in values if value is not None),
        bonus_rate=_mean(bonus > 0 for bonus in wrong_bonuses),
        cov_reward_phi=cov,
        var_phi=v_phi,
        lambda_max=-2 * cov / v_phi if cov is not None and v_phi else None,
        var_advantage=_mean(shaped_variances),
        var_advantage_unshaped=_mean(reward_variances),
        degenerate_groups=sum(is_degenerate(values) for values in shaped),
    )


def learns_from_corrections(operator: Operator) -> bool:
    """Return whether the texts of corrections are trained on; the law says nothing of those that only earn a
    bonus."""
    return operator.ibpo_joint or operator.ibpo_plain_prompt != "none"


def skill_needed(resample: float, price: float, *, first: bool) -> float:
    """Return q, the success rate of corrections above which they pay; above 1: they never do.

    A budget of B responses buys p·B correct responses or q·B/κ correct corrections. For a `first` correct
    text, in a group that has none and therefore no gradient, only the first success counts: with tries that
    are independent given the prompt, its probability is 1 - (1 - p)^B or 1 - (1 - q)^(B/κ).

    The law is too kind to corrections: it takes a correct one to be worth as much to training as a correct
    response, and knows of nothing better to buy, such as groups of other prompts. It is a little too strict
    for a first text where the p of prompts differ, since (1 - p)^κ is convex for κ ≥ 1.

    Args:
        resample: p, success rate of one more response to prompts whose group is composed like this one, since
            a group without a correct response is most often of a hard prompt.
        price: κ, price of a correction in responses.
    """
    return 1 - (1 - resample) ** price if first else price * resample


def composition_counts(groups: Sequence[Group]) -> dict[str, float]:
    """Return the counts that give p and q (`skill_needed`) of both compositions, over any number of steps;
    unscored samples are left out.

    p: each response of a group is one more try at a prompt that G - 1 others answered. So among the responses
    whose siblings are all wrong, the share of correct ones is p for groups without a correct response (to be
    exact, for groups of G - 1), and likewise for those with a correct sibling.
    q: corrections by whether their group has a correct response.
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


def _mean_details(responses: Sequence[Sample]) -> dict[str, float | None]:
    names = dict.fromkeys(name for response in responses for name in response.reward_details)
    return {
        f"reward/{name}": _mean(r.reward_details[name] for r in responses if name in r.reward_details)
        for name in names
        if name != _COUNTED
    }


def _covariance(x: Sequence[float], y: Sequence[float]) -> float:
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    return math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / len(x)


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers) if numbers else None


def _without_none(**metrics: float | None) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if value is not None}
