"""Advantages of tokens by an estimator that reads a critic's values, such as generalised advantage estimation
(arXiv 1506.02438, eq. 16)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np

from megatron_ibpo.basics.records import Flags, TrainSequence, Weights
from megatron_ibpo.config import UNIT
from megatron_ibpo.credit.estimators import ValueEstimator
from megatron_ibpo.credit.explanation import MINUS, Line, SampleKey, number
from megatron_ibpo.credit.operator import CreditContext, require_tool


def value_credit(
    sequences: Sequence[TrainSequence], estimator: ValueEstimator, context: CreditContext
) -> tuple[list[TrainSequence], dict[str, float], dict[SampleKey, list[Line]]]:
    """Return (the sequences with token advantages, returns and values; metrics; lines for readers). Tokens
    that the policy did not write are skipped: the value after a token is that before the next one it wrote.
    Raises ValueError if the context has no critic, or the estimator does not give one finite number per
    token."""
    if not sequences:
        return [], {}, {}
    predicted = require_tool(context.values, "a critic")(list(sequences))
    # convert to float64 before any sum
    values = [v[s.loss_mask].astype(np.float64) for v, s in zip(predicted, sequences, strict=True)]
    lengths = [len(v) for v in values]
    of_estimator = estimator.of_values(sequences, values)
    advantages, returns = (_checked(arrays, lengths) for arrays in of_estimator)
    credited = [
        replace(
            s,
            advantage=float(advantages[i].mean()),
            token_advantages=_spread(advantages[i], s.loss_mask),
            returns=_spread(returns[i], s.loss_mask),
            values=predicted[i],
        )
        for i, s in enumerate(sequences)
    ]
    flat_values, flat_returns = np.concatenate(values), np.concatenate(returns)
    explain = getattr(estimator, "explain_values", lambda _: "what the estimator gave")
    note = f"mean over its tokens of {explain(flat_returns - flat_values)}"
    lines: dict[SampleKey, list[Line]] = {
        (s.group, s.kind, s.index): [Line("advantage", s.advantage, note=note)] for s in credited
    }
    return credited, _metrics(flat_values, flat_returns), lines


def _metrics(values: Weights, returns: Weights) -> dict[str, float]:
    metrics = {"value_mean": float(values.mean()), "return_mean": float(returns.mean())}
    if (variance := returns.var()) > 0:  # λ-returns contain the values, so this is too high except at λ = 1
        metrics["value_explained_variance"] = float(1 - (returns - values).var() / variance)
    return metrics


def _checked(arrays: Sequence[Weights], lengths: Sequence[int]) -> list[Weights]:
    """Return what the estimator gave for each sequence, one finite number per token."""
    checked = [np.asarray(array, np.float64) for array in arrays]
    shapes = [array.shape for array in checked]
    if shapes != [(length,) for length in lengths] or not all(np.isfinite(array).all() for array in checked):
        raise ValueError(
            f"the estimator --advantages returned arrays of shapes {shapes} for sequences of {list(lengths)} "
            "tokens of the policy; it must return one finite number per token, as an advantage and as a "
            "target of the critic"
        )
    return checked


def _spread(values: Weights, loss_mask: Flags) -> Weights:
    """Spread values of trained tokens over all tokens of a response, with 0 at the others."""
    out = np.zeros(len(loss_mask))
    out[loss_mask] = values
    return out


@dataclass(frozen=True)
class Critic:
    """The estimator of PPO (`estimators.ValueEstimator`)."""

    gae_gamma: Annotated[float, UNIT] = 1.0
    """γ of generalised advantage estimation. 1: only the end is rewarded, and it should not count less for a
    long response."""
    gae_lambda: Annotated[float, UNIT] = 0.95
    """λ of generalised advantage estimation: 0 uses the critic's next value, 1 the reward."""

    needs_critic: ClassVar[bool] = True

    def of_values(
        self, sequences: Sequence[TrainSequence], values: Sequence[Weights]
    ) -> tuple[list[Weights], list[Weights]]:
        """Return (advantages, returns). Advantages are scaled to mean 0 and population std 1 over all trained
        tokens of the step; the return of a token is its unscaled advantage plus its value."""
        rewards = [sequence.reward for sequence in sequences if sequence.reward is not None]
        advantages = generalised_advantages(values, rewards, gamma=self.gae_gamma, lam=self.gae_lambda)
        flat = np.concatenate(advantages)
        mean, std = flat.mean(), flat.std()
        scaled = [(a - mean) / (std + 1e-8) if std > 0 else np.zeros_like(a) for a in advantages]
        return scaled, [a + v for a, v in zip(advantages, values, strict=True)]

    def explain_values(self, unscaled: Weights) -> str:
        """Return the advantage of a token in words. `unscaled`: return minus value of every trained token of
        the step."""
        scaled = (
            f"(A_t {MINUS} {number(unscaled.mean())}) / {number(unscaled.std())}, over all tokens of the step"
        )
        factors = f"γ = {number(self.gae_gamma)} and λ = {number(self.gae_lambda)}"
        return f"{scaled}; A_t by GAE with {factors} from the critic's values"


def generalised_advantages(
    values: Sequence[Weights], rewards: Sequence[float], *, gamma: float, lam: float
) -> list[Weights]:
    """Return A_t = Σ_k (γλ)^k δ_{t+k} of every token of every response, δ_t = γ V_{t+1} - V_t; at the last
    token the reward replaces γ V, also of a truncated response. No response is empty."""
    from scipy.signal import lfilter  # takes half a second; only a critic needs it

    deltas = [np.append(gamma * v[1:], reward) - v for v, reward in zip(values, rewards, strict=True)]
    return [lfilter([1.0], [1.0, -gamma * lam], delta[::-1])[::-1] for delta in deltas]
