"""Trial calls of a loss term in torch, at inputs of every size: mistakes that no training survives."""

import functools
import inspect
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ibpo.kernels.term_calls import (
    MOVED_BY_LOGPROB,
    TermError,
    call_term,
    check_unchanged,
    first_line,
    input_names,
    place,
)

__all__ = ["TermResults", "check_call", "results_in_torch", "row_of", "trial_inputs"]

ORDINARY = 1.0
"""Log-ratios up to this size occur in every run: a term must be a number there."""
LOG_RATIOS = (
    0.0, 1e-7, -1e-7, 1e-4, -3e-4, 1e-3, 0.02, -0.02, 0.1, -0.1, 0.2, -0.2, 0.4, -0.4, 0.5, -0.5, 1.0, -1.0,
    2.5, -2.5, 3.0, -3.0, 7.0, -7.0, 20.0, -20.0, 79.9, 80.0, 80.1, -80.1, 1e3, -1e4,
    float("inf"), -float("inf"),
)  # fmt: skip
ADVANTAGES = (1.0, -1.0, 0.7, -1.3, 0.5, -0.5, 3.0, -2.0, 0.0)
RANDOM_ROWS = 200


class TermResults(NamedTuple):
    """Results of a term at each row, [N]."""

    value: Tensor
    derivative: Tensor
    """Derivative by the policy's log-prob."""
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
    even = torch.linspace(-4.0, 4.0, RANDOM_ROWS)  # numbers of the term's own lie there
    log_ratio = torch.cat([first, spread, even, torch.zeros(3)])

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(len(log_ratio), generator=generator)

    ties = torch.arange(len(log_ratio)) % 7 == 3  # of a log-ratio and an advantage
    advantages = torch.cat([advantages, torch.randn(2 * RANDOM_ROWS + 3, generator=generator)])
    inputs = {
        "log_ratio": log_ratio,
        "gap": log_ratio,
        "logprobs": torch.where(uniform(0, 1) < 0.05, -1e-7, uniform(-12.0, 0.0)),
        "advantages": torch.where(ties & (log_ratio.abs() <= 3.0), log_ratio, advantages),
        "lengths": uniform(1, 4000).floor(),
        "positions": uniform(0, 4000).floor(),
        "entropy": torch.where(uniform(0, 1) < 0.1, 0.0, uniform(0, 9.0)),
        "ref_logprobs": uniform(-12.0, 0.0),
        "rollout_logprobs": uniform(-12.0, 0.0),
    }
    inputs["logprobs"][log_ratio == -torch.inf] = -torch.inf
    inputs["log_ratio"][-3] = inputs["logprobs"][-2] = inputs["advantages"][-1] = torch.nan
    return {name: inputs[name] for name in names}


def results_in_torch(
    term: Any, inputs: Mapping[str, Tensor], parameters: Mapping[str, float], dtype: torch.dtype
) -> TermResults:
    """Return a term's results in torch, with the derivative by autograd.

    Raises:
        TermError: any exception in the term, or in its derivative.
    """
    read = input_names(term)
    leaves = {name: inputs[name].to(dtype, copy=True) for name in read}
    moving = [leaves[name].requires_grad_() for name in read if name in MOVED_BY_LOGPROB]
    passed = [leaf + 0.0 for leaf in leaves.values()]  # as in training no leaves
    with torch.enable_grad():
        returned = call_term(term, passed, parameters)
        check_unchanged(term, read, passed, [inputs[name].to(dtype) for name in read])
        value, clipped = returned if isinstance(returned, tuple) else (returned, None)
        try:
            slopes = torch.autograd.grad(value.sum(), moving, allow_unused=True, materialize_grads=True)
        except Exception as error:
            raise TermError(f"{place(term)}: it cannot be differentiated: {first_line(error)}") from error
    return TermResults(value.detach(), functools.reduce(operator.add, slopes), clipped)


