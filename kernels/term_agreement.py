"""A comparison of the source that a term became with the term: value, derivative and clip.

The source runs in torch (`term_language.py`), so that it needs no GPU and no Triton. What a GPU's own functions round
otherwise is for the tests that run there.
"""

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ibpo.kernels.term_calls import MOVED_BY_LOGPROB, TermError, call_term, input_names, place
from megatron_ibpo.kernels.term_language import run_source
from megatron_ibpo.kernels.traced_terms import traced_source

__all__ = ["Agreement", "compare_with_torch", "trial_inputs"]

LENGTHS = (1, 2, 5)
"""Numbers of rows that torch computes apart from the rest, besides all rows at once."""
RELATIVE, TYPICAL = 2e-5, 2e-6
"""Errors allowed: of the number itself, and of the typical number of the term."""
ORDINARY = 1.0
"""Log-ratios up to this size occur in every run: a term must be a number there."""
LOG_RATIOS = (
    0.0, 1e-7, -1e-7, 1e-4, -3e-4, 1e-3, 0.02, -0.02, 0.1, -0.1, 0.2, -0.2, 0.4, -0.4, 0.5, -0.5, 1.0, -1.0,
    2.5, -2.5, 3.0, -3.0, 7.0, -7.0, 20.0, -20.0, 79.9, 80.0, 80.1, -80.1, 1e3, -1e4, float("inf"), -float("inf"),
)  # fmt: skip
ADVANTAGES = (1.0, -1.0, 0.7, -1.3, 0.5, -0.5, 3.0, -2.0, 0.0)
RANDOM_ROWS = 200


class Agreement(NamedTuple):
    """How well a term's source agrees with torch."""

    rows: int
    error: float
    """The largest error, in units of the number or, where it is larger, the typical number of the term."""


class _Results(NamedTuple):
    value: Tensor
    derivative: Tensor
    clipped: Tensor | None


