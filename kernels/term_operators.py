"""A torch operator on its operands as an expression of Triton, by the tables of `term_tables.py`."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from megatron_ibpo.kernels.term_tables import (
    ARITHMETIC,
    COMPARISONS,
    CREATED,
    IDENTITIES,
    KEEP_NAN,
    LARGEST,
    LARGEST_POWER,
    LAYOUT,
    LOGICAL,
    PROPAGATE_NAN,
    SELECTED,
    SMALLEST,
    TESTS,
    UNARY,
    aten,
)


class Unsupported(NotImplementedError):
    """An operator that the tables lack; the message says why."""


class Value(NamedTuple):
    """An operand: a name or number, and what products carry along to apply it once: its sign, and the
    conditions outside which it is 0."""

    core: str
    sign: str = ""
    live: tuple[str, ...] = ()
    factors: frozenset[str] = frozenset()  # of a product: names and numbers

    def __str__(self) -> str:
        text = f"(-1.0 * {self.core})" if self.sign else self.core  # Triton's -x is 0 - x: slower
        # as terms say what is clipped
        dead = " | ".join(condition[1:] for condition in self.live if condition[0] == "~")
        met = [condition for condition in self.live if condition[0] != "~"] + ([f"~({dead})"] if dead else [])
        return f"tl.where({' & '.join(met)}, {text}, 0.0)" if met else text

    def times(self, sign: str) -> "Value":
        return self._replace(sign="-" if self.sign != sign else "")


def packet(value: Any) -> Any:
    """Return the operator that a node calls, whichever overload."""
    return getattr(value.target, "overloadpacket", value.target) if isinstance(value, fx.Node) else None


def operators() -> list[str]:
    """Return the names of the operators that a term may call; many others are made of these."""
    names = map(str, (*ARITHMETIC, *COMPARISONS, *LOGICAL, *UNARY, *TESTS, aten.where, aten.clamp, aten.pow))
    return sorted({name.removeprefix("aten.") for name in names if name.startswith("aten.")})


def expression(
    node: fx.Node, values: Mapping[fx.Node, Value], names: Mapping[str, str], *, exact: bool
) -> Value:
    """Return the node's operator applied to its operands, as Triton says it.

    Args:
        values: operands of the nodes before it.
        names: expressions that have a name already.
        exact: choose first and multiply then, as torch does; not needed in derivatives.

    Raises Unsupported for an operator, or an argument of it, that the tables lack.
    """
    target, arguments = packet(node), _arguments(node)
    is_bool, bools = _is_bool(node), [_is_bool(argument) for argument in arguments[:2]]

    def operand(value: Any) -> Value:
        """Return a number as it is, a bool as 1 or 0."""
        text = _operand(value, values)
        return Value(f"tl.where({text}, 1.0, 0.0)") if _is_bool(value) else text

    def condition(value: Any) -> str:
        text = str(_operand(value, values))
        return text if _is_bool(value) else f"({text} != (0.0))"

    if target in LOGICAL and is_bool:
        return Value(LOGICAL[target].format(*map(condition, arguments[:2])))
    if target in (aten.logical_not, aten.bitwise_not) and bools[0]:
        return Value(f"~{_operand(arguments[0], values)}")
    if target in COMPARISONS:
        return Value(COMPARISONS[target].format(*map(operand, arguments[:2])))
    if target in TESTS:
        return Value(TESTS[target].format(operand(arguments[0])))
    if target in IDENTITIES:
        return _operand(arguments[0], values)
    if target in CREATED:
        number = _operand(arguments[CREATED[target]], values)
        return Value(f"zero != {number}") if is_bool else number
    if target is aten._to_copy:
        return Value(condition(arguments[0])) if is_bool else operand(arguments[0])
    if target in (aten.where, aten.masked_fill):
        return _where_expression(node, arguments, operand, condition, is_bool)
    if is_bool:
        raise Unsupported("of bools")
    if target in ARITHMETIC:
        left, right = (operand(value) for value in arguments[:2])
        if exact:
            left, right = (Value(str(value)) if value.live else value for value in (left, right))
        return _arithmetic(target, left, right, _alpha(node), names)
    if target in UNARY:
        form, only = UNARY[target], operand(arguments[0])
        return only.times("-") if form == "-{}" else Value(form.format(only))
    if target is aten.clamp:
        _, low, high = (*arguments, None, None)[:3]
        text = str(operand(arguments[0]))
        text = text if low is None else f"tl.maximum({text}, {operand(low)}, {PROPAGATE_NAN})"
        return Value(text if high is None else f"tl.minimum({text}, {operand(high)}, {PROPAGATE_NAN})")
    if target is aten.pow:
        return Value(_power(operand, *arguments[:2]))
    raise Unsupported("")


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return a node's arguments by position; Unsupported if the tables do not know one's meaning."""
    arguments = list(node.args)
    schema = getattr(node.target, "_schema", None)
    named = {argument.name: argument for argument in schema.arguments} if schema else {}
    for name, value in node.kwargs.items():
        if name == "alpha" or name in LAYOUT or (name in named and value == named[name].default_value):
            continue
        place = list(named).index(name) if name in ("min", "max", "other", "fill_value", "value") else -1
        if place < 0:
            raise Unsupported(f"with {name}={value}")
        arguments += [None] * (place + 1 - len(arguments))
        arguments[place] = value
    return tuple(arguments)


