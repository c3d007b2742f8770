"""The explanation of a step's credit: from every verified reward to its advantage, whatever the method."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ibpo.basics.records import Group, TrainSequence
from megatron_ibpo.basics.text import counted, shown
from megatron_ibpo.credit.estimators import ComparedSamples, Estimator, advantage_sum, needs_critic
from megatron_ibpo.credit.explanation import (
    MINUS,
    ComparedRewards,
    GroupExplanation,
    Line,
    SampleExplanation,
    SampleKey,
    number,
)
from megatron_ibpo.credit.operator import Judgement, Operator
from megatron_ibpo.credit.pairing import is_wrong
from megatron_ibpo.credit.shaping import compared_corrections, counts

Rewards = Sequence[float | None]
_SHAPED = "shaped reward r′"
_ROUNDING = 1e-12
"""Smallest penalty, relative to a reward, that is not the rounding of a sum."""


@dataclass(frozen=True)
class StepCredit:
    """The parts of a step's credit, before they are written as lines."""

    groups: Sequence[Group]
    judgement: Judgement
    operator: Operator
    reward_threshold: float
    compared: Sequence[ComparedSamples]
    """Rewards as they are trained on: of a group's responses, then of the corrections that join them."""
    correction_rewards: Sequence[Rewards]
    """Rewards of the corrections that are samples of their own; empty without any."""
    estimator: Estimator
    correction_estimator: Estimator
    sequences: Sequence[TrainSequence]
    notes: Mapping[SampleKey, list[Line]]
    """Lines of a critic on the advantages of its sequences."""
    token_note: str


def check_words(groups: Sequence[Group], judgement: Judgement) -> None:
    """Raise ValueError if an operator's lines are not a list of `Line` for every response."""
    words = judgement.explanations
    if words is None:
        return
    sizes = [len(group.responses) for group in groups]
    explained = [len(group_words) for group_words in words]
    if explained != sizes:
        raise ValueError(
            f"the operator's explanations are for groups of {explained} responses instead of {sizes}: it "
            "gives a list of lines for every response"
        )
    lines = [line for group_words in words for response_words in group_words for line in response_words]
    if misfit := next((line for line in lines if not isinstance(line, Line)), None):
        raise ValueError(f"the operator's explanations hold {shown(misfit)}, which is no Line")


def explain_step(step: StepCredit) -> list[GroupExplanation]:
    """Return the explanation of every sample of every group."""
    sequences: dict[SampleKey, TrainSequence] = {(s.group, s.kind, s.index): s for s in step.sequences}
    return [_group(step, place, sequences) for place in range(len(step.groups))]


def _group(step: StepCredit, place: int, sequences: Mapping[SampleKey, TrainSequence]) -> GroupExplanation:
    group = step.groups[place]
    among = _scored(step.compared[place].rewards)
    compared = _compared_corrections(step, place, among)
    responses = [
        _response(step, place, index, among, sequences.get((place, "response", index)))
        for index in range(len(group.responses))
    ]
    corrections = [
        _correction(step, place, index, compared[index], sequences.get((place, "correction", index)))
        for index in range(len(group.corrections))
    ]
    return GroupExplanation(
        list(map(SampleExplanation, responses)), list(map(SampleExplanation, corrections))
    )


def _scored(rewards: Rewards) -> ComparedRewards:
    return ComparedRewards([reward for reward in rewards if reward is not None])


def _compared_corrections(step: StepCredit, place: int, among: ComparedRewards) -> dict[int, ComparedRewards]:
    """Return the rewards that each correction is compared with; `among`: those of the responses."""
    group = step.groups[place]
    if not step.correction_rewards:
        return dict.fromkeys(range(len(group.corrections)), among)
    rewards = step.correction_rewards[place]
    compared = [
        (members, _scored([rewards[i] for i in members]))
        for members in compared_corrections(group, step.operator)
    ]
    return {index: compared_rewards for members, compared_rewards in compared for index in members}


def _response(
    step: StepCredit, place: int, index: int, among: ComparedRewards, sequence: TrainSequence | None
) -> list[Line]:
    response, weight = step.groups[place].responses[index], step.operator.ibpo_lambda
    reward, phi = step.compared[place].rewards[index], step.judgement.phi[place][index]
    if response.reward is None or reward is None:
        return [_NO_REWARD]
    words = step.judgement.explanations[place][index] if step.judgement.explanations else []
    lines = [Line("verified reward r", response.reward), *words]
    if weight and is_wrong(response) and not any(line.name.startswith("φ") for line in words):
        lines.append(Line("φ", phi))
    bonus, written = weight * phi, f"{number(weight)}·{number(phi)}"
    if bonus > 0 and response.reward + bonus >= step.reward_threshold:
        note = f"the bonus λφ = {written} is withheld: with it, r would reach the smallest correct reward"
        lines += _shaped(response.reward, [], reward, note)
    else:
        lines += _shaped(response.reward, [("λφ", written, bonus)] if weight else [], reward)
    return lines + _credited(step, (place, "response", index), among, reward, step.estimator, sequence, lines)


