"""Trial calls of a loss term at inputs of every size: in torch alone, for mistakes that no training survives,
and beside its Triton source, for value, derivative and clip.

The source runs in torch too, through stand-ins for the functions of `triton.language` that it uses.
(`tl.minimum` drops NaN as Triton's does, and numbers are float32.) The rounding of a GPU's own functions is
left to the tests that run there.
"""

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, cast

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
from megatron_ibpo.kernels.term_tables import IMPORTS
from megatron_ibpo.kernels.traced_terms import traced_source

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
    """Return inputs of every size and sign that occurs in a run, by name: [N] float32. Among them are
    log-probs of -inf, advantages of 0, ties, and log-ratios at the parameters and at the ratios 1 ±
    parameter. The last three rows have a NaN each: a log-ratio, a log-prob, an advantage."""
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
    """Return a term's results in torch, with the derivative by autograd. Raises TermError for any
    exception."""
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
    """Call a term, which may read inputs of these `names`, once. Raises TermError for wrong arguments, an
    exception in the term, results other than (value, clipped) of the inputs' shape, an input changed in
    place, a value without gradient, or NaN at ordinary inputs: torch cannot train with it."""
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
    """Refuse results other than (value, clipped), a float and a bool tensor of the inputs' shape."""
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


class _Pointer:
    """A tensor whose rows are loaded, as `pointer + row`."""

    def __init__(self, values: Tensor, row: Tensor | None = None):
        self.values, self.row = values, row

    def __add__(self, row: Tensor) -> "_Pointer":
        return _Pointer(self.values, row)


def _load(pointer: _Pointer, mask: Tensor, other: float) -> Tensor:
    assert pointer.row is not None
    return torch.where(mask, pointer.values[pointer.row], other)


def _float(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32)


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    return lambda x: function(_float(x))


def _extremum(
    with_nan: Callable[[Tensor, Tensor], Tensor], without: Callable[[Tensor, Tensor], Tensor]
) -> Callable[..., Tensor]:
    def extremum(x: Any, y: Any, propagate_nan: bool = False) -> Tensor:
        return (with_nan if propagate_nan else without)(_float(x), _float(y))

    return extremum


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp, "exp2": torch.exp2, "log": torch.log, "log2": torch.log2, "sqrt": torch.sqrt,
    "abs": torch.abs, "sin": torch.sin, "cos": torch.cos, "erf": torch.erf, "sigmoid": torch.sigmoid,
    "floor": torch.floor, "ceil": torch.ceil, "zeros_like": torch.zeros_like,
}  # fmt: skip
LANGUAGE = SimpleNamespace(
    **{name: _unary(function) for name, function in _FUNCTIONS.items()},
    minimum=_extremum(torch.minimum, torch.fmin),
    maximum=_extremum(torch.maximum, torch.fmax),
    where=lambda met, first, second: torch.where(met, first, second),
    load=_load,
    PropagateNan=SimpleNamespace(ALL=True, NONE=False),
)


def run_source(
    source: str, passed: Sequence[Tensor], loaded: Sequence[Tensor], parameters: Sequence[float]
) -> tuple[Tensor, ...]:
    """Return what the source of a traced term computes, (value, derivative, clipped), for the inputs that it
    takes, [N] float32, and those that it loads, in the order of their pointers."""
    names: dict[str, Any] = {"tl": LANGUAGE, "triton": SimpleNamespace(jit=lambda function: function)}
    exec(compile(source.replace(IMPORTS, "", 1), "<traced term>", "exec"), names)
    row = torch.arange(len(passed[0]))
    pointers, numbers = tuple(map(_Pointer, loaded)), tuple(map(_float, parameters))
    return names["term"](*passed, pointers, row, row >= 0, numbers)


LENGTHS = (1, 2, 5)
"""Numbers of rows that torch computes apart, too."""
RELATIVE, TYPICAL = 2e-5, 2e-6
"""Errors allowed: of the number itself, and of the typical number of the term."""
NEAR = 4.0
"""Largest log-ratio or log-prob of near rows, which have a typical number of their own: the numbers of far
rows are so large that errors of near ones would not show beside them."""
ROUNDING = 1.2e-7
"""Relative change of a parameter by rounding: the kernels compute `1 - eps` in float32, torch in float64."""


class Agreement(NamedTuple):
    """The agreement of a term's source with torch."""

    rows: int
    error: float
    """The largest error beyond that of torch in float32, relative to the number or the typical number."""


class Disagreement(TermError):
    """A term's source computes something else than the term."""


class _Term(NamedTuple):
    """A term at its trial inputs, as messages need it."""

    function: Any
    inputs: Mapping[str, Tensor]
    """Inputs that it reads, [N]."""
    parameters: Mapping[str, float]

    def refuse(self, result: str, wrong: Tensor, computed: Tensor, expected: Tensor) -> NoReturn:
        row = int(wrong.nonzero()[0])
        numbers = f"{computed[row].item():g}, torch {expected[row].item():g}"
        location = row_of(self.inputs, self.parameters, wrong)
        raise Disagreement(
            f"{place(self.function)}: its Triton code gives a {result} of {numbers}, at {location}"
        )