def _alpha(node: fx.Node) -> Any:
    """Return the factor of the second operand of a sum or difference."""
    alpha = node.kwargs.get("alpha", 1)
    if not isinstance(alpha, int | float):
        raise Unsupported("with an alpha that is a tensor")
    return alpha


def _is_bool(value: Any) -> bool:
    if isinstance(value, fx.Node):
        return getattr(value.meta.get("val"), "dtype", None) == torch.bool
    return False


def _arithmetic(target: Any, left: Value, right: Value, alpha: float, names: Mapping[str, str]) -> Value:
    form = ARITHMETIC[target]
    if alpha != 1:
        right = Value(str(_product(_number(alpha), right, names)))
    if form == "{} * {}":
        first, second = sorted((left, right))
        return _product(first, second, names)
    if form == "{} / {}" and not right.live:
        return Value(f"{left.core} / {right.core}", left.sign, left.live).times(right.sign)
    if form == "{} + {}" and "(0.0)" in (left.core, right.core):
        return left if right.core == "(0.0)" else right
    if form == "{} + {}" and left[:3] == right[:3]:  # the slope of a square: twice its half
        halved = [factor for factor in left.factors if names.get(f"(0.5) * {factor}") == left.core]
        return left._replace(core=halved[0]) if halved else Value(form.format(left, right))
    return Value(form.format(left, right))


def _where_expression(
    node: fx.Node,
    arguments: tuple[Any, ...],
    operand: Callable[[Any], Value],
    condition: Callable[[Any], str],
    is_bool: bool,
) -> Value:
    chosen, *branches = arguments if packet(node) is aten.where else (arguments[i] for i in (1, 2, 0))
    met = condition(chosen)
    if is_bool:
        texts = [f"(zero != {operand(b)})" if isinstance(b, int | float) else condition(b) for b in branches]
        return Value(f"tl.where({met}, {', '.join(texts)})")
    comparison = packet(chosen)
    if comparison in (*SELECTED, aten.ne) and [*chosen.args] == branches:
        if comparison is aten.ne:
            return operand(branches[0])
        if _are_nan_together(*branches):
            return Value(ARITHMETIC[SELECTED[comparison]].format(*map(operand, branches)))
    first, second = map(operand, branches)
    if second.core == "(0.0)":
        return first._replace(live=(*first.live, met))
    if first.core == "(0.0)":
        return second._replace(live=(*second.live, f"~{met}"))
    return Value(f"tl.where({met}, {first}, {second})")


def _are_nan_together(first: Any, second: Any) -> bool:
    """Return whether the first can be NaN only where the second is."""
    sources = [_nan_sources(first), _nan_sources(second)]
    return None not in sources and cast(set[fx.Node], sources[0]) <= cast(set[fx.Node], sources[1])


def _nan_sources(value: Any) -> set[fx.Node] | None:
    """Return the inputs whose NaN an expression shows; None if it may hide one or make its own."""
    sources: set[fx.Node] = set()
    waiting, visited = [value], set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, fx.Node) or node in visited or packet(node) in CREATED:
            continue
        visited.add(node)
        if node.op == "placeholder":
            sources |= {node} if node.meta["val"].dim() else set()  # parameters are finite
        elif packet(node) not in KEEP_NAN:
            return None
        else:
            waiting += [*node.args, *node.kwargs.values()]
    return sources


