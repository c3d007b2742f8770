"""Values of fields: their types, and the ranges of their annotations, as in `Annotated[int, at_least(1)]`.

Text means the same on a command line, in a recipe and in Python: "3e-4" is a number, "True" is true and
"None" is null where the type has them.
"""

import ast
import importlib.util
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.config.config_error import nearest
from megatron_ibpo.config.hooks import IMPORT_PATH, is_import_path
from megatron_ibpo.config.paths import are_distinct, as_specs


@dataclass(frozen=True)
class Range:
    """A rule for the value of a field. It is never applied to None."""

    holds: Callable[[Any], bool]
    rule: str
    """Completes "must be …"."""


def at_least(least: float) -> Range:
    """Allow values from `least` on."""
    return Range(lambda value: value >= least, f"at least {least}")


def within(least: int, most: int, why: str = "") -> Range:
    """Allow values from `least` to `most`."""
    rule = f"between {least} and {most}" + (f" ({why})" if why else "")
    return Range(lambda value: least <= value <= most, rule)


def above(bound: float, why: str = "") -> Range:
    """Allow values above `bound`."""
    return Range(lambda value: value > bound, f"above {bound}" + (f" ({why})" if why else ""))


def each(rule: Range) -> Range:
    """Apply one rule to every item of a sequence."""
    return Range(lambda values: all(map(rule.holds, values)), f"all {rule.rule}")


def or_word(word: float | str, other: Range, meaning: str = "") -> Range:
    """Allow one special value, such as "adaptive" or -1, besides the values of the other range."""
    named = f"{word} ({meaning})" if meaning else repr(word)
    return Range(lambda value: value == word or other.holds(value), f"{named} or {other.rule}")


POSITIVE = above(0)
NOT_NEGATIVE = at_least(0)
BELOW_1 = Range(lambda value: 0 <= value < 1, "at least 0 and below 1")
SHARE = Range(lambda value: 0 < value <= 1, "above 0 and at most 1")
UNIT = Range(lambda value: 0 <= value <= 1, "between 0 and 1")
AROUND_1 = Range(
    lambda bounds: len(bounds) == 2 and 0 <= bounds[0] < 1 < bounds[1] < math.inf,
    "two bounds LOW HIGH with 0 <= LOW < 1 < HIGH",
)
SECONDS = Range(lambda value: 0 < value <= 2_000_000, "above 0 and at most 2000000 (23 days)")
"""Time-outs. They are waited for with poll(2), whose limit is 2^31 milliseconds."""
MINUTES = Range(lambda value: 0 < value <= 30_000, "above 0 and at most 30000 (20 days)")
RANKS = within(1, 10_000_000)
"""Numbers of processes or GPUs. The limit is beyond any cluster, and low enough to count them one by one."""
COUNT = within(1, 10_000_000)
"""Numbers of tokens, sequences or layers. The limit is beyond any run, and low enough to list them."""
BYTES = within(1, 2**50)
"""Sizes of memory or files. A petabyte is more than any machine has."""
SEED = Range(lambda value: 0 <= value < 2**62, "at least 0 and below 2^62")
"""Megatron and torch add a per-rank offset to the seed in 64 bits."""
NAMED_VALUES = Range(
    lambda settings: all("" not in text.partition("=")[:2] and not _is_no_number(text) for text in settings),
    "name=value each, no value infinite or NaN",
)
"""Range of fields that are read by `named_values`; a recipe may give them as a mapping."""

EVAL_SETS = Range(
    lambda value: are_distinct(as_specs(value)),
    "SPEC, or NAME=SPEC each, names of letters, digits, dots, dashes and underscores, all different",
)
SOURCES = Range(lambda specs: all(specs), "no empty text among the sources")
"""Range of fields with sources of prompts; a recipe may give a source as text or as a mapping
(`recipes._source_spec`)."""
IMPORT_PATHS = Range(lambda names: all(map(is_import_path, names)), f"{IMPORT_PATH} each")
"""Range of names that rows may use; openenv://HOST:PORT has this form too."""
TARGETS = Range(lambda names: bool(names) and all(names), "one name or more, none of them empty")
"""Range of --lora-targets."""
SHARES = Range(
    lambda bounds: 0 <= bounds[0] <= bounds[1] <= 1, "two shares LOW HIGH with 0 <= LOW <= HIGH <= 1"
)
JSON_OBJECT = Range(lambda text: _is_object(text), "a JSON object")
"""Range of fields with settings as JSON; a recipe may give them as a mapping."""

FINITE = Range(
    lambda value: all(math.isfinite(part) for part in _parts(value) if isinstance(part, float)),
    "a finite number",
)
IN_64_BITS = Range(
    lambda value: all(-(2**63) <= part < 2**63 for part in _parts(value) if isinstance(part, int)),
    "a number of 64 bits",
)
OF_ALL = (FINITE, IN_64_BITS)
"""Ranges that apply to every field, in addition to its own."""


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _is_object(text: str) -> bool:
    try:
        return isinstance(read_json(text), dict)
    except ValueError:
        return False


def _is_no_number(setting: str) -> bool:
    """Return whether the value of a "name=value" setting reads as infinity or NaN."""
    try:
        return not math.isfinite(float(setting.partition("=")[2]))
    except ValueError:
        return False


