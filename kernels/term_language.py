"""The functions of `triton.language` that traced terms use, in torch: it runs their source without a GPU.

Only values are the same: `tl.minimum` drops NaN as Triton's does, and numbers are float32.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_ibpo.kernels.term_tables import IMPORTS

__all__ = ["run_source"]


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
