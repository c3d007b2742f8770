"""Methods judged on the records of a frozen policy: signal S, noise V, cost C and efficiency S²/(V·C).

A method is a vector of coefficients on recorded gradients, computed by the credit code of training.
Everything is relative to the baseline on the same prompts. V is the variance of a prompt's contribution in
the Fisher norm of plain prompts, which is the KL divergence that noise causes there. Noise that acts behind
comparing prompts only counts for nothing. At equal expense S²/(V·C) is proportional to the squared ratio of
signal to noise of a step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from frozen_policy import Contender
from gradient_records import METRICS, PromptRecord, credit_of_records
from scipy import stats
from sequence_gradients import query_of

from megatron_ibpo.basics.records import Group, TrainSequence
from megatron_ibpo.models import ModelShape
from megatron_ibpo.run.cost import CostMeter

Array = npt.NDArray[np.float64]
CURRENCIES = ("free", "charged", "decoding")
"""Ways to count operations. "free": sequences without advantage need no update, as in this trainer.
"charged": every sequence is updated on. "decoding": the same, and a written token costs ten times as much."""
STEP_PROMPTS = 16
"""Prompts whose credit is assigned together, as in a step of training. What an operator remembers goes from
one step to the next."""


@dataclass(frozen=True, eq=False)
class Measures:
    """What a method does at each of N prompts."""

    signal: Array
    """[metrics, N, blocks] product of the contribution to the update with g*."""
    projections: Array
    """[metrics, N, scores] its products with scores of plain responses."""
    squared_norm: Array
    """[N] of the contribution, in Euclid's norm."""
    cost: Array
    """[currencies, N] operations."""

    def only(self, places: npt.NDArray[np.intp]) -> "Measures":
        """Return the measures at some of the prompts."""
        return Measures(
            self.signal[:, places],
            self.projections[:, places],
            self.squared_norm[places],
            self.cost[:, places],
        )


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval: jackknife over prompts and over blocks of g*, Student's t."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Verdict:
    """A method relative to the baseline."""

    signal: Interval
    noise: Interval
    euclidean_noise: Interval
    """E‖contribution‖², which also counts what happens on comparing prompts only."""
    cosine: Interval
    """Of the mean contribution with g*, both as they act on plain prompts (Fisher norm); not relative."""
    cost: dict[str, float]
    efficiency: dict[str, Interval]


def measure(contender: Contender, records: Sequence[PromptRecord]) -> Measures:
    """Return what a method does at the recorded prompts.

    Raises:
        ValueError: it needs a sample or a gradient that was not recorded.
    """
    signal, projections, norms, costs = [], [], [], []
    for first in range(0, len(records), STEP_PROMPTS):
        step = records[first : first + STEP_PROMPTS]
        groups, credit = credit_of_records(contender, step)
        contender = replace(contender, context=replace(contender.context, memory=credit.memory))
        for place, (record, group) in enumerate(zip(step, groups, strict=True)):
            sequences = [sequence for sequence in credit.sequences if sequence.group == place]
            coefficients = np.zeros(len(record.gram))
            for query, coefficient in map(query_of, sequences):
                if coefficient:
                    coefficients[record.row(query)] += coefficient * len(step)
            signal.append(np.einsum("n,mnb->mb", coefficients, record.star))
            projections.append(np.einsum("n,mns->ms", coefficients, record.scores))
            norms.append(coefficients @ record.gram @ coefficients)
            costs.append(prices(contender.shape, group, sequences))
    return Measures(
        np.stack(signal, axis=1), np.stack(projections, axis=1), np.array(norms), np.stack(costs, axis=1)
    )


def prices(shape: ModelShape, group: Group, sequences: Sequence[TrainSequence]) -> Array:
    """Return the operations of a group in each of `CURRENCIES`."""
    sampled, free, charged = (CostMeter(shape, accelerators=1) for _ in range(3))
    sampled.sampling(group.samples)
    free.training((), [sequence.num_tokens for sequence in sequences if sequence.has_advantage])
    charged.training((), [sequence.num_tokens for sequence in sequences])
    sampling, all_updates = sampled.spent.flops, charged.spent.flops
    dear = sampling + 9 * sampled.spent.flops_decoding
    return np.array([sampling + free.spent.flops, sampling + all_updates, dear + all_updates])


