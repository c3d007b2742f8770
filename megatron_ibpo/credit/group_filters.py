"""Filters of groups: --group-filter, and dynamic sampling (DAPO, arXiv 2503.14476, section 3.2)."""

from collections.abc import Callable, Sequence

from megatron_ibpo.basics.records import Group
from megatron_ibpo.config import AlgorithmConfig, load_hook
from megatron_ibpo.credit.assign import assign_credit
from megatron_ibpo.credit.estimators import group_mean, needs_critic
from megatron_ibpo.credit.operator import CreditContext, Operator
from megatron_ibpo.credit.registries import Method, find_estimator
from megatron_ibpo.credit.token_credit import uniform

GroupFilter = Callable[[Group], bool]
"""Returns whether to use a group, scored and not yet corrected."""
AfterCredit = Callable[[Group, CreditContext, Operator], bool]
"""Returns whether a group is worth using once its corrections are there."""


def any_group(group: Group) -> bool:
    """Accept every group."""
    return True


def is_informative(group: Group) -> bool:
    """Return whether some of the responses are correct and some are not; those whose verifier failed are
    neither. If all or no responses are correct, a prompt has no advantage."""
    return len({response.correct for response in group.responses if response.reward is not None}) == 2


def leaves_gradient(group: Group, context: CreditContext, operator: Operator) -> bool:
    """Return whether some response or correction has an advantage other than 0, as in a group without a
    correct response of which some corrections succeed and others do not. Judged by the group alone, so an
    adaptive rewrite threshold is that of its own corrections. With a critic, rewards decide."""
    estimator = find_estimator(context.algorithm)
    judge = group_mean if needs_critic(estimator) else estimator
    credit = assign_credit([group], context, Method(operator, judge, uniform))
    return any(sequence.has_advantage for sequence in credit.sequences)


def find_group_filter(algorithm: AlgorithmConfig) -> GroupFilter:
    """Return the function of --group-filter; by default one that accepts every group. Raises ConfigError if
    it cannot be loaded, or is not callable."""
    if algorithm.group_filter is None:
        return any_group
    return load_hook("--group-filter", algorithm.group_filter, called_with="a group")


def fill_batch(
    draw: Callable[[int], Sequence[Group]],
    num_groups: int,
    max_rounds: int,
    *,
    usable: GroupFilter = any_group,
    preferred: GroupFilter = is_informative,
) -> tuple[list[Group], dict[str, float]]:
    """Return (`num_groups` groups, preferred ones as far as available, metrics). Raises ValueError if no
    group is usable.

    Args:
        draw: returns scored groups of round 0, 1, …; each round has other prompts.
        max_rounds: after these the batch is filled up with the first groups that are usable but not
            preferred. Those are counted, and groups that are still missing too.
        usable: groups that it refuses are never in the batch (--group-filter).
        preferred: groups that it refuses are replaced while there are rounds left (dynamic sampling).
    """
    chosen: list[Group] = []
    fillers: list[Group] = []
    refused: list[Group] = []
    rounds = 0
    while rounds < max_rounds and len(chosen) < num_groups:
        for group in draw(rounds):
            kind = refused if not usable(group) else chosen if preferred(group) else fillers
            kind.append(group)
        rounds += 1
    missing = max(0, num_groups - len(chosen))
    batch = chosen[:num_groups] + fillers[:missing]
    if not batch and refused:
        raise ValueError(
            f"--group-filter refused all {len(refused)} groups of {rounds} rounds; let it accept more, or "
            "raise --dynamic-sampling-rounds"
        )
    discarded = chosen[num_groups:] + fillers[missing:] + refused
    metrics = {
        "sampling_rounds": float(rounds),
        "groups_filled_up": float(min(missing, len(fillers))),
        "groups_discarded": float(len(discarded)),
        "groups_refused": float(len(refused)),
        "groups_missing": float(num_groups - len(batch)),
        "tokens_discarded": float(
            sum(sample.num_trained_tokens for group in discarded for sample in group.samples)
        ),
    }
    return batch, metrics