def _correction(
    step: StepCredit, place: int, index: int, among: ComparedRewards, sequence: TrainSequence | None
) -> list[Line]:
    group = step.groups[place]
    correction = group.corrections[index]
    verified, references = correction.response.reward, [f"response {n + 1}" for n in correction.references]
    beside_text = f", shown beside {', '.join(references)}" if references else ""
    lines = [Line("made for", f"response {correction.target + 1}{beside_text}")]
    reward = _correction_reward(step, place, index)
    if verified is None:
        return [*lines, _NO_REWARD]
    lines.append(Line("verified reward r", verified))
    if reward is None:
        return [*lines, Line("trained on", "no", note="the method does not learn from this text")]
    if step.operator.ibpo_joint_on == "successful" and not counts(correction):
        note = "only corrections that are right and no rewrite are"
        return [*lines, Line("trained on", "no", note=note)]
    penalty = -step.operator.ibpo_rewrite_penalty if correction.beyond_threshold else 0.0
    is_penalised = penalty < 0 and bool(step.correction_rewards)
    lines += _shaped(
        verified, [(f"({MINUS}ρ)", f"({number(penalty)})", penalty)] if is_penalised else [], reward
    )
    estimator = step.correction_estimator if step.correction_rewards else step.estimator
    return lines + _credited(step, (place, "correction", index), among, reward, estimator, sequence, lines)


def _correction_reward(step: StepCredit, place: int, index: int) -> float | None:
    """Return the reward of a correction as it is trained on; None if it is not."""
    if step.correction_rewards:
        return step.correction_rewards[place][index]
    after_responses = len(step.groups[place].responses) + index
    rewards = step.compared[place].rewards
    return rewards[after_responses] if after_responses < len(rewards) else None


_NO_REWARD = Line("verified reward r", None, note="the verifier failed: left out of comparison and training")


def _shaped(
    verified: float, addends: Sequence[tuple[str, str, float]], reward: float, note: str = ""
) -> list[Line]:
    """Return the sum that turns a verified reward into the one that is trained on, if there is any, from the
    (symbol, numbers, value) of what the method adds; the rest is an overlong penalty."""
    penalty = reward - verified - sum(value for _, _, value in addends)
    if abs(penalty) > _ROUNDING * max(1.0, abs(reward)):
        addends = [*addends, ("overlong penalty", f"({number(penalty)})", penalty)]
    if not addends and not note:
        return []
    symbols = " + ".join(["r", *(symbol for symbol, _, _ in addends)])
    numbers = " + ".join([number(verified), *(written for _, written, _ in addends)])
    return [Line(_SHAPED, reward, f"{symbols} = {numbers}", note)]


def _credited(
    step: StepCredit,
    key: SampleKey,
    among: ComparedRewards,
    reward: float,
    estimator: Estimator,
    sequence: TrainSequence | None,
    reward_lines: Sequence[Line],
) -> list[Line]:
    """Return the lines that follow those on a sample's reward: the mean and spread of the rewards that it
    is compared with, the advantage as a sum of them, and its part in the loss."""
    lines: list[Line] = []
    if not needs_critic(estimator):
        lines += [
            Line("group mean", among.mean, note=f"of {counted(len(among.values), 'reward')}"),
            Line("group σ", among.std),
        ]
        if sequence is None:
            return [*lines, Line("trained on", "no", note="it has no tokens of the policy's own")]
        note = ""
        if sequence.token_advantages is not None:
            note = "mean over its tokens, which have advantages of their own"
        elif among.are_equal and sequence.advantage == 0:
            note = "all compared rewards are equal: nothing to learn"
            if len(among.values) < 2:
                note = "there is no other reward to compare with: nothing to learn"
        symbol = "r′" if any(line.name == _SHAPED for line in reward_lines) else "r"
        total = advantage_sum(estimator, symbol, reward, among)
        lines.append(Line("advantage", sequence.advantage, total, note))
    if sequence is None:
        return []
    lines += [*step.notes.get(key, []), Line("weight in the loss", sequence.weight)]
    weights = sequence.token_weights
    if weights is None:
        return lines
    trained_weights = weights[sequence.loss_mask]
    zeros = f"{int((trained_weights == 0).sum())} of {counted(len(trained_weights), 'token')} weigh 0"
    note = "; ".join(part for part in (zeros, step.token_note) if part)
    return [*lines, Line("mean token weight", float(trained_weights.mean()), note=note)]
