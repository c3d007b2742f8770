"""A comparison of a term's Triton source with the term in torch: value, derivative and clip.

The source runs in torch, through stand-ins for the functions of `triton.language` that it uses, so that it
needs no GPU and no Triton. (`tl.minimum` drops NaN as Triton's does, and numbers are float32.) The rounding
of a GPU's own functions is left to the tests that run there.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from megatron_ibpo.kernels.term_calls import MOVED_BY_LOGPROB, TermError, input_names, place
from megatron_ibpo.kernels.term_tables import IMPORTS
from megatron_ibpo.kernels.term_trials import TermResults, results_in_torch, row_of, trial_inputs
from megatron_ibpo.kernels.traced_terms import traced_source

__all__ = ["Agreement", "Disagreement", "compare_with_torch", "run_source"]


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
    """Return what the source of a traced term computes: (value, derivative, clipped).

    Args:
        passed: the inputs that it takes, [N] float32 tensors.
        loaded: the inputs that it loads, in the order of their pointers.
    """
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
"""Log-ratios and log-probs up to this size have a typical number of their own."""
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
    """Compare a term's Triton source with the term in torch. Arguments as `traced_source` has them.

    Raises:
        TermError: as `traced_source`, or an exception in the term.
        Disagreement: the two differ, or a row depends on how many rows there are.
    """
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
    """Return the largest error of a result.

    It may lie between those of torch in float32, in float64 and with parameters that are rounded otherwise.
    Where these leave torch's own number on one side, no rounding of a parameter gave it: the term tells this
    parameter from its neighbours (`weight[eps]`). NaN among the inputs stays NaN in the value; where torch
    has NaN else, numbers of any size overflowed.

    Args:
        references: in float32; twice with other parameters, or not; in float64.

    Raises:
        Disagreement: an error that rounding does not explain.
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
