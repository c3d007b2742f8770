"""A loss term written in torch, as a Triton function with its derivative.

`torch.func.vjp` of the term is traced into a graph of elementwise operators and written out as Triton source,
into a file of Triton's cache directory, so that profilers and errors show it. One torch function is thus the
only definition of a term; nobody differentiates by hand. Second derivatives are not made.
"""

import functools
import hashlib
import inspect
import math
import operator
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.cache import get_cache_manager

__all__ = ["MOVED_BY_LOGPROB", "TermError", "traced_source", "traced_term"]

aten = torch.ops.aten

BINARY = {
    aten.mul: "{} * {}", aten.add: "{} + {}", aten.sub: "{} - {}", aten.div: "{} / {}",
    aten.lt: "{} < {}", aten.gt: "{} > {}", aten.le: "{} <= {}", aten.ge: "{} >= {}",
    aten.eq: "{} == {}", aten.ne: "{} != {}", aten.rsub: "{1} - {0}",
    aten.logical_and: "{} & {}", aten.logical_or: "{} | {}", aten.logical_xor: "{} ^ {}",
    aten.bitwise_and: "{} & {}", aten.bitwise_or: "{} | {}", aten.bitwise_xor: "{} ^ {}",
    aten.minimum: "tl.minimum({}, {})", aten.maximum: "tl.maximum({}, {})",
    aten.fmin: "tl.minimum({}, {})", aten.fmax: "tl.maximum({}, {})",
    operator.mul: "{} * {}", operator.add: "{} + {}", operator.sub: "{} - {}", operator.truediv: "{} / {}",
}  # fmt: skip
UNARY = {
    aten.exp: "tl.exp({})", aten.exp2: "tl.exp2({})", aten.log: "tl.log({})", aten.log2: "tl.log2({})",
    aten.sqrt: "tl.sqrt({})", aten.rsqrt: "1.0 / tl.sqrt({})", aten.reciprocal: "1.0 / {}", aten.neg: "-{}",
    aten.abs: "tl.abs({})", aten.sin: "tl.sin({})", aten.cos: "tl.cos({})", aten.erf: "tl.erf({})",
    aten.sigmoid: "tl.sigmoid({})", aten.tanh: "tanh_of({})", aten.expm1: "expm1_of({})",
    aten.sign: "sign_of({})", aten.sgn: "sign_of({})", aten.relu: "tl.maximum({}, 0.0)",
    aten.logical_not: "{} == 0", aten.bitwise_not: "~{}", aten.isnan: "{0} != {0}",
    aten.isinf: "tl.abs({}) == float('inf')", aten.log1p: "log1p_of({})", aten.expand_copy: "{}",
    aten.detach: "{}", aten.detach_copy: "{}", aten.alias: "{}", aten.alias_copy: "{}", aten.clone: "{}",
    aten.lift_fresh_copy: "{}", aten.view: "{}", aten.view_copy: "{}", aten.expand: "{}",
}  # fmt: skip
CREATED = {aten.full_like: 1, aten.full: 1, aten.scalar_tensor: 0, aten.new_full: 2}
"""Operators that make a tensor of one number, and the argument that is the number."""
SELECTED = {aten.lt: "tl.minimum({}, {})", aten.gt: "tl.maximum({}, {})", aten.ne: "{}"}
"""where(x < y, x, y) by the comparison."""
OTHERS = (aten.where, aten.masked_fill, aten.clamp, aten.pow, aten._to_copy)
LARGEST_POWER = 8
"""Integer powers up to this are written out as products."""

RESERVED = ("tl", "triton", "term", "zero", "others", "row", "kept", "parameters")
"""Names of the written function's own."""
MOVED_BY_LOGPROB = ("log_ratio", "logprobs", "gap")
"""Inputs that change one for one with the policy's log-prob."""

PREAMBLE = """import triton
import triton.language as tl


@triton.jit
def sign_of(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def log1p_of(x):  # Kahan's: the rounding of 1 + x cancels
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.where(x == float("inf"), x, tl.log(u) * (x / (u - 1.0))))


@triton.jit
def expm1_of(x):  # Kahan's
    u = tl.exp(x)
    near = tl.abs(x) < 1.0
    return tl.where(u == 1.0, x, tl.where(near, (u - 1.0) * (x / tl.log(tl.where(near, u, 2.0))), u - 1.0))


@triton.jit
def tanh_of(x):
    t = expm1_of(-2.0 * tl.abs(x))
    return sign_of(x) * (-t / (t + 2.0))


"""


class TermError(ValueError):
    """A term that cannot be written in Triton; the message names its line and what can be."""


