"""Advantage estimators: the baseline and scale of a reward (ibpo step 9).

An estimator is a function of rewards that are compared with each other. One that needs the whole batch or the
samples is an object with a method `of_batch`; it may give tokens advantages of their own
(`gives_token_advantages = True`). One that reads a critic's values (`needs_critic = True`) has a method
`of_values` instead. A method `explain` writes an advantage as a sum for readers (`advantage_sum`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from megatron_ibpo.basics.records import Sample, TrainSequence, Weights
from megatron_ibpo.credit.explanation import ComparedRewards, number


@dataclass(frozen=True, eq=False)
class ComparedSamples:
    """Samples that are compared with each other."""

    rewards: Sequence[float | None]
    """Reward of each, as it is trained on. None stands for a failed verifier; estimators never see it."""
    samples: Sequence[Sample]


GroupEstimator = Callable[[Sequence[float]], Sequence[float]]
"""Compared rewards → the advantage of each, in the same order."""


Advantage = float | Weights
"""Advantage of a sample, or of each of its tokens, of which those that the policy wrote count."""


class BatchEstimator(Protocol):
    """An estimator that sees everything compared in a step."""

    def of_batch(self, batch: Sequence[ComparedSamples]) -> Sequence[Sequence[Advantage]]:
        """Return the advantage of each sample of each comparison. A group that is judged alone
        (--dynamic-sampling-by credit) is a batch of one."""
        ...


class ValueEstimator(Protocol):
    """An estimator that reads a critic's values (`needs_critic = True`). It compares no rewards: it is called
    once a step, when all sequences are complete."""

    def of_values(
        self, sequences: Sequence[TrainSequence], values: Sequence[Weights]
    ) -> tuple[Sequence[Weights], Sequence[Weights]]:
        """Return (advantages, the critic's targets): of each sequence of the step, which has its shaped
        reward and the index of its group, one number for each token that the policy wrote. `values` are the
        critic's before each of these tokens, in float64."""
        ...


Estimator = GroupEstimator | BatchEstimator | ValueEstimator

_EPSILON = 1e-8
_VISIBLE_EPSILON = 1e-3
"""Below this std the epsilon shows in an advantage's first five digits."""


def gives_token_advantages(estimator: Estimator) -> bool:
    """Return whether the tokens of a response may have different advantages, which a loss variant must
    take. A critic's values differ from token to token."""
    return needs_critic(estimator) or bool(getattr(estimator, "gives_token_advantages", False))


def needs_critic(estimator: Estimator) -> bool:
    """Return whether advantages come from a critic's values, once all sequences are complete."""
    return bool(getattr(estimator, "needs_critic", False))


def mean_advantage(advantage: Advantage | None, sample: Sample) -> float | None:
    """Return the mean advantage of the tokens that the policy wrote."""
    if not isinstance(advantage, np.ndarray):
        return advantage
    return float(advantage[sample.loss_mask].mean()) if sample.num_trained_tokens else 0.0


def is_degenerate(rewards: Sequence[float | None]) -> bool:
    """Return whether there is nothing to compare: fewer than two different rewards."""
    return len({reward for reward in rewards if reward is not None}) < 2


def group_mean(rewards: Sequence[float]) -> list[float]:
    """Return A_i = r_i - mean, in float64: the advantage of Dr. GRPO (arXiv 2503.20783), since a std gives
    more weight to questions that are nearly always or nearly never answered. Equal rewards have advantages of
    exactly 0, and sums are exact, so that the order of the group does not matter."""
    if is_degenerate(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def group_z_score(rewards: Sequence[float]) -> list[float]:
    """Return A_i = (r_i - mean) / (std + 1e-8) (GRPO, arXiv 2402.03300) with the population's std, since the
    group is the whole population; IBPO uses the same."""
    return _z_score(rewards, len(rewards))


def group_z_score_bessel(rewards: Sequence[float]) -> list[float]:
    """Return the same with Bessel's std, a sum divided by n - 1, as in verl, TRL, slime and oat: advantages
    are √((n - 1)/n) times those of `group_z_score`, .94 at n = 8 and .71 at n = 2."""
    return _z_score(rewards, len(rewards) - 1)


def _z_score(rewards: Sequence[float], divisor: int) -> list[float]:
    centred = group_mean(rewards)
    std = math.sqrt(math.fsum(value**2 for value in centred) / max(1, divisor))
    return [value / (std + _EPSILON) for value in centred]


def maxrl(rewards: Sequence[float]) -> list[float]:
    """Return A_i = (r_i - mean) / mean, or 0 in a group without a success. The mean replaces the std, so that
    rare successes count more. The gradient is that of the log of the mean success, to the order of the group
    (MaxRL, arXiv 2602.02710). Raises ValueError for a reward below 0, which has no logarithm."""
    if rewards and min(rewards) < 0:
        raise ValueError(
            f"--advantages maxrl takes the log of a mean reward, and a reward is {min(rewards):g}: it needs "
            "rewards of at least 0, so no --overlong-buffer-share and no --ibpo-rewrite-penalty"
        )
    centred = group_mean(rewards)
    mean = math.fsum(rewards) / max(1, len(rewards))
    return [value / mean if mean > 0 else 0.0 for value in centred]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Return A_i = r_i less the mean of the other rewards (RLOO, arXiv 2402.14740), which is n / (n - 1)
    times r_i less the mean of all. It is unbiased, since no reward is compared with itself."""
    num_others = max(1, len(rewards) - 1)
    return [value * len(rewards) / num_others for value in group_mean(rewards)]


_SUMS: tuple[tuple[Estimator, str], ...] = (
    (group_z_score, "({x} − mean) / {s} = ({r} − {mean}) / {std}"),
    (group_z_score_bessel, "({x} − mean) / ({s}·√(n/(n − 1))) = ({r} − {mean}) / ({std}·√({n}/({n} − 1)))"),
    (group_mean, "{x} − mean = {r} − {mean}"),
    (leave_one_out, "({x} − mean)·n/(n − 1) = ({r} − {mean})·{n}/({n} − 1)"),
    (maxrl, "({x} − mean) / mean = ({r} − {mean}) / {mean}"),
)
"""(estimator, its advantage as a sum: in symbols, and in numbers)."""


def advantage_sum(estimator: Estimator, symbol: str, reward: float, rewards: ComparedRewards) -> str:
    """Return the advantage of a reward, of this symbol, among the compared ones as a sum for readers. It is
    empty if the rewards are equal, or if the estimator is a user's without a method
    `explain(reward, rewards)`."""
    if explain := getattr(estimator, "explain", None):
        return str(explain(reward, rewards.values))
    written = next((text for summed, text in _SUMS if summed is estimator), None)
    mean, std, digits = rewards.mean, rewards.std, rewards.digits
    if written is None or rewards.are_equal or (estimator is maxrl and mean == 0):
        return ""
    values = {"r": number(reward, digits), "mean": number(mean, digits), "std": number(std, digits), "s": "σ"}
    if std < _VISIBLE_EPSILON:
        values |= {"std": f"({values['std']} + {_EPSILON:g})", "s": f"(σ + {_EPSILON:g})"}
    return written.format(x=symbol, n=len(rewards.values), **values)


def advantages(batch: Sequence[ComparedSamples], estimator: Estimator) -> list[list[Advantage | None]]:
    """Return the advantage of every sample of every comparison; None where its reward is None. With a critic
    all are 0 until the sequences are complete (`value_credit`). Raises ValueError if the estimator does not
    give exactly one finite number per reward, or per token where it declares that."""
    if needs_critic(estimator):
        return [[None if reward is None else 0.0 for reward in compared.rewards] for compared in batch]
    all_scored = [_without_failures(compared) for compared in batch]
    nonempty = [compared for compared in all_scored if compared.rewards]
    estimates = iter(_estimated(nonempty, estimator))
    results: list[list[Advantage | None]] = []
    by_token = gives_token_advantages(estimator)
    for compared, scored in zip(batch, all_scored, strict=True):
        group_advantages = iter(_checked(next(estimates), scored, by_token) if scored.rewards else ())
        results.append([None if reward is None else next(group_advantages) for reward in compared.rewards])
    return results


def _without_failures(compared: ComparedSamples) -> ComparedSamples:
    pairs = zip(compared.rewards, compared.samples, strict=True)
    scored = [(reward, sample) for reward, sample in pairs if reward is not None]
    return ComparedSamples([reward for reward, _ in scored], [sample for _, sample in scored])


def _estimated(batch: Sequence[ComparedSamples], estimator: Estimator) -> Sequence[Sequence[Advantage]]:
    if not hasattr(estimator, "of_batch"):
        of_group = cast(GroupEstimator, estimator)
        return [of_group(cast(Sequence[float], compared.rewards)) for compared in batch]
    advantages = list(cast(BatchEstimator, estimator).of_batch(batch))
    if len(advantages) != len(batch):
        raise ValueError(
            f"the estimator --advantages gave advantages for {len(advantages)} comparisons instead of "
            f"{len(batch)}"
        )
    return advantages


def _checked(advantages: Sequence[Advantage], compared: ComparedSamples, by_token: bool) -> list[Advantage]:
    if by_token:
        return _checked_by_token(advantages, compared)
    if any(isinstance(value, np.ndarray) and value.ndim for value in advantages):
        raise ValueError(
            "the estimator --advantages returned advantages of tokens; it must declare "
            "gives_token_advantages = True, so that the loss variant is checked before work starts"
        )
    numbers = [float(value) for value in advantages]
    if len(numbers) != len(compared.rewards) or not all(map(math.isfinite, numbers)):
        raise ValueError(
            f"the estimator --advantages returned {numbers} for the rewards {list(compared.rewards)}; it "
            "must return one finite number per reward"
        )
    return [*numbers]


def _checked_by_token(advantages: Sequence[Advantage], compared: ComparedSamples) -> list[Advantage]:
    """Return the advantages of every sample's tokens, 0 where the policy did not write them."""
    arrays = [np.asarray(value, np.float64) for value in advantages]
    shapes = [array.shape for array in arrays]
    lengths = [(len(sample.token_ids),) for sample in compared.samples]
    if shapes != lengths or not all(np.isfinite(array).all() for array in arrays):
        raise ValueError(
            f"the estimator --advantages returned arrays of shapes {shapes} for responses of {lengths} "
            "tokens; it must return one finite number per token"
        )
    return [array * sample.loss_mask for array, sample in zip(arrays, compared.samples, strict=True)]
