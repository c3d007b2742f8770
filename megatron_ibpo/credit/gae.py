"""Token advantages from a critic's values: generalised advantage estimation (arXiv 1506.02438, eq. 16)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np

from megatron_ibpo.basics.records import Flags, TrainSequence, Weights
from megatron_ibpo.config import UNIT
from megatron_ibpo.credit.explanation import MINUS, Line, number
from megatron_ibpo.credit.operator import CreditContext, lent


@dataclass(frozen=True)
class Critic:
    """The estimator of PPO. It compares no rewards: the critic is asked once all sequences are complete."""

    gae_gamma: Annotated[float, UNIT] = 1.0
    """γ of generalised advantage estimation. 1: only the end is rewarded, and it should not count less for a
    long response."""
    gae_lambda: Annotated[float, UNIT] = 0.95
    """λ of generalised advantage estimation: 0 uses the critic's next value, 1 the reward."""

    needs_critic: ClassVar[bool] = True

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        return [0.0] * len(rewards)


def generalised_advantages(
    values: Sequence[Weights], rewards: Sequence[float], *, gamma: float, lam: float
) -> list[Weights]:
    """Return A_t = Σ_k (γλ)^k δ_{t+k} of every token of every response, δ_t = γ V_{t+1} - V_t; at the last
    token the reward replaces γ V.

    Args:
        values: V_t of each response before its token t, not empty.
        rewards: reward at the end of each response. A truncated response has ended too.
    """
    width = max(map(len, values), default=0)
    values_ST, rewards_S = np.zeros((len(values), width)), np.asarray(rewards, np.float64)
    for row, own in zip(values_ST, values, strict=True):
        row[width - len(own) :] = own  # aligned at their ends, so that one loop serves all
    out_ST, advantages_S, after_S = np.zeros_like(values_ST), np.zeros(len(values)), rewards_S
    for t in reversed(range(width)):
        advantages_S = after_S - values_ST[:, t] + gamma * lam * advantages_S
        out_ST[:, t] = advantages_S
        after_S = gamma * values_ST[:, t]
    return [row[width - len(own) :] for row, own in zip(out_ST, values, strict=True)]


def critic_credit(
    sequences: Sequence[TrainSequence], critic: Critic, context: CreditContext
) -> tuple[list[TrainSequence], dict[str, float], dict[tuple[int, str, int], list[Line]]]:
    """Return (the sequences with token advantages, returns and values; metrics; lines for readers by group,
    kind and index).

    Advantages are scaled to mean 0 and population std 1 over all trained tokens of the step. Tokens that the
    policy did not write are skipped: the value after a token is that before the next one it wrote.

    Raises:
        ValueError: the context has no critic.
    """
    if not sequences:
        return [], {}, {}
    ask = lent(context.values, "a critic")
    predicted = ask(list(sequences))
    # convert to float64 before any sum
    own_values = [v[s.loss_mask].astype(np.float64) for v, s in zip(predicted, sequences, strict=True)]
    advantages = generalised_advantages(
        own_values,
        [_reward(s) for s in sequences],
        gamma=critic.gae_gamma,
        lam=critic.gae_lambda,
    )
    returns = [a + v for a, v in zip(advantages, own_values, strict=True)]
    flat, flat_returns = np.concatenate(advantages), np.concatenate(returns)
    mean, std = flat.mean(), flat.std()
    credited = []
    for s, own, target, value in zip(sequences, advantages, returns, predicted, strict=True):
        whitened = (own - mean) / (std + 1e-8) if std > 0 else np.zeros_like(own)
        credited.append(
            replace(
                s,
                advantage=float(whitened.mean()),
                token_advantages=_spread(whitened, s.loss_mask),
                returns=_spread(target, s.loss_mask),
                values=value,
            )
        )
    spread = flat_returns.var()
    metrics = {
        "value_mean": float(np.concatenate(own_values).mean()),
        "return_mean": float(flat_returns.mean()),
    }
    if spread > 0:  # λ-returns contain the values, so this is too high except at λ = 1
        metrics["value_explained_variance"] = float(1 - flat.var() / spread)
    how = f"(A_t {MINUS} {number(mean)}) / {number(std)}, over all tokens of the step; A_t by GAE"
    how += (
        f" with γ = {number(critic.gae_gamma)} and λ = {number(critic.gae_lambda)} from the critic's values"
    )
    lines: dict[tuple[int, str, int], list[Line]] = {
        (s.group, s.kind, s.index): [Line("advantage", s.advantage, note=f"mean over its tokens of {how}")]
        for s in credited
    }
    return credited, metrics, lines


def _reward(sequence: TrainSequence) -> float:
    assert sequence.reward is not None  # samples whose verifier failed never become sequences
    return sequence.reward


def _spread(values: Weights, loss_mask: Flags) -> Weights:
    """Spread values of trained tokens over all tokens of a response, with 0 at the others."""
    out = np.zeros(len(loss_mask))
    out[loss_mask] = values
    return out