def traced_term(
    term: Callable[..., Any], given: Sequence[str], others: Sequence[str], parameters: Mapping[str, float]
) -> Any:
    """Return the `@triton.jit` function of a term: f(*given, others, row, kept, parameters).

    It takes the given inputs, fp32 tensors of one shape, and loads the others, whose pointers are in a tuple,
    at the rows that are kept. It returns (value, derivative, clipped), or without `clipped` if the term
    returns its value alone. The derivative is that by the policy's log-prob: by those inputs of
    `MOVED_BY_LOGPROB` that the term reads.

    Parameters are read at run time, so that other values compile nothing. A term that needs them as numbers
    of Python (`if eps > 0`, `math.log(eps)`) is traced with their present values, and again for others.

    Args:
        term: a function of torch tensors, term(*inputs, **parameters) -> (value, clipped) or value, whose
            positional arguments are named as inputs.
        given: names of the inputs that the function takes.
        others: names of the inputs that it loads, in the order of their pointers.
        parameters: its keyword arguments, in the order in which they are passed.

    Raises:
        TermError: an operator that is not elementwise or not in the tables above, a value of Python that
            depends on data, or a random number.
    """
    return _load(getattr(term, "__name__", "term"), traced_source(term, given, others, parameters))


def traced_source(
    term: Callable[..., Any], given: Sequence[str], others: Sequence[str], parameters: Mapping[str, float]
) -> str:
    """Return the source of `traced_term`. Raises as it does."""
    return _source(term, tuple(given), tuple(others), tuple(parameters.items()))


@functools.lru_cache(maxsize=256)
def _source(term: Any, given: tuple[str, ...], others: tuple[str, ...], parameters: tuple[Any, ...]) -> str:
    inputs = _input_names(term)
    if reserved := [name for name in (*inputs, *dict(parameters)) if name in RESERVED]:
        raise TermError(f"{_place(term)}: the name {reserved[0]} is the kernels' own; take another one")
    try:
        body = _body(term, inputs, {name: torch.tensor(value) for name, value in parameters})
    except _ParameterNeeded:
        body = _body(term, inputs, dict(parameters))
    load = "{} = tl.load(others[{}] + row, mask=kept, other=0.0)"
    loads = [load.format(name, place) for place, name in enumerate(others) if name in inputs]
    numbers = [f"{name} = parameters[{place}]" for place, (name, _) in enumerate(parameters) if name in body]
    lines = "\n    ".join([f"zero = tl.zeros_like({given[0]})", *loads, *numbers, body])
    signature = f"term({', '.join(given)}, others, row, kept, parameters)"
    return f"# {_place(term)}, traced\n{PREAMBLE}@triton.jit\ndef {signature}:\n    {lines}\n"


def _input_names(term: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a term's positional arguments: the inputs that it reads."""
    named = inspect.signature(term).parameters
    return tuple(name for name, found in named.items() if found.kind <= found.POSITIONAL_OR_KEYWORD)


@functools.cache
def _load(name: str, source: str) -> Any:
    """Return the function of this source, from a file in Triton's cache: profilers and tracebacks show it."""
    key, file = hashlib.sha256(source.encode()).hexdigest(), f"{name.strip('<>_')}.py"
    cache = get_cache_manager(key)
    path = cache.get_file(file) or cache.put(source.encode(), file)
    module: dict[str, Any] = {"__name__": f"loss_terms.{name}_{key}"}
    exec(compile(source, path, "exec"), module)
    return module["term"]


class _ParameterNeeded(Exception):
    """The term reads the value of a parameter as a number of Python."""


def _graph(term: Callable[..., Any], inputs: tuple[str, ...], parameters: Mapping[str, Any]) -> fx.Graph:
    """Trace value, derivative and clip. Parameters that are tensors become arguments, numbers are kept."""
    moving = [place for place, name in enumerate(inputs) if name in MOVED_BY_LOGPROB]
    if not moving:
        wanted = ", ".join(MOVED_BY_LOGPROB)
        raise TermError(f"{_place(term)}: the term reads none of {wanted}: it has no gradient")
    named = [name for name, value in parameters.items() if isinstance(value, Tensor)]

    def value_and_slope(*arguments: Tensor) -> tuple[Tensor, ...]:
        fixed, clips = list(arguments[: len(inputs)]), True
        numbers = dict(zip(named, arguments[len(inputs) :], strict=True))

        def moved(*tensors: Tensor) -> tuple[Tensor, Any]:
            nonlocal clips
            for place, tensor in zip(moving, tensors, strict=True):
                fixed[place] = tensor
            found = term(*fixed, **{**parameters, **numbers})
            clips = isinstance(found, tuple)
            return found if clips else (found, found.detach())

        found = torch.func.vjp(moved, *(fixed[place] for place in moving), has_aux=True)
        value, pull, clipped = cast(tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]], Tensor], found)
        slope = functools.reduce(operator.add, pull(torch.ones_like(value)))
        return (value, slope, clipped) if clips else (value, slope)

    traced = make_fx(
        torch.func.functionalize(value_and_slope, remove="mutations_and_views"),
        decomposition_table=dict(core_aten_decompositions()),
        tracing_mode="fake",
    )
    try:
        graph = traced(*(torch.ones(3) for _ in inputs), *(parameters[name] for name in named)).graph
    except Exception as error:  # of torch's tracing, or of the user's function under it
        if named:
            raise _ParameterNeeded from error
        said = str(error).strip().partition("\n")[0][:200]
        reason = f"the term cannot be traced ({type(error).__name__}: {said})"
        raise TermError(f"{_place(term)}: {reason}") from error
    _cancel(graph)
    graph.eliminate_dead_code()
    if named and any(node.target is aten._local_scalar_dense.default for node in graph.nodes):
        raise _ParameterNeeded
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, name in zip(placeholders, (*inputs, *named), strict=True):
        node.name = name
    return graph


