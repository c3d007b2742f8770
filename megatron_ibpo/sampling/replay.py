"""Recorded samples in place of engines."""

from megatron_ibpo.basics.records import Group
from megatron_ibpo.credit import CreditContext, Operator


def replay(groups: list[Group], operator: Operator, context: CreditContext) -> list[Group]:
    """Return the recorded groups as if they had been sampled now. The operator's requests for a group are
    answered by its recorded corrections, in order.

    Raises:
        ValueError: there are fewer of them than the operator requests.
    """
    for group in groups:
        recorded = [correction.response for correction in group.corrections]
        group.corrections, group.skipped_pairs = [], 0
        follow_ups = operator.follow_ups(group, context)
        if len(recorded) < len(follow_ups):
            raise ValueError(
                f"the recorded rollouts hold fewer corrections than this algorithm asks for ({len(recorded)} "
                f"of {len(follow_ups)} for prompt {group.prompt.index}): replay with the settings they were "
                "recorded with"
            )
        operator.attach(group, follow_ups, recorded[: len(follow_ups)])
    return groups
