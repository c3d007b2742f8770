"""IBPO that requests a correction only if it may be worth its price.

--ibpo-operator examples/credit/gated.py:Gated. A wrong response of a group with c of n correct is corrected
if c = 0, where one more rollout would hardly help, or if q̂ > κ·p̂: a correction is likelier to be right than
the rollouts that it costs. --ibpo-rescue-only leaves the second case out. It shows how a method builds on
another one and what it may remember from step to step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_ibpo.basics.records import Group
from megatron_ibpo.config import Config
from megatron_ibpo.credit import CreditContext, FollowUp, Judgement, Operator
from megatron_ibpo.credit.corrections import CompareAndCorrect
from megatron_ibpo.credit.operator import require_tool
from megatron_ibpo.credit.pairing import is_wrong

Tally = Mapping[str, Sequence[float]]
"""Composition of a group, such as "1/8" → (successes, corrections); both fade."""

FADING = 0.95
"""Weight of a step's corrections one step later. About twenty steps are remembered, so that the gate follows
a policy that learns to correct; a composition that is not tried for a while is tried again."""


@dataclass(frozen=True)
class Gated(CompareAndCorrect):
    """Compare-and-correct, with its parameters, behind the gate.

    `follow_ups` raises ValueError if the context has no prices, or remembers something other than a tally.
    """

    ibpo_rescue_only: bool = False
    """Correct nothing in groups with a correct response, whatever corrections are worth there."""

    def problems(self, config: Config) -> list[str]:
        """Refuse sampling ahead, and what compare-and-correct refuses."""
        problems = super().problems(config)
        if config.rollout.runs_ahead:
            problems.append(
                "--ibpo-operator Gated: goes by the corrections of the steps before, and with "
                "--max-staleness or --over-sampling-batch-size corrections are asked for before those steps "
                "are over; drop one of them"
            )
        return problems

    def follow_ups(self, group: Group, context: CreditContext) -> list[FollowUp]:
        """Return the corrections that may be worth their price."""
        if self.ibpo_rescue_only and any(response.correct for response in group.responses):
            group.skipped_pairs = 0
            return []
        return [
            follow_up
            for follow_up in super().follow_ups(group, context)
            if is_worth_asking(group, len(follow_up.request.prompt_token_ids), self, context)
        ]

    def judge(self, groups: Sequence[Group], context: CreditContext) -> Judgement:
        """Judge as compare-and-correct does, and remember how corrections succeeded."""
        judgement = super().judge(groups, context)
        return replace(
            judgement,
            metrics=judgement.metrics | _gate_metrics(groups),
            memory=remember(groups, context.memory),
        )


def is_worth_asking(group: Group, prompt_length: int, operator: Operator, context: CreditContext) -> bool:
    """Return whether to correct a wrong response of the group.

    Args:
        prompt_length: tokens of x̃.

    Raises:
        ValueError: the context has no prices, or remembers something other than a tally.
    """
    correct, scored = _composition(group)
    if correct == 0:
        return True
    price = price_in_rollouts(group, prompt_length, operator, context)
    return success_rate(context.memory, correct, scored) > price * correct / scored


def success_rate(tally: Tally, correct: int, scored: int) -> float:
    """Return q̂: the share of corrections that succeed in groups with `correct` of `scored` right responses,
    with one success and one failure added. So an untried composition is at ½, and is tried if it is cheap
    enough.

    Raises:
        ValueError: the tally holds something other than two counts.
    """
    try:
        successes, tries = (float(count) for count in tally.get(_name(correct, scored), (0.0, 0.0)))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"what the run remembers of corrections in groups with {_name(correct, scored)} right is no pair "
            "of counts; take an earlier checkpoint"
        ) from error
    return (successes + 1) / (tries + 2)


def price_in_rollouts(group: Group, prompt_length: int, operator: Operator, context: CreditContext) -> float:
    """Return κ: the cost of a correction, in rollouts of the same length. It includes the operations to read
    its prompt (once for all corrections of a response), to write it, and to train on it if that is done.

    Raises:
        ValueError: the context has no prices.
    """
    of_sample = require_tool(context.price, "prices of samples")
    length = round(sum(len(response.token_ids) for response in group.responses) / len(group.responses))
    plain = len(group.prompt.token_ids)
    rollout = of_sample(plain, length, sharing=len(group.responses), trained=plain + length)
    trained = 0
    if operator.ibpo_joint:
        trained = prompt_length + length
    elif operator.ibpo_plain_prompt != "none":
        trained = plain + length
    return of_sample(prompt_length, length, sharing=operator.ibpo_corrections, trained=trained) / rollout


def remember(groups: Sequence[Group], memory: Tally) -> dict[str, list[float]]:
    """Return the tally after a step. Corrections on which the verifier failed are not counted."""
    counts: dict[str, list[int]] = {}
    for group in groups:
        count = counts.setdefault(_name(*_composition(group)), [0, 0])
        scored = [c.response for c in group.corrections if c.response.reward is not None]
        count[0] += sum(response.correct for response in scored)
        count[1] += len(scored)
    tally: dict[str, list[float]] = {}
    for name in sorted(counts.keys() | memory.keys()):
        old, new = memory.get(name, (0.0, 0.0)), counts.get(name, (0, 0))
        tally[name] = [FADING * old[0] + new[0], FADING * old[1] + new[1]]
    return {name: entry for name, entry in tally.items() if entry[1] >= 0.01}


def _gate_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return, as gated_pairs, the number of wrong responses that were not corrected because it would not have
    paid."""
    wrong = sum(is_wrong(response) for group in groups for response in group.responses)
    num_corrected = sum(len({correction.target for correction in group.corrections}) for group in groups)
    return {"gated_pairs": float(wrong - num_corrected - sum(group.skipped_pairs for group in groups))}


def _composition(group: Group) -> tuple[int, int]:
    """Return (correct, scored) numbers of responses."""
    scored = [response for response in group.responses if response.reward is not None]
    return sum(response.correct for response in scored), len(scored)


def _name(correct: int, scored: int) -> str:
    return f"{correct}/{scored}"