def compare_with_torch(
    function: Any, passed: Sequence[str], loaded: Sequence[str], parameters: Mapping[str, float]
) -> Agreement:
    """Compare a term's Triton source with the term in torch; arguments as `traced_source` has them. Raises
    TermError as it does, Disagreement if the two differ or a row depends on how many rows there are."""
    source = traced_source(function, passed, loaded, parameters)
    with torch.device("cpu"):
        inputs = trial_inputs(list(dict.fromkeys([*passed, *loaded])), parameters)
        loaded_values, numbers = [inputs[name] for name in loaded], [*parameters.values()]
        returned = run_source(source, [inputs[name] for name in passed], loaded_values, numbers)
        computed = TermResults(returned[0], returned[1], returned[2] if len(returned) > 2 else None)
        term = _Term(function, {name: inputs[name] for name in input_names(function)}, parameters)
        for result, dtype in zip(computed, (torch.float32, torch.float32, torch.bool), strict=True):
            if result is not None and (result.dtype, result.shape) != (dtype, inputs[passed[0]].shape):
                shape = f"{result.dtype} of shape {list(result.shape)}"
                raise Disagreement(f"{place(function)}: its Triton code returns {shape}")
        return _compare(term, computed, reads_parameters="= parameters[" in source)


def _compare(term: _Term, computed: TermResults, *, reads_parameters: bool) -> Agreement:
    single = results_in_torch(*term, torch.float32)
    _check_lengths(term, single)
    moved, exact = [], single
    with suppress(TermError):  # a term may allow whole numbers only
        for shift in (1.0 + ROUNDING, 1.0 - ROUNDING) if reads_parameters else ():
            parameters = {name: value * shift for name, value in term.parameters.items()}
            moved.append(results_in_torch(term.function, term.inputs, parameters, torch.float32))
    with suppress(TermError):  # a term may hold float32 of its own
        exact = results_in_torch(*term, torch.float64)
    references = [single, *(moved if len(moved) == 2 else ()), exact]
    errors = [
        _largest_error(term, name, getattr(computed, name), [getattr(result, name) for result in references])
        for name in ("value", "derivative")
    ]
    if single.clipped is not None and computed.clipped is not None:
        first, *between, last = (cast(Tensor, result.clipped) for result in references)
        right = (computed.clipped == first) | (computed.clipped == last)
        if between:  # else a parameter is one number of several that the term tells apart
            right |= between[0] != between[1]
        if not right.all():
            term.refuse("clip", ~right, computed.clipped, first)
    return Agreement(len(computed.value), max(errors))


def _check_lengths(term: _Term, reference: TermResults) -> None:
    start = len(reference.value) // 2  # the first log-ratios are 0
    for length in LENGTHS:
        rows = slice(start, start := start + length)
        part = {name: values[rows] for name, values in term.inputs.items()}
        value = results_in_torch(term.function, part, term.parameters, torch.float32).value
        if not torch.allclose(value, reference.value[rows], rtol=1e-5, atol=1e-6, equal_nan=True):
            because = "a row's value depends on the number of rows, or differs from call to call"
            raise Disagreement(f"{place(term.function)}: {because}")


def _largest_error(term: _Term, result: str, computed: Tensor, references: Sequence[Tensor]) -> float:
    """Return the largest error of a result beyond that of rounding. Raises Disagreement if a number is wrong.

    A result may lie between those of torch in float32, in float64 and with parameters that are rounded
    otherwise (`references`, in this order but with float64 last). Where these leave torch's own number on one
    side, no rounding of a parameter gave it: the term tells this parameter from its neighbours
    (`weight[eps]`). NaN among the inputs stays NaN in the value; where torch has NaN else, numbers of any
    size overflowed.
    """
    single, value = references[0].double(), computed.double()
    moved, exact = [reference.double() for reference in references[1:-1]], references[-1].double()
    rounding = (single - exact).abs().nan_to_num(0.0, 0.0, 0.0)
    size = single.where(single.isfinite(), exact).abs().nan_to_num(0.0, 0.0, 0.0)
    moving = next(values for name, values in term.inputs.items() if name in MOVED_BY_LOGPROB)
    near = moving.abs() <= NEAR  # far log-ratios make numbers beside which errors of others are small
    typical = torch.where(near, _typical(size[near]), _typical(size))
    allowed = RELATIVE * size + TYPICAL * typical + 4 * rounding
    bounds = torch.stack([single, exact])
    if moved:
        low, high = torch.minimum(*moved) - allowed, torch.maximum(*moved) + allowed
        passes = (low <= single) & (single <= high)
        bounds = torch.stack([single, exact, *(reference.where(passes, single) for reference in moved)])
    right = (value >= bounds.amin(0) - allowed) & (value <= bounds.amax(0) + allowed) | (value == single)
    given_nan = functools.reduce(operator.or_, (values.isnan() for values in term.inputs.values()))
    if result == "value":
        right |= single.isnan() & (value.isnan() | ~given_nan)
    else:
        right |= single.isnan() | given_nan
    if not right.all():
        term.refuse(result, ~right, computed, references[0])
    error = ((value - single).abs() - 4 * rounding) / torch.maximum(size, typical.clamp(min=1e-30))
    return max(0.0, error.nan_to_num(0.0, 0.0, 0.0).max().item())


def _typical(size: Tensor) -> Tensor:
    """Return the size of a term's larger numbers: `1 - tanh(x)**2` cancels where it is small."""
    usual = size[(size > 0) & (size < 1e6)]
    return usual.quantile(0.9) if len(usual) else size.new_zeros(())