def _cancel(graph: fx.Graph) -> None:
    """Leave out divisions that a later factor undoes, x / t * ... * t. Autograd makes them where terms scale
    an argument and the value by the same."""
    for node in graph.nodes:
        for place in (0, 1) if _packet(node) is aten.mul else ():
            chain, factor = cast(Any, node.args[place]), node.args[1 - place]
            while _packet(chain) in (aten.mul, aten.neg) and len(chain.users) == 1:
                chain = chain.args[0]
            if _packet(chain) is aten.div and len(chain.users) == 1 and chain.args[1] is factor:
                chain.replace_all_uses_with(chain.args[0])
                node.replace_all_uses_with(node.args[place])
                break


def _packet(value: Any) -> Any:
    """Return the operator that a node calls, whichever overload."""
    return getattr(value.target, "overloadpacket", value.target) if isinstance(value, fx.Node) else None


class _Value(NamedTuple):
    """An operand: a name or number, its sign, and the conditions outside which it is 0. Products carry sign
    and conditions along, so that they are applied once."""

    core: str
    sign: str = ""
    live: tuple[str, ...] = ()
    factors: frozenset[str] = frozenset()  # of a product: names and numbers

    def __str__(self) -> str:
        text = f"(-1.0 * {self.core})" if self.sign else self.core  # Triton's -x is 0 - x: slower
        dead = " | ".join(one[1:] for one in self.live if one[0] == "~")  # as terms say what is clipped
        met = " & ".join([one for one in self.live if one[0] != "~"] + ([f"~({dead})"] if dead else []))
        return f"tl.where({met}, {text}, 0.0)" if met else text

    def times(self, sign: str) -> "_Value":
        return self._replace(sign="-" if self.sign != sign else "")


def _body(term: Callable[..., Any], inputs: tuple[str, ...], parameters: Mapping[str, Any]) -> str:
    """Return the statements of the traced term. Constants are folded, and nothing is computed twice."""
    graph = _graph(term, inputs, parameters)
    taken = {*RESERVED, *inputs, *parameters}
    values = {node: _Value(node.name) for node in graph.nodes if node.op == "placeholder"}
    names: dict[str, str] = {}  # of expressions
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        try:
            found = _expression(node, values, names)
        except NotImplementedError:
            at, known = _line_of(term, inputs, parameters, node.target), ", ".join(_operators())
            raise TermError(f"{at}: Triton code cannot be made of {node.target}; there are {known}") from None
        if re.fullmatch(r"[-+*/() .\de]+", found.core):
            number = _operand(eval(found.core), values)  # digits and operators, nothing else
            found = found._replace(core=number.core).times(number.sign)
        elif not found.core.isidentifier():
            name = f"{node.name}_" if node.name in taken else node.name
            found = found._replace(core=names.setdefault(found.core, name))
        values[node] = found
    returned = cast(tuple[Any, ...], graph.output_node().args[0])
    results = [_operand(value, values) for value in returned]
    texts = [f"zero + {value}" if value.core.startswith("(") else str(value) for value in results]
    return "\n    ".join([*(f"{n} = {text}" for text, n in names.items()), f"return {', '.join(texts)}"])


