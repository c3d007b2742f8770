"""A loss term written in torch, as a Triton function with its derivative; second derivatives are not made.

`torch.func.vjp` of the term is traced into a graph of elementwise operators and written out as Triton source,
into a file of Triton's cache, so that profilers and errors show it. What a term may call is in
`term_calls.py` and `term_operators.py`.
"""

import builtins
import functools
import hashlib
import operator
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from megatron_ibpo.kernels.term_calls import (
    MOVED_BY_LOGPROB,
    TermError,
    first_line,
    input_names,
    located,
    place,
    record_calls,
    running_line,
    term_name,
)
from megatron_ibpo.kernels.term_operators import (
    Unsupported,
    Value,
    constant,
    expression,
    folded,
    operators,
    packet,
)
from megatron_ibpo.kernels.term_tables import CREATED, IMPORTS, PREAMBLE, aten

PASSED, SEQUENCE_PASSED = ("log_ratio", "logprobs", "advantages"), ("log_ratio", "lengths", "advantages")
"""Inputs that the kernels hand to token and sequence terms; token terms load others themselves."""
RESERVED = {"tl", "triton", "term", "zero", "pointers", "row", "mask", "parameters", *dir(builtins)}
RESERVED |= set(re.findall(r"def (\w+)", PREAMBLE))
"""Names of the written function's own."""
ACTIVATIONS = (aten.leaky_relu, aten.elu, aten.gelu, aten.gelu_backward, aten.hardtanh, aten.log10)
"""Operators that torch takes for basic, and that are made of others here."""
EMPTY = (aten.empty, aten.empty_permuted)
"""Operators that make memory: what is written in place of it has its shape."""
MOST_SOURCES = 256
"""Sources to remember."""
OURS = f"{__name__.partition('.')[0]}."
NUMBER = re.compile(r"\(\d[\d.e+-]*\)|float\('\w+'\)")

_sources: dict[tuple[Any, ...], str | TermError] = {}
"""Source or error for each record of a term's calls, a key that holds all numbers that the term read."""


def traced_term(
    term: Callable[..., Any], passed: Sequence[str], loaded: Sequence[str], parameters: Mapping[str, float]
) -> Any:
    """Return the `@triton.jit` function of a term: f(*passed, pointers, row, mask, parameters).

    It takes the passed inputs, fp32 tensors of one shape, and loads the others at the rows of the mask, from
    a tuple of pointers. It returns (value, derivative, clipped), or without `clipped` if the term returns its
    value alone. The derivative is that by the policy's log-prob: by those inputs of `MOVED_BY_LOGPROB` that
    the term reads.

    Parameters are read at run time, so that other values compile nothing. A term that needs them as numbers
    of Python (`if eps > 0`, `x**gamma`) is traced with their present values, and again for others; so is one
    that reads a global, an attribute or a closure that has changed.

    Args:
        term: a function of torch tensors, term(*inputs, **parameters) -> (value, clipped) or value, whose
            positional arguments are named as inputs.
        passed, loaded: names of the inputs that the function takes and loads, in order.
        parameters: its keyword arguments, in the order in which they are passed.

    Raises TermError as `record_calls` does, and for an operator that is not in the tables.
    """
    return _load(term_name(term), traced_source(term, passed, loaded, parameters))


def traced_source(
    term: Callable[..., Any], passed: Sequence[str], loaded: Sequence[str], parameters: Mapping[str, float]
) -> str:
    """Return the source of `traced_term`. Raises as it does."""
    if (getattr(term, "__module__", None) or "").startswith(OURS):
        return _source_of_ours(term, tuple(passed), tuple(loaded), tuple(parameters.items()))
    return _traced(term, passed, loaded, parameters)


@functools.cache
def _source_of_ours(
    term: Any, passed: tuple[str, ...], loaded: tuple[str, ...], parameters: tuple[tuple[str, float], ...]
) -> str:
    """Return the source of a term of this package. It reads nothing that changes, which is not looked up."""
    return _traced(term, passed, loaded, dict(parameters))


def _traced(
    term: Callable[..., Any], passed: Sequence[str], loaded: Sequence[str], parameters: Mapping[str, float]
) -> str:
    inputs = input_names(term)
    if unknown := [name for name in inputs if name not in (*passed, *loaded)]:
        raise TermError(
            f"{place(term)}: there is no input {unknown[0]!r}; there are {', '.join([*passed, *loaded])}"
        )
    if not any(name in MOVED_BY_LOGPROB for name in inputs):
        raise TermError(
            f"{place(term)}: the term reads none of {', '.join(MOVED_BY_LOGPROB)}: it has no gradient"
        )
    tensors = {name: torch.tensor(float(value), device="cpu") for name, value in parameters.items()}
    try:
        return _source_of(term, passed, loaded, tensors)
    except TermError:  # it may need numbers of Python
        if not parameters:
            raise
        return _source_of(term, passed, loaded, dict(parameters))