def named_values(settings: Iterable[str]) -> dict[str, str]:
    """Return {name: value} of "name=value" settings; a later value of a name wins. Names get underscores."""
    parts = (text.partition("=") for text in settings)
    return {name.strip().replace("-", "_"): value.strip() for name, _, value in parts}


def _path(text: str) -> Path:
    if not text:
        raise ValueError  # pathlib reads an empty path as the user's directory
    return Path(text)


_FROM_TEXT: dict[Any, Any] = {
    int: int,
    float: float,
    bool: {"True": True, "False": False}.__getitem__,
    types.NoneType: {"None": None}.__getitem__,
    Path: _path,
}


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union; of any other type, itself."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def as_type(value: Any, hint: Any) -> Any:
    """Return `value` as the type in `hint`. If it is not one, raise TypeError with the expected type in
    words."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if alternatives(hint) != (hint,):
        for alternative in sorted(parts, key=lambda part: part is not types.NoneType):  # "None" is also text
            with suppress(TypeError):
                return as_type(value, alternative)
    elif origin is Literal:
        if any(value == part and type(value) is type(part) for part in parts):  # True == 1
            return value
    elif origin in (list, tuple):
        if isinstance(value, list | tuple):
            is_fixed = origin is tuple and parts[-1] is not ...
            items = parts if is_fixed else parts[:1] * len(value)
            with suppress(TypeError, ValueError):
                return origin(as_type(*pair) for pair in zip(value, items, strict=True))
    elif (isinstance(value, str) and hint in _FROM_TEXT) or (hint is float and not isinstance(value, bool)):
        with suppress(TypeError, ValueError, KeyError, OverflowError):
            return _FROM_TEXT[hint](value)
    elif hint is Any or (isinstance(value, origin or hint) and not (hint is int and isinstance(value, bool))):
        return value
    raise TypeError(type_words(hint))


def type_words(hint: Any) -> str:
    """Return a type in words, for "… is not WORDS"."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if alternatives(hint) != (hint,):
        return " or ".join(map(type_words, parts))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, parts))
    if origin in (list, tuple):
        length = f" of {len(parts)}" if origin is tuple and parts[-1] is not ... else ""
        return f"a list{length}, each item {type_words(parts[0])}"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    return names.get(hint, "null")


Fields = Mapping[str, ast.expr]
"""Field → its type, as written."""

_PLAIN: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "None": None, "...": ...}


def declared_fields(package: str, file: str, name: str) -> dict[str, ast.expr]:
    """Return the fields of a library's dataclass, without those of its bases. They are read from its source
    text, because importing vLLM or Megatron takes seconds and changes the threads and environment of the
    importing process.

    Args:
        package: an installed package.
        file: path within the package of the module that defines the dataclass `name`.

    Raises:
        ValueError: the package is not installed, or has no such dataclass.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"needs {package}, which is not installed here")
    source = Path(spec.origin).parent / file
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            return {ast.unparse(field.target): field.annotation for field in fields}
    raise ValueError(f"{source} defines no {name}: this project works with the pinned version of {package}")


def declared_values(
    flag: str, pairs: Sequence[str], fields: Fields, ours: Mapping[str, str], *, library: str, of: str
) -> dict[str, Any]:
    """Return the values of settings `name=value`, by name, with their declared types.

    Args:
        flag: source of the settings, for messages.
        ours: fields that this project sets itself → what to do instead.
        library: library that declares the fields, for messages.
        of: class that declares the fields, for messages.

    Raises:
        ValueError: no such field, one of ours, or a value of another type.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        name = key.strip().lstrip("-").replace("-", "_")
        if not equals:
            raise ValueError(f"{flag} {pair}: write it as name=value")
        if name in ours:
            raise ValueError(f"{flag} {name}: this project sets it; {ours[name]}")
        if name not in fields:
            raise ValueError(f"{flag} {name}: {library}'s {of} has no such field{nearest(name, fields)}")
        try:
            values[name] = _value(text.strip(), _hint(fields[name]))
        except (ValueError, TypeError, yaml.YAMLError):
            type_text = ast.unparse(fields[name])
            raise ValueError(f"{flag} {name}={text}: {library} wants {type_text}") from None
    return values


def _value(text: str, hint: Any) -> Any:
    """Return `text` as a value of this type, read as YAML or as it is. TypeError if it is neither."""
    if types.NoneType in typing.get_args(hint) and text.lower() in ("none", "null"):
        return None
    with suppress(TypeError):
        return as_type(yaml.safe_load(text), hint)
    return as_type(text, hint)


def _hint(declared: ast.expr) -> Any:
    """Return the type itself; Any for the library's own types, whose values it checks itself."""
    if isinstance(declared, ast.BinOp):
        return _hint(declared.left) | _hint(declared.right)
    if not isinstance(declared, ast.Subscript):
        return _PLAIN.get(ast.unparse(declared), Any)
    parts = declared.slice.elts if isinstance(declared.slice, ast.Tuple) else [declared.slice]
    match ast.unparse(declared.value):
        case "Literal":
            return Literal[tuple(map(ast.literal_eval, parts))]
        case "Optional":
            return _hint(parts[0]) | None
        case "Union":
            return reduce(or_, map(_hint, parts))
        case "list" | "List" | "tuple" | "Tuple" as name:
            return types.GenericAlias(list if name.lower() == "list" else tuple, tuple(map(_hint, parts)))
    return Any
