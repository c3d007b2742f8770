"""Calls of a user's loss term: what it returns, which operators it calls, and the line of any mistake.

No kernel is needed for these checks, nor the package triton.
"""

import functools
import inspect
import linecache
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

MOVED_BY_LOGPROB = ("log_ratio", "logprobs", "gap")
"""Inputs that change one for one with the policy's log-prob."""
MOST_OPERATORS = 500
"""Operators that a term may call to become a kernel; more are refused at the next call."""
MOST_SECONDS = 10.0
"""Processor time of one trial call; a busy machine refuses no term."""
ROWS = 7
"""Length of the inputs in trial calls."""
HARMLESS = ("dtype.__get__", "device.__get__", "ndim.__get__", "dim", "is_floating_point", "is_complex")
"""Functions of a tensor that a term may call to become a kernel: nothing here depends on data or on how
many rows a micro-batch has."""
SIZES = ("shape.__get__", "size", "numel", "nelement", "__len__", "stride", "nbytes.__get__")


class TermError(ValueError):
    """A term that cannot be computed, or not in Triton; the message names its file and line."""


def term_name(term: Any) -> str:
    """Return a term's name, for messages; a callable object has the name of its class."""
    return getattr(term, "__name__", None) or type(term).__name__


def place(term: Any) -> str:
    """Return the file and line where a term begins."""
    code = _code(term)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code else f"{term_name(term)}, in no file"


def code_owner(term: Any) -> Any:
    """Return the function or method that a partial, a decorated function or a callable object calls."""
    while isinstance(term, functools.partial):
        term = term.func
    term = inspect.unwrap(term)
    return term if inspect.isroutine(term) or not callable(term) else type(term).__call__


def _code(term: Any) -> CodeType | None:
    code = getattr(code_owner(term), "__code__", None)
    return code if isinstance(code, CodeType) else None


def located(term: Any, frames: Sequence[tuple[str, int]]) -> str:
    """Return the innermost of these (file, line number) that is in the term's file, with its text."""
    code = _code(term)
    lines = [number for file, number in frames if code and file == code.co_filename]
    if code is None or not lines:
        return place(term)
    text = linecache.getline(code.co_filename, lines[-1]).strip()
    return f"{code.co_filename}, line {lines[-1]}" + (f": `{text}`" if text else "")


def input_names(term: Any) -> tuple[str, ...]:
    """Return the names of a term's positional arguments, the inputs; TermError if they have none."""
    try:
        parameters = inspect.signature(term).parameters.values()
    except (TypeError, ValueError):
        raise TermError(
            f"{place(term)}: wanted a Python function with named arguments, is {term!r}"
        ) from None
    if several := [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]:
        raise TermError(f"{place(term)}: takes *{several[0]}; a term names each input that it reads")
    return tuple(p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD)


def call_term(term: Any, inputs: Sequence[Any], parameters: Mapping[str, Any]) -> Any:
    """Call a term. Raises TermError, with the line, for any exception, and after MOST_SECONDS."""
    try:
        with _Deadline(term):
            return term(*inputs, **parameters)
    except TermError:
        raise
    except (Exception, SystemExit) as error:
        frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
        raise TermError(f"{located(term, frames)}: {first_line(error)}") from error


class _Deadline(TorchFunctionMode):
    """End a term that loops over torch's functions without end."""

    def __init__(self, term: Any):
        super().__init__()
        self.term, self.end = term, time.thread_time() + MOST_SECONDS

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if time.thread_time() > self.end:
            raise TermError(f"{running_line(self.term)}: the term takes more than {MOST_SECONDS:g} s")
        return func(*args, **(kwargs or {}))


def first_line(error: BaseException) -> str:
    """Return an exception's kind and the first line of what it says."""
    text = str(error).strip().partition("\n")[0][:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def check_unchanged(
    term: Any, names: Sequence[str], inputs: Sequence[Tensor], originals: Sequence[Tensor]
) -> None:
    """Raise TermError for a term that has written into one of its inputs, whose values were `originals`."""
    for name, tensor, value in zip(names, inputs, originals, strict=True):
        if not torch.allclose(tensor, value, rtol=0.0, atol=0.0, equal_nan=True):
            raise TermError(
                f"{place(term)}: changes its input {name} in place, which others read; copy it first"
            )


def record_calls(term: Any, parameters: Mapping[str, Any]) -> tuple[Any, ...]:
    """Call a term on tensors, and parameters that are numbers or tensors of one, and return all operators
    that it calls, with their numbers, as a key: equal records compute the same, whatever globals, attributes
    or closures the term reads.

    Raises:
        TermError: what no kernel can do, with its line: a value of Python that depends on data or on the
            number of rows, another dtype than float32 and bool, another shape, a sum over rows, random
            numbers, an input changed in place, a derivative that is not made of torch's operators, or too
            many operators.
    """
    names = input_names(term)
    with ExitStack() as stack:
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.enable_grad())
        leaves = [torch.linspace(-1.5, 1.5, ROWS, requires_grad=True) for _ in names]
        inputs = [leaf + 0.0 for leaf in leaves]  # as in training no leaves: those cannot be changed in place
        stack.enter_context(_Reads(term))
        record = stack.enter_context(_Record(term, inputs, [*parameters.values()]))
        returned = call_term(term, inputs, parameters)
    check_unchanged(term, names, inputs, leaves)
    results = returned if isinstance(returned, tuple) else (returned,)
    for tensor in results:
        if not isinstance(tensor, Tensor) or tensor.shape != inputs[0].shape:
            kind = f"shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TermError(f"{place(term)}: returns {kind}, wanted tensors of its inputs' shape")
        _check_derivative(term, tensor)
    return (*record.calls, *map(record.reference, results))