def _source_of(term: Any, passed: Sequence[str], loaded: Sequence[str], parameters: Mapping[str, Any]) -> str:
    """Return the source with parameters that are tensors read at run time, and others written in."""
    calls = record_calls(term, parameters)
    kinds = tuple((name, isinstance(value, Tensor)) for name, value in parameters.items())
    key = (place(term), input_names(term), calls, tuple(passed), tuple(loaded), kinds)
    if key not in _sources:
        if len(_sources) == MOST_SOURCES:
            _sources.clear()
        try:
            with torch.device("cpu"), torch.enable_grad():
                _sources[key] = _written(term, tuple(passed), tuple(loaded), parameters)
        except TermError as error:
            _sources[key] = error
    if isinstance(source := _sources[key], TermError):
        raise TermError(str(source)) from source
    return source


def _written(term: Any, passed: Sequence[str], loaded: Sequence[str], parameters: Mapping[str, Any]) -> str:
    inputs, used_names = input_names(term), set(RESERVED)
    local = {
        name: _free_name(name, used_names) for name in dict.fromkeys([*passed, *loaded, *inputs, *parameters])
    }
    body = _body(term, inputs, parameters, local, used_names)
    load = "{} = tl.load(pointers[{}] + row, mask=mask, other=0.0)"
    loads = [load.format(local[name], number) for number, name in enumerate(loaded) if name in inputs]
    numbers = [
        f"{local[name]} = parameters[{number}]"
        for number, (name, value) in enumerate(parameters.items())
        if isinstance(value, Tensor) and local[name] in body
    ]
    arguments = [local[name] for name in passed]
    lines = "\n    ".join([f"zero = tl.zeros_like({arguments[0]})", *loads, *numbers, body])
    signature = f"term({', '.join(arguments)}, pointers, row, mask, parameters)"
    comment = place(term).encode("ascii", "backslashreplace").decode().replace("\n", " ")
    return f"# {comment}, traced\n{IMPORTS}{PREAMBLE}@triton.jit\ndef {signature}:\n    {lines}\n"


def _free_name(name: str, used_names: set[str]) -> str:
    """Return this name or a longer one that is not taken, and take it."""
    name = name if name.isascii() else "named"
    while name in used_names:
        name += "_"
    used_names.add(name)
    return name


@functools.cache
def _load(name: str, source: str) -> Any:
    """Return the function of this source, from a file in Triton's cache: profilers and tracebacks show it."""
    from triton.runtime.cache import get_cache_manager

    name = re.sub(r"\W", "", name, flags=re.ASCII)[:40].strip("_") or "term"
    key, file = hashlib.sha256(source.encode()).hexdigest(), f"{name}.py"
    cache = get_cache_manager(key)
    path = cache.get_file(file) or cache.put(source.encode(), file)
    module: dict[str, Any] = {"__name__": f"loss_terms.{name}_{key}"}
    exec(compile(source, path, "exec"), module)
    return module["term"]


def _graph(
    term: Callable[..., Any], inputs: tuple[str, ...], parameters: Mapping[str, Any]
) -> fx.GraphModule:
    """Trace value, derivative and clip. Parameters that are tensors become arguments, numbers are kept."""
    moving = [number for number, name in enumerate(inputs) if name in MOVED_BY_LOGPROB]
    named = [name for name, value in parameters.items() if isinstance(value, Tensor)]

    def value_and_slope(*arguments: Tensor) -> tuple[Tensor, ...]:
        fixed, clips = list(arguments[: len(inputs)]), True
        numbers = dict(zip(named, arguments[len(inputs) :], strict=True))

        def moved(*tensors: Tensor) -> tuple[Tensor, Any]:
            nonlocal clips
            for number, tensor in zip(moving, tensors, strict=True):
                fixed[number] = tensor
            with _Lines(term):
                returned = term(*fixed, **{**parameters, **numbers})
            clips = isinstance(returned, tuple)
            return returned if clips else (returned, returned.detach())

        vjp = torch.func.vjp(moved, *(fixed[number] for number in moving), has_aux=True)
        value, pull, clipped = cast(tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]], Tensor], vjp)
        slope = functools.reduce(operator.add, pull(torch.ones_like(value)))
        return (value, slope, clipped) if clips else (value, slope)

    traced = make_fx(
        torch.func.functionalize(value_and_slope, remove="mutations_and_views"),
        decomposition_table=cast(Any, {**core_aten_decompositions(), **get_decompositions(ACTIVATIONS)}),
        tracing_mode="fake",
        _allow_non_fake_inputs=True,
    )
    try:
        with fx_traceback.preserve_node_meta():
            module = traced(*(torch.ones(3) for _ in inputs), *(parameters[name] for name in named))
    except Exception as error:  # of torch's tracing, or of the user's function under it
        frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
        raise TermError(
            f"{located(term, frames)}: the term cannot be traced ({first_line(error)})"
        ) from error
    _cancel(module.graph)
    module.graph.eliminate_dead_code()
    return module