def judge(method: Measures, baseline: Measures, star_scores: Array, metric: str = "adam") -> Verdict:
    """Compare a method with the baseline on the same prompts.

    Args:
        star_scores: [blocks, scores] products of g* with the scores.
        metric: one of METRICS.
    """
    row = METRICS.index(metric)

    def interval(statistic: Callable[["_Moments", "_Moments"], Array]) -> Interval:
        points, prompts, blocks = (
            statistic(moments, base)
            for moments, base in zip(_moments(method, row), _moments(baseline, row), strict=True)
        )
        return _jackknifed(float(points[0]), [prompts, blocks])

    def efficiency(currency: int) -> Interval:
        def ratio(moments: _Moments, base: _Moments) -> Array:
            signal, price = moments.signal / base.signal, moments.cost[currency] / base.cost[currency]
            return signal * abs(signal) * base.noise / moments.noise / price

        return interval(ratio)

    return Verdict(
        signal=interval(lambda moments, base: moments.signal / base.signal),
        noise=interval(lambda moments, base: moments.noise / base.noise),
        euclidean_noise=interval(lambda moments, base: moments.squared_norm / base.squared_norm),
        cosine=_cosine(method.projections[0], star_scores),
        cost={
            name: float(method.cost[place].mean() / baseline.cost[place].mean())
            for place, name in enumerate(CURRENCIES)
        },
        efficiency={name: efficiency(place) for place, name in enumerate(CURRENCIES)},
    )


# --------------------------------------------------------------------------------------------- intervals


@dataclass(frozen=True, eq=False)
class _Moments:
    """Means over all prompts and blocks ([1]), or without each of them ([prompts] or [blocks])."""

    signal: Array
    noise: Array
    squared_norm: Array
    cost: Array
    """[currencies, …]"""


def _moments(measures: Measures, row: int) -> tuple[_Moments, _Moments, _Moments]:
    """Return the moments over all, without each prompt, and without each block of g*."""
    signal, projections = measures.signal[row], measures.projections[row]
    ones = np.ones(signal.shape[1])
    noise = projections.var(axis=0, ddof=1).mean(keepdims=True)
    norm, cost = measures.squared_norm.mean(keepdims=True), measures.cost.mean(axis=1, keepdims=True)
    return (
        _Moments(np.array([signal.mean()]), noise, norm, cost),
        _Moments(
            without_each(signal.mean(axis=1)),
            _variances_without_each(projections),
            without_each(measures.squared_norm),
            without_each(measures.cost.T).T,
        ),
        _Moments(without_each(signal.mean(axis=0)), noise * ones, norm * ones, cost * ones),
    )


def without_each(values: Array) -> Array:
    """Return the means over the first axis without each of its entries."""
    return (values.sum(axis=0) - values) / (len(values) - 1)


def _variances_without_each(values: Array) -> Array:
    """Return [N], from [N, K]: the variance over N without each entry, averaged over K."""
    rest = len(values) - 1
    first, second = values.sum(axis=0) - values, (values**2).sum(axis=0) - values**2
    return ((second - first**2 / rest) / (rest - 1)).mean(axis=1)


def _cosine(projections: Array, star_scores: Array) -> Interval:
    """Return the cosine of the mean contribution with g*. Squared lengths leave out the products of an entry
    with itself, which are noise."""
    mean, star = projections.mean(axis=0), star_scores.mean(axis=0)
    lengths = _squared_mean(projections), _squared_mean(star_scores)
    prompts = without_each(projections) @ star, _squared_mean_without_each(projections) * lengths[1]
    blocks = without_each(star_scores) @ mean, _squared_mean_without_each(star_scores) * lengths[0]
    point = _over_root(np.array(mean @ star), np.array(lengths[0] * lengths[1]))
    return _jackknifed(float(point), [_over_root(*prompts), _over_root(*blocks)])


def _over_root(product: Array, squared: Array) -> Array:
    return product / np.sqrt(np.where(squared > 0, squared, np.nan))


def _squared_mean(values: Array) -> float:
    """Return an unbiased estimate of ‖E value‖²."""
    count = len(values)
    return float(((values.sum(axis=0) ** 2).sum() - (values**2).sum()) / (count * (count - 1)))


def _squared_mean_without_each(values: Array) -> Array:
    rest = len(values) - 1
    sums = ((values.sum(axis=0) - values) ** 2).sum(axis=1)
    squares = (values**2).sum() - (values**2).sum(axis=1)
    return (sums - squares) / (rest * (rest - 1))


def _jackknifed(point: float, replicates: Sequence[Array]) -> Interval:
    """Return a point's interval from what it is without each cluster, of several kinds of clusters. Variances
    add; the degrees of freedom are Satterthwaite's."""
    parts = [(len(values) - 1) / len(values) * ((values - values.mean()) ** 2).sum() for values in replicates]
    total = sum(parts)
    if not math.isfinite(point) or not math.isfinite(total) or total == 0:
        return Interval(point, point, point) if total == 0 else Interval(point, math.nan, math.nan)
    freedom = total**2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, replicates, strict=True)
    )
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(total)
    return Interval(point, point - half, point + half)