def row_of(inputs: Mapping[str, Tensor], parameters: Mapping[str, float], chosen: Tensor) -> str:
    """Return the inputs of the first chosen row, as text."""
    row = int(chosen.nonzero()[0])
    numbers = {name: values[row].item() for name, values in inputs.items()} | dict(parameters)
    return ", ".join(f"{name} {number:g}" for name, number in numbers.items())


def check_call(term: Any, names: Sequence[str], parameters: Mapping[str, float]) -> None:
    """Refuse a term that torch cannot train with: call it once.

    Args:
        names: inputs that the term may read.

    Raises:
        TermError: wrong arguments, an exception in the term, results other than (value, clipped) of the
            inputs' shape, an input changed in place, a value without gradient, or NaN at ordinary inputs.
    """
    _check_arguments(term, names, parameters)
    read = input_names(term)
    if not any(name in MOVED_BY_LOGPROB for name in read):
        allowed = ", ".join(name for name in names if name in MOVED_BY_LOGPROB)
        raise TermError(f"{place(term)}: the term reads none of {allowed}: it has no gradient")
    with torch.device("cpu"), torch.enable_grad():
        every = trial_inputs(names, parameters)
        ordinary = every["log_ratio"].abs() <= ORDINARY
        ordinary &= every["advantages"] != 0  # those have no loss
        ordinary &= functools.reduce(operator.and_, (values.isfinite() for values in every.values()))
        inputs = {name: every[name][ordinary] for name in read}
        passed = [inputs[name].clone().requires_grad_(name in MOVED_BY_LOGPROB) + 0.0 for name in read]
        returned = call_term(term, passed, parameters)
        _check_results(term, returned, passed[0])
        if not returned[0].requires_grad:
            raise TermError(f"{place(term)}: the value has no gradient: it does not depend on the log-prob")
        results = results_in_torch(term, inputs, parameters, torch.float32)
    for result, values in (("value", results.value), ("derivative", results.derivative)):
        if values.isnan().any():
            raise TermError(
                f"{place(term)}: the term's {result} is NaN at {row_of(inputs, {}, values.isnan())}"
            )


def _check_arguments(term: Any, names: Sequence[str], parameters: Mapping[str, float]) -> None:
    input_names(term)
    arguments = inspect.signature(term).parameters.values()
    takes_any = any(argument.kind is argument.VAR_KEYWORD for argument in arguments)
    named = {argument.name: argument for argument in arguments if argument.kind is argument.KEYWORD_ONLY}
    for name, argument in named.items():
        if name in names:
            raise TermError(f"{place(term)}: {name} is an input; inputs come before the *")
        if name not in parameters and argument.default is argument.empty:
            raise TermError(f"{place(term)}: the variant's params lack {name!r}, which the term takes")
    if unknown := [name for name in parameters if name not in named and not takes_any]:
        raise TermError(f"{place(term)}: the term takes no {unknown[0]!r}, which is in the variant's params")


def _check_results(term: Any, returned: Any, like: Tensor) -> None:
    """Refuse results other than (value, clipped), a float and a bool tensor of the inputs' shape.

    Raises:
        TermError: says what was returned.
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        kind = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
        raise TermError(f"{place(term)}: returns {kind}, wanted two tensors, (value, clipped)")
    for result, tensor in zip(("value", "clipped"), returned, strict=True):
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise TermError(f"{place(term)}: returns {result} of type {kind}, wanted a tensor")
        if tensor.shape != like.shape:
            shape = f"{list(tensor.shape)}, wanted {list(like.shape)}, that of its inputs"
            raise TermError(f"{place(term)}: returns {result} of shape {shape}")
        right = tensor.is_floating_point() if result == "value" else tensor.dtype == torch.bool
        if not right:
            expected = "float" if result == "value" else "bool"
            raise TermError(f"{place(term)}: returns {result} of {tensor.dtype}, wanted {expected}")
