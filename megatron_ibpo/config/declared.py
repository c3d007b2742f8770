"""Settings `name=value` of a library's dataclass, checked before anything starts.

Fields and types are read from the library's source text, because importing vLLM or Megatron takes seconds and
changes the threads and environment of the importing process.
"""

import ast
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_ibpo.config.config_error import nearest

Fields = Mapping[str, ast.expr]
"""Field → its type, as written."""

_SCALARS: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}
_SEQUENCES = ("List", "list", "Tuple", "tuple")


def declared_fields(package: str, file: str, name: str) -> dict[str, ast.expr]:
    """Return the fields of a dataclass, without those of its bases.

    Args:
        package: an installed package.
        file: path within the package of the module that defines the dataclass `name`.

    Raises:
        ValueError: the package is not installed, or has no such dataclass.
    """
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ValueError(f"needs {package}, which is not installed here")
    source = Path(found.origin).parent / file
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
    found: dict[str, Any] = {}
    for pair in pairs:
        given, equals, text = pair.partition("=")
        name = given.strip().lstrip("-").replace("-", "_")
        if not equals:
            raise ValueError(f"{flag} {pair}: write it as name=value")
        if name in ours:
            raise ValueError(f"{flag} {name}: this project sets it; {ours[name]}")
        if name not in fields:
            raise ValueError(f"{flag} {name}: {library}'s {of} has no such field{nearest(name, fields)}")
        try:
            found[name] = typed(text.strip(), fields[name])
        except (ValueError, TypeError, yaml.YAMLError):
            wanted = ast.unparse(fields[name])
            raise ValueError(f"{flag} {name}={text}: {library} wants {wanted}") from None
    return found


def typed(text: str, declared: ast.expr) -> Any:
    """Return `text` as a value of the declared type. A type with parts that are not known here gets the value
    that YAML reads.

    Raises:
        ValueError: the text is not such a value.
    """
    options = list(_options(declared))
    if any(_is_none(option) for option in options) and text.lower() in ("none", "null"):
        return None
    value = yaml.safe_load(text)
    if not all(map(_is_known, options)):
        return value  # a type of the library's own, which it checks itself
    for option in options:
        try:
            return _as(value, option)
        except TypeError:
            continue
    names = [ast.unparse(option) for option in options]
    if "float" in names and not isinstance(value, bool):
        return float(text)  # YAML reads 1e-3 as text
    if "str" in names:
        return text
    raise ValueError


def _options(declared: ast.expr) -> Iterator[ast.expr]:
    """Yield the alternatives of a union type."""
    if isinstance(declared, ast.BinOp):
        yield from _options(declared.left)
        yield from _options(declared.right)
    elif isinstance(declared, ast.Subscript) and ast.unparse(declared.value) in ("Optional", "Union"):
        yield from (option for part in _arguments(declared) for option in _options(part))
        if ast.unparse(declared.value) == "Optional":
            yield ast.Constant(None)
    else:
        yield declared


def _arguments(declared: ast.Subscript) -> list[ast.expr]:
    return declared.slice.elts if isinstance(declared.slice, ast.Tuple) else [declared.slice]


def _is_none(option: ast.expr) -> bool:
    return isinstance(option, ast.Constant) and option.value is None


def _is_known(option: ast.expr) -> bool:
    if isinstance(option, ast.Subscript):
        kind = ast.unparse(option.value)
        return kind == "Literal" or (
            kind in _SEQUENCES
            and all(_is_known(one) for part in _arguments(option) for one in _options(part))
        )
    return _is_none(option) or ast.unparse(option) in _SCALARS


def _as(value: Any, option: ast.expr) -> Any:
    """Return `value` as this one type; TypeError if it is not."""
    if isinstance(option, ast.Subscript):
        parts = _arguments(option)
        if ast.unparse(option.value) == "Literal":
            if any(
                value == literal and type(value) is type(literal) for literal in map(ast.literal_eval, parts)
            ):
                return value
        elif isinstance(value, list):
            if ast.unparse(option.value) in ("List", "list"):
                return [_as_any(item, parts[0]) for item in value]
            if len(parts) == len(value):
                return tuple(_as_any(item, part) for item, part in zip(value, parts, strict=True))
    elif _is_none(option):
        if value is None:
            return None
    elif type(value) is _SCALARS[ast.unparse(option)]:
        return value
    elif ast.unparse(option) == "float" and type(value) is int:
        return float(value)
    raise TypeError


def _as_any(value: Any, declared: ast.expr) -> Any:
    for option in _options(declared):
        try:
            return _as(value, option)
        except TypeError:
            continue
    raise TypeError