def trial_inputs(names: Sequence[str], parameters: Mapping[str, float]) -> dict[str, Tensor]:
    """Return inputs of every size and sign that occurs in a run, by name: [N] float32.

    Among them are log-probs of -inf, advantages of 0, ties between inputs, and log-ratios at the parameters
    and at the ratios 1 ± parameter. The last three rows have a log-ratio, a log-prob or an advantage of NaN.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    bounds = [sign * value for value in parameters.values() for sign in (1.0, -1.0)]
    ratios = [torch.tensor(1.0 + bound).log().item() for bound in bounds if bound > -1.0]
    pairs = [*itertools.product([*LOG_RATIOS, *bounds, *ratios], ADVANTAGES)]
    first, advantages = (torch.tensor(column) for column in zip(*pairs, strict=True))
    spread = torch.randn(RANDOM_ROWS, generator=generator) * torch.logspace(-6, 1, RANDOM_ROWS)
    log_ratio = torch.cat([first, spread, torch.zeros(3)])
    size = len(log_ratio)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(size, generator=generator)

    ties = torch.arange(size) % 7 == 3  # of a log-ratio and an advantage
    ordinary = log_ratio.abs() <= 3.0
    advantages = torch.cat([advantages, torch.randn(RANDOM_ROWS + 3, generator=generator)])
    inputs = {
        "log_ratio": log_ratio,
        "gap": log_ratio,
        "logprobs": torch.where(uniform(0, 1) < 0.05, -1e-7, uniform(-12.0, 0.0)),
        "advantages": torch.where(ties & ordinary, log_ratio, advantages),
        "lengths": uniform(1, 4000).floor(),
        "positions": uniform(0, 4000).floor(),
        "entropy": torch.where(uniform(0, 1) < 0.1, 0.0, uniform(0, 9.0)),
        "ref_logprobs": uniform(-12.0, 0.0),
        "rollout_logprobs": uniform(-12.0, 0.0),
    }
    inputs["logprobs"][log_ratio == -torch.inf] = -torch.inf
    inputs["log_ratio"][-3] = inputs["logprobs"][-2] = inputs["advantages"][-1] = torch.nan
    return {name: inputs[name] for name in names}


def compare_with_torch(
    term: Any, given: Sequence[str], others: Sequence[str], parameters: Mapping[str, float]
) -> Agreement:
    """Compare what a term was written out as with the term in torch.

    Arguments as `traced_source` has them.

    Raises:
        TermError: as `traced_source`; the two differ; the term is no number at ordinary inputs, or depends on
            how many rows there are.
    """
    source = traced_source(term, given, others, parameters)
    inputs = trial_inputs(list(dict.fromkeys([*given, *others])), parameters)
    found = _Results(*(*run_source(source, [inputs[n] for n in given], [inputs[n] for n in others],
                                   [*parameters.values()]), None)[:3])  # fmt: skip
    single = _in_torch(term, inputs, parameters, torch.float32)
    nudged = [
        {name: value * (1.0 + shift) for name, value in parameters.items()} for shift in (1.2e-7, -1.2e-7)
    ]
    references = [single, *(_in_torch(term, inputs, moved, torch.float32) for moved in nudged if parameters)]
    exact = _in_torch(term, inputs, parameters, torch.float64)
    _check_lengths(term, inputs, parameters, single)
    _check_numbers(term, inputs, single)
    errors = [
        _compare(term, what, inputs, parameters, getattr(found, what), [getattr(r, what) for r in references],
                 getattr(exact, what))
        for what in ("value", "derivative")
    ]  # fmt: skip
    if single.clipped is not None:
        assert found.clipped is not None
        clips = torch.stack([r.clipped for r in (*references, exact) if r.clipped is not None])
        wrong = ~(clips == found.clipped).any(0)
        if wrong.any():
            _refuse(term, "clip", inputs, parameters, wrong, found.clipped, single.clipped)
    return Agreement(len(found.value), max(errors))


def _in_torch(
    term: Any, inputs: Mapping[str, Tensor], parameters: Mapping[str, float], dtype: torch.dtype
) -> _Results:
    """Return value, derivative by the log-prob and clip as autograd gives them."""
    read = input_names(term)
    leaves = {name: inputs[name].to(dtype, copy=True) for name in read}
    moving = [leaves[name].requires_grad_() for name in read if name in MOVED_BY_LOGPROB]
    with torch.enable_grad():
        found = call_term(term, [leaf + 0.0 for leaf in leaves.values()], parameters)
        value, clipped = found if isinstance(found, tuple) else (found, None)
        slopes = torch.autograd.grad(value.sum(), moving, allow_unused=True) if value.requires_grad else ()
    zero = torch.zeros_like(value)
    slope = functools.reduce(operator.add, (zero if one is None else one for one in slopes), zero)
    return _Results(value.detach(), slope, clipped)


def _check_lengths(
    term: Any, inputs: Mapping[str, Tensor], parameters: Mapping[str, float], whole: _Results
) -> None:
    start = 0
    for length in LENGTHS:
        part = {name: values[start : start + length] for name, values in inputs.items()}
        found = _in_torch(term, part, parameters, torch.float32)
        same = torch.allclose(
            found.value, whole.value[start : start + length], rtol=1e-5, atol=1e-6, equal_nan=True
        )
        if not same:
            raise TermError(
                f"{place(term)}: a row's value depends on how many rows there are, or changes by itself"
            )
        start += length


def _check_numbers(term: Any, inputs: Mapping[str, Tensor], single: _Results) -> None:
    """Refuse a term that is no number where every run comes by."""
    usual = inputs["gap" if "gap" in inputs else "log_ratio"].abs() <= ORDINARY
    usual &= functools.reduce(operator.and_, (values.isfinite() for values in inputs.values()))
    if "advantages" in inputs:
        usual &= inputs["advantages"] != 0  # those have no loss
    for what in ("value", "derivative"):
        wrong = usual & getattr(single, what).isnan()
        if wrong.any():
            raise TermError(f"{place(term)}: the term's {what} in torch is NaN at {_row(inputs, {}, wrong)}")


def _compare(
    term: Any, what: str, inputs: Mapping[str, Tensor], parameters: Mapping[str, float], found: Tensor,
    references: Sequence[Tensor], exact: Tensor,
) -> float:  # fmt: skip
    """Return the largest error. Infinities have to be the same; where torch has NaN the value has it too, if
    an input has."""
    single, own = references[0].double(), found.double()
    bounds = torch.stack([reference.double() for reference in (*references, exact)])
    size = single.abs().masked_fill(~single.isfinite(), 0.0)
    nonzero = size[(size > 0) & (size < 1e6)]
    typical = nonzero.median() if len(nonzero) else torch.tensor(0.0)
    allowed = RELATIVE * size + TYPICAL * typical + 4 * (single - exact).abs().nan_to_num(0.0, 0.0, 0.0)
    within = (own >= bounds.amin(0) - allowed) & (own <= bounds.amax(0) + allowed)
    nan = functools.reduce(operator.or_, (values.isnan() for values in inputs.values()))
    missed = nan & own.isfinite() if what == "value" else torch.zeros_like(nan)
    right = torch.where(single.isnan(), ~missed, within | (own == single) | (nan & (what != "value")))
    if not right.all():
        _refuse(term, what, inputs, parameters, ~right, found, references[0])
    error = ((own - single).abs() - 4 * (single - exact).abs()) / torch.maximum(size, typical.double())
    return max(0.0, error.nan_to_num(0.0, 0.0, 0.0).max().item())


def _refuse(
    term: Any, what: str, inputs: Mapping[str, Tensor], parameters: Mapping[str, float], wrong: Tensor,
    found: Tensor, wanted: Tensor,
) -> None:  # fmt: skip
    row = int(wrong.nonzero()[0])
    raise TermError(
        f"{place(term)}: its Triton code gives a {what} of {found[row].item():g}, torch {wanted[row].item():g}, at "
        f"{_row(inputs, parameters, wrong)}"
    )


def _row(inputs: Mapping[str, Tensor], parameters: Mapping[str, float], chosen: Tensor) -> str:
    row = int(chosen.nonzero()[0])
    numbers = {name: values[row].item() for name, values in inputs.items()} | dict(parameters)
    return ", ".join(f"{name} {number:g}" for name, number in numbers.items())
