"""Token advantages from a critic's values: generalised advantage estimation (arXiv 1506.02438, eq. 16)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megatron_ibpo.credit.operator import Values
from megatron_ibpo.records import TrainSequence

__all__ = ["critic_credit", "generalised_advantages"]

Rows = npt.NDArray[np.float64]


def generalised_advantages(
    values: Sequence[Sequence[float]], rewards: Sequence[float], *, gamma: float, lam: float
) -> list[Rows]:
    """A_t = Σ_k (γλ)^k δ_{t+k} of every token of every response, δ_t = γ V_{t+1} - V_t; at the last token the
    reward stands in the place of γ V.

    Args:
        values: V_t of each response before its token t, not empty.
        rewards: of each response, at its end. One that was cut off has ended too.
    """
    width = max(map(len, values), default=0)
    values_ST, rewards_S = np.zeros((len(values), width)), np.asarray(rewards, np.float64)
    for row, own in zip(values_ST, values, strict=True):
        row[width - len(own) :] = own  # aligned at their ends, so that all of them end at once
    out_ST, advantages_S, after_S = np.zeros_like(values_ST), np.zeros(len(values)), rewards_S
    for t in reversed(range(width)):
        advantages_S = after_S - values_ST[:, t] + gamma * lam * advantages_S
        out_ST[:, t] = advantages_S
        after_S = gamma * values_ST[:, t]
    return [row[width - len(own) :] for row, own in zip(out_ST, values, strict=True)]


def critic_credit(
    sequences: Sequence[TrainSequence], values: Values, *, gamma: float, lam: float
) -> tuple[list[TrainSequence], dict[str, float]]:
    """(the sequences with token advantages, returns and values; what was measured).

    Advantages are brought to mean 0 and population std 1 over all tokens of the step.

    Args:
        sequences: whose `advantage` is the reward at the end.
        values: asks the critic.
    """
    if not sequences:
        return [], {}
    predicted = values(list(sequences))
    rewards = [s.advantage for s in sequences]
    advantages = generalised_advantages(predicted, rewards, gamma=gamma, lam=lam)
    returns = [a + np.asarray(v) for a, v in zip(advantages, predicted, strict=True)]
    flat, flat_returns = np.concatenate(advantages), np.concatenate(returns)
    mean, std = flat.mean(), flat.std()
    credited = []
    for s, own, target, value in zip(sequences, advantages, returns, predicted, strict=True):
        whitened = (own - mean) / (std + 1e-8) if std > 0 else np.zeros_like(own)
        credited.append(
            replace(
                s,
                advantage=float(whitened.mean()),
                token_advantages=tuple(whitened.tolist()),
                returns=tuple(target.tolist()),
                values=tuple(value),
            )
        )
    spread = flat_returns.var()
    metrics = {
        "value_mean": float(np.concatenate(predicted).mean()),
        "return_mean": float(flat_returns.mean()),
    }
    if spread > 0:  # λ-returns contain the values: what they explain of them is flattered, except at λ = 1
        metrics["value_explained_variance"] = float(1 - flat.var() / spread)
    return credited, metrics