def _product(left: Value, right: Value, names: Mapping[str, str]) -> Value:
    """Return left * right; a number is on the left. It need not be 0 where a factor is 0 anyway."""
    zeros = {f"~{names.get(f'{factor} == (0.0)')}" for factor in (right.core, *right.factors)}
    live = [condition for condition in left.live if condition not in zeros or not left.core.startswith("(")]
    core = right.core if left.core == "(1.0)" else f"{left.core} * {right.core}"
    factors = frozenset((left.core, right.core, *left.factors, *right.factors))
    return Value(core, left.sign, tuple(dict.fromkeys((*live, *right.live))), factors).times(right.sign)


def _power(operand: Callable[[Any], Value], base: Any, exponent: Any) -> str:
    if base == 1 and not isinstance(base, fx.Node):  # also to the power of infinity
        return "(1.0)"
    if isinstance(base, int | float) and base > 0:
        text = str(operand(exponent))
        return f"tl.exp2({text})" if base == 2 else f"tl.exp({_number(math.log(base))} * {text})"
    if isinstance(base, int | float) or not isinstance(exponent, int | float):
        raise Unsupported(
            "with a base that is not above 0" if isinstance(base, int | float) else "of two tensors"
        )
    size, text = abs(float(exponent)), str(operand(base))
    if not size <= LARGEST_POWER:
        raise Unsupported(f"with exponent {exponent:g}; the largest is {LARGEST_POWER}")
    integer_exponent, fraction = int(size), size - int(size)
    factors = [text] * integer_exponent
    if size == 0.5:  # as torch has it: NaN of -inf
        factors = [f"tl.sqrt({text})"]
    elif fraction:
        root = f"tl.sqrt({text})" if fraction == 0.5 else f"tl.exp({_number(fraction)} * tl.log({text}))"
        far = "float('inf')"
        factors = [f"tl.abs({text})"] * integer_exponent + [f"tl.where({text} == -{far}, {far}, {root})"]
    product = " * ".join(factors) or "(1.0)"
    return product if exponent >= 0 else f"1.0 / ({product})"


def _operand(value: Any, values: Mapping[fx.Node, Value]) -> Value:
    if isinstance(value, fx.Node):
        if value not in values:
            raise Unsupported("of memory that nothing was written to")
        return values[value]
    if isinstance(value, bool | int | float):
        return _number(value)
    raise Unsupported(f"with an argument {value!r}")


def _number(value: float) -> Value:
    """Return a constant. Triton would compute in float64 with one that float32 cannot hold."""
    number = abs(float(value))
    if 0 < number < SMALLEST:
        if float(torch.tensor(number, dtype=torch.float32)) > 0:
            raise Unsupported(f"with the number {value:g}, which is too small for float32")
        number = 0.0
    number = math.inf if LARGEST < number < math.inf else number
    core = f"({number!r})" if math.isfinite(number) else f"float('{number}')"
    return Value(core, "-" if math.copysign(1.0, value) < 0 else "")


def constant(number: Tensor) -> Value:
    """Return a tensor of one number."""
    if number.numel() != 1:
        raise Unsupported("from outside the term, which has several numbers")
    return (
        Value(f"zero != {_number(number.item())}") if number.dtype == torch.bool else _number(number.item())
    )


def folded(node: fx.Node, constants: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """Return the number of a node whose operands are all numbers, as torch computes it; None for others."""
    target, like = packet(node), node.meta.get("val")
    if not isinstance(like, Tensor) or any(operand not in constants for operand in _read_nodes(node)):
        return None
    if target is aten._efficientzerotensor:
        return torch.zeros((), dtype=like.dtype)
    if target in CREATED:
        value = node.args[CREATED[target]]
        return torch.tensor(value, dtype=like.dtype) if isinstance(value, bool | int | float) else None
    if not _read_nodes(node):
        return None
    arguments = fx.map_arg(node.args, lambda operand: constants[operand])
    if target in IDENTITIES or target is aten._to_copy:
        return cast(Tensor, arguments[0]).to(like.dtype)
    tables = (*ARITHMETIC, *COMPARISONS, *LOGICAL, *UNARY, *TESTS)
    if target not in (*tables, aten.where, aten.clamp, aten.pow, aten.masked_fill):
        return None
    kwargs = fx.map_arg(node.kwargs, lambda operand: constants[operand])
    return cast(Any, node.target)(*arguments, **kwargs).to(like.dtype)


def _read_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose numbers a node reads: not those that it takes the shape of."""
    return [] if packet(node) in CREATED else node.all_input_nodes