def _check_derivative(term: Any, tensor: Tensor) -> None:
    waiting, visited = [tensor.grad_fn], set()
    while waiting:
        if (node := waiting.pop()) is None or node in visited:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            raise TermError(
                f"{place(term)}: it cannot be a kernel: {type(node).__name__} is the derivative of a "
                "torch.autograd.Function, not of torch's operators"
            )
        visited.add(node)
        waiting += [following for following, _ in node.next_functions]


def running_line(term: Any) -> str:
    """Return the line of the term that is running."""
    frames, frame = [], cast(FrameType | None, sys._getframe(1))
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return located(term, frames[::-1])


class _Reads(TorchFunctionMode):
    """Refuse values of Python that a term makes of tensors."""

    def __init__(self, term: Any):
        super().__init__()
        self.term = term

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = (
            result if isinstance(result, tuple | list) and not isinstance(result, torch.Size) else (result,)
        )
        if all(tensor is None or isinstance(tensor, Tensor) for tensor in tensors):
            return result
        name = (resolve_name(func) or getattr(func, "__name__", "")).removeprefix("torch.")
        if name.removeprefix("Tensor.") in HARMLESS:
            return result
        because = "gives a value of Python, which may be data-dependent"
        if name.removeprefix("Tensor.") in SIZES:
            because = "gives the number of rows, which differs between micro-batches"
        raise TermError(f"{running_line(self.term)}: it cannot be a kernel: {name} {because}")


class _Record(TorchDispatchMode):
    """The operators that a term calls."""

    def __init__(self, term: Any, inputs: Sequence[Tensor], parameters: Sequence[Any]):
        super().__init__()
        self.term, self.calls, self.constants = term, cast(list[Any], []), cast(set[int], set())
        self.tensors = [*inputs, *(p for p in parameters if isinstance(p, Tensor))]
        self.places = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        self.inputs = {id(tensor) for tensor in self.tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(self.calls) >= MOST_OPERATORS:
            self._refuse(func, f"is one of more than {MOST_OPERATORS} operators of the term")
        kwargs = kwargs or {}
        tensor_arguments = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if func._schema.is_mutable and tensor_arguments and id(tensor_arguments[0]) in self.inputs:
            self._refuse(func, "changes an input in place")
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._refuse(func, "draws random numbers")
        result = func(*args, **kwargs)
        call = (str(func), torch.is_grad_enabled(), self.described(args), self.described([*kwargs.items()]))
        self.calls.append(call)
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._check(func, tensor, tensor_arguments)
                self.places[id(tensor)] = len(self.tensors)
                self.tensors.append(tensor)
        return result

    def _refuse(self, func: Any, because: str) -> None:
        raise TermError(f"{running_line(self.term)}: it cannot be a kernel: {func} {because}")

    def _check(self, func: Any, result: Tensor, tensor_arguments: Sequence[Tensor]) -> None:
        read = () if str(func).startswith("aten.new_") else tensor_arguments  # that takes a dtype alone
        fixed = result.dim() == 0 and all(id(t) in self.constants or id(t) not in self.places for t in read)
        if fixed:
            self.constants.add(id(result))
        elif result.dtype not in (torch.float32, torch.bool):
            self._refuse(func, f"makes a tensor of {result.dtype}; kernels have float32 and bool")
        elif result.dim() and result.shape != (ROWS,):
            self._refuse(func, "makes a tensor of another shape; kernels have one number per row")
        elif not result.dim() and any(tensor.dim() for tensor in tensor_arguments):
            self._refuse(func, "is data-dependent: it makes one number of all rows, and kernels see one row")

    def reference(self, tensor: Tensor) -> Any:
        """Return which tensor of the record this is, or its content if it comes from outside."""
        if id(tensor) in self.places:
            return self.places[id(tensor)]
        if tensor.numel() > 1:
            raise TermError(
                f"{running_line(self.term)}: it cannot be a kernel: it reads a tensor that is not an input"
            )
        return ("constant", str(tensor.dtype), repr(tensor.tolist()))

    def described(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.reference(value)
        if isinstance(value, tuple | list):
            return tuple(map(self.described, value))
        return (type(value).__name__, repr(value))