def _expression(node: fx.Node, values: Mapping[fx.Node, _Value], names: Mapping[str, str]) -> _Value:
    """Return the node's operator applied to its operands, as Triton says it."""
    target, arguments = _packet(node), cast(tuple[Any, ...], node.args)
    is_bool = getattr(node.meta.get("val"), "dtype", None) == torch.bool
    operand = functools.partial(_operand, values=values)
    if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("rounding_mode"):
        raise NotImplementedError
    if target in BINARY:
        form, (left, right) = BINARY[target], map(operand, arguments[:2])
        if form == "{} * {}":
            first, second = sorted((left, right))
            return _product(first, second, names)
        if form == "{} / {}" and not right.live:
            return _Value(f"{left.core} / {right.core}", left.sign, left.live).times(right.sign)
        if form == "{} + {}" and "(0.0)" in (left.core, right.core):
            return left if right.core == "(0.0)" else right
        if form == "{} + {}" and left[:3] == right[:3]:  # the slope of a square: twice its half
            halved = [factor for factor in left.factors if names.get(f"(0.5) * {factor}") == left.core]
            return left._replace(core=halved[0]) if halved else _Value(form.format(left, right))
        return _Value(form.format(left, right))
    if target in UNARY:
        form, only = UNARY[target], operand(arguments[0])
        return only.times(form[:-2]) if form in ("{}", "-{}") else _Value(form.format(only))
    if target in CREATED:
        number = operand(arguments[CREATED[target]])
        return _Value(f"zero != {number}") if is_bool else number
    if target is aten._to_copy:
        return _Value(f"{operand(arguments[0])} {'!= 0' if is_bool else '+ zero'}")
    if target in (aten.where, aten.masked_fill):
        condition, *branches = arguments if target is aten.where else (arguments[i] for i in (1, 2, 0))
        if _packet(condition) in SELECTED and [*condition.args] == branches:
            return _Value(SELECTED[_packet(condition)].format(*map(operand, branches)))
        met, first, second = map(operand, (condition, *branches))
        if second.core == "(0.0)":
            return first._replace(live=(*first.live, str(met)))
        if first.core == "(0.0)":
            return second._replace(live=(*second.live, f"~{met}"))
        return _Value(f"tl.where({met}, {first}, {second})")
    if target is aten.clamp:
        _, low, high = (*arguments, None, None)[:3]
        text = str(operand(arguments[0]))
        text = text if low is None else f"tl.maximum({text}, {operand(low)})"
        return _Value(text if high is None else f"tl.minimum({text}, {operand(high)})")
    if target is aten.pow and isinstance(arguments[1], int | float):
        return _Value(_power(str(operand(arguments[0])), float(arguments[1])))
    raise NotImplementedError


def _product(left: _Value, right: _Value, names: Mapping[str, str]) -> _Value:
    """Return left * right; a number is on the left. It need not be 0 where a factor is 0 anyway."""
    zeros = {f"~{names.get(f'{factor} == (0.0)')}" for factor in (right.core, *right.factors)}
    live = [one for one in left.live if one not in zeros or not left.core.startswith("(")]
    core = right.core if left.core == "(1.0)" else f"{left.core} * {right.core}"
    factors = frozenset((left.core, right.core, *left.factors, *right.factors))
    return _Value(core, left.sign, tuple(dict.fromkeys((*live, *right.live))), factors).times(right.sign)


def _power(base: str, exponent: float) -> str:
    if exponent == 0.5:
        return f"tl.sqrt({base})"
    whole = abs(exponent)
    if whole != int(whole) or whole > LARGEST_POWER:
        raise NotImplementedError
    product = " * ".join([base] * int(whole)) or "(1.0)"
    return product if exponent >= 0 else f"1.0 / ({product})"


def _operand(value: Any, values: Mapping[fx.Node, _Value]) -> _Value:
    if isinstance(value, fx.Node):
        return values[value]
    if isinstance(value, bool | int | float):
        number = abs(float(value))
        core = f"({number!r})" if math.isfinite(number) else f"float('{number}')"
        return _Value(core, "-" if math.copysign(1.0, value) < 0 else "")
    raise NotImplementedError


def _operators() -> list[str]:
    packets = map(str, (*BINARY, *UNARY, *CREATED, *OTHERS))
    return sorted({packet.removeprefix("aten.") for packet in packets if packet.startswith("aten.")})


def _line_of(term: Any, inputs: tuple[str, ...], parameters: Mapping[str, Any], wanted: Any) -> str:
    """Return file and line of the term that calls an operator, or where the term begins."""
    file = _place(term).partition(", line ")[0]
    found: list[traceback.FrameSummary] = []

    class Lines(TorchDispatchMode):
        def __torch_dispatch__(self, operator_called, types, args=(), kwargs=None):
            if operator_called == wanted:
                found.extend(frame for frame in traceback.extract_stack() if frame.filename == file)
            return operator_called(*args, **(kwargs or {}))

    with Lines(), suppress(Exception):  # it is run for its lines only
        term(*(torch.ones(3) for _ in inputs), **parameters)
    return f"{file}, line {found[-1].lineno}: {found[-1].line}" if found else _place(term)


def _place(term: Callable[..., Any]) -> str:
    code = getattr(term, "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code else repr(term)
