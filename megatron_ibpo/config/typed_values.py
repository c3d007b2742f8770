"""A value as its declared type. Text means the same on a command line, in a recipe and in Python: "3e-4" is a
number, "True" is true and "None" is null where the type has them."""

import types
import typing
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal


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