class _Lines(TorchFunctionMode):
    """Write into each node which line of the term it comes from."""

    def __init__(self, term: Any):
        super().__init__()
        self.term = term

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        fx_traceback.set_stack_trace([running_line(self.term)])
        try:
            return func(*args, **(kwargs or {}))
        finally:
            fx_traceback.set_stack_trace([])


def _forward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that value and clip are made of; others are of the derivative alone."""
    value, _, *clip = cast(tuple[fx.Node, ...], graph.output_node().args[0])
    waiting, nodes = [value, *clip], set()
    while waiting:
        if (node := waiting.pop()) not in nodes:
            nodes.add(node)
            waiting += node.all_input_nodes
    return nodes


def _cancel(graph: fx.Graph) -> None:
    """Leave out divisions that a later factor undoes in the derivative, x / t * ... * t. Autograd makes them
    where terms scale an argument and the value by the same."""
    forward = _forward_nodes(graph)
    for node in graph.nodes:
        for number in (0, 1) if packet(node) is aten.mul and node not in forward else ():
            chain, factor = cast(Any, node.args[number]), node.args[1 - number]
            while packet(chain) in (aten.mul, aten.neg) and len(chain.users) == 1:
                chain = chain.args[0]
            if packet(chain) is aten.div and len(chain.users) == 1 and chain.args[1] is factor:
                chain.replace_all_uses_with(chain.args[0])
                node.replace_all_uses_with(node.args[number])
                break


def _body(
    term: Any,
    inputs: tuple[str, ...],
    parameters: Mapping[str, Any],
    local: Mapping[str, str],
    used_names: set[str],
) -> str:
    """Return the statements of the traced term. Constants are folded, and nothing is computed twice."""
    module = _graph(term, inputs, parameters)
    graph = module.graph
    named = [*inputs, *(name for name, value in parameters.items() if isinstance(value, Tensor))]
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    forward = _forward_nodes(graph)
    values = {node: Value(local[name]) for node, name in zip(placeholders, named, strict=True)}
    names: dict[str, str] = {}  # of expressions
    rows = {"zero", *(local[name] for name in inputs)}  # names of what differs between rows
    constants: dict[fx.Node, Tensor] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or packet(node) in EMPTY:
            continue
        try:
            if node.op == "get_attr":
                constants[node] = getattr(module, node.target)
                values[node] = constant(constants[node])
                continue
            number = folded(node, constants)
            if number is not None:
                constants[node] = number
            if number is not None and packet(node) not in CREATED:
                value = constant(number)
            else:
                value = expression(node, values, names, exact=node in forward)
        except Unsupported as error:
            raise TermError(_refusal(term, node, str(error))) from None
        if not value.core.isidentifier() and not NUMBER.fullmatch(value.core):
            if value.core not in names:
                names[value.core] = _free_name(node.name, used_names)
                rows |= {names[value.core]} if rows & _identifiers(value.core) else set()
            value = value._replace(core=names[value.core])
        values[node] = value
    returned = cast(tuple[fx.Node, ...], graph.output_node().args[0])
    texts = [_per_row(node, values[node], rows) for node in returned]
    return "\n    ".join([*(f"{n} = {text}" for text, n in names.items()), f"return {', '.join(texts)}"])


def _identifiers(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", text))


def _per_row(node: fx.Node, value: Value, rows: set[str]) -> str:
    """Return a result as one number per row; `rows` are the names of what differs between rows."""
    if rows & _identifiers(str(value)) and not NUMBER.fullmatch(value.core):
        return str(value)
    return f"(zero == 0.0) & {value}" if node.meta["val"].dtype == torch.bool else f"zero + {value}"


def _refusal(term: Any, node: fx.Node, because: str) -> str:
    line = node.meta.get("stack_trace") or f"{place(term)}, in its derivative"
    kind = f"{node.target} {because}".strip()
    return f"{line}: Triton code cannot be made of {kind}; there are {', '.join(operators())}"
