"""A value as its declared type. Text means the same on a command line, in a recipe and in Python: "3e-4" is a
number, "True" is true and "None" is null where the type has them.

Settings `name=value` of a library's dataclass are checked so before anything starts. Their fields and types
are read from the library's source text, because importing vLLM or Megatron takes seconds and changes the
threads and environment of the importing process.
"""

import ast
import importlib.util
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron_ibpo.config.config_error import nearest


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
            if len(items) == len(value):
                return origin(map(as_type, value, items))
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
    """Return the fields of a dataclass, without those of its bases.

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
