"""Recipes: flat YAML files whose keys are the names of flags. Read with keys and types checked; written."""

import dataclasses
import io
import json
import types
import typing
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode

import yaml

from megatron_ibpo.basics.text import shown
from megatron_ibpo.basics.user_files import RECIPE_BYTES, UserFileError, read_user_file
from megatron_ibpo.config.all_fields import ENTRIES, PARAMETERS, Entry
from megatron_ibpo.config.config import Config
from megatron_ibpo.config.config_error import ConfigError


def read_recipe(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ({field name: value}, {other key as written: value}) of a recipe, its paths absolute. Other keys
    are parameters of what is chosen, or wrong.

    Raises:
        ConfigError: a file that cannot be read, a repeated key, a value of the wrong type.
    """
    content = read_yaml(path, f"--config {path}")
    if content is None:
        return {}, {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: must hold `key: value` lines, holds a {type(content).__name__}")
    fields: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        entry = ENTRIES.get(name)
        if entry is None:
            others[str(key)] = value
        else:
            fields[name] = typed_value(value, entry, f"{path}: {key}")
    return fields, others


def typed_value(value: Any, entry: Entry, key: str) -> Any:
    """Return a recipe's value as its field holds it.

    Args:
        key: begins the message.

    Raises:
        ConfigError: it has another type.
    """
    try:
        return entry.located(_value(value, entry), in_recipe=True)
    except TypeError as error:
        raise ConfigError(f"{key}: {shown(value)} is not {error}") from error


def read_yaml(path: Path, name: str) -> Any:
    """What the file holds.

    Args:
        name: of the file, for messages.

    Raises:
        ConfigError: it cannot be read, is not YAML, or gives a key twice in one mapping; dashes and
            underscores count as equal.
    """
    try:
        content = read_user_file(path, RECIPE_BYTES)
        return yaml.load(content.decode(), _Loader)
    except UserFileError as error:
        raise ConfigError(f"{name}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from error
    except _RepeatedKeyError as error:
        raise ConfigError(f"{name}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: is not YAML: its brackets nest too deep") from error
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        # PyYAML raises all of these for dates, numbers and tags that are none
        raise ConfigError(f"{name}: is not YAML: {error}") from error


def config_yaml(config: Config) -> str:
    """The configuration as a flat recipe; read back by `--config` it gives an equal `Config`."""
    text = io.StringIO()
    for section in dataclasses.fields(config):
        part = dict(vars(getattr(config, section.name)))
        part |= part.pop(PARAMETERS, {})
        flat = {name.replace("_", "-"): _plain(value) for name, value in part.items()}
        text.write(f"# {section.name}\n")
        yaml.dump(flat, text, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return text.getvalue()


def write_config(config: Config, path: Path) -> None:
    """Write the resolved configuration of a run as a recipe."""
    path.write_text(config_yaml(config), encoding="utf-8")


_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's, ten times as fast, where PyYAML was built with it."""


class _RepeatedKeyError(yaml.YAMLError):
    """A key is given twice in one mapping."""


class _Loader(yaml.SafeLoader):
    """YAML's own rule that keys are unique, which PyYAML does not keep: there the last one wins silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value).replace("-", "_"), key.start_mark.line + 1
            if name in lines:
                raise _RepeatedKeyError(
                    f"key {shown(key.value)} is given twice, on lines {lines[name]} and {line}"
                )
            lines[name] = line
        return super().construct_mapping(node, deep)


def _value(value: Any, entry: Entry) -> Any:
    if entry.has_names and isinstance(value, dict):
        if any(isinstance(v, dict | list) for v in value.values()):
            raise TypeError(_words(entry.type))
        # JSON spells numbers and truth values as they are typed in a flag
        value = [f"{name}={v if isinstance(v, str) else json.dumps(v)}" for name, v in value.items()]
    if entry.has_sources:
        sources = value if isinstance(value, list) else [] if value is None else [value]
        value = [_source_spec(source) for source in sources]
    if entry.is_json and isinstance(value, dict):
        value = json.dumps(value)
    return _typed(value, entry.type)


def _source_spec(source: Any) -> Any:
    """A source of prompts as it is typed in a flag: {path: a.jsonl, weight: 2} is a.jsonl?weight=2."""
    if not isinstance(source, dict):
        return source
    settings = {str(name).replace("-", "_"): value for name, value in source.items()}
    path = settings.pop("path", None)
    if not isinstance(path, str) or any(isinstance(value, dict | list) for value in settings.values()):
        raise TypeError("a source: text, or a mapping with its `path` and settings that are texts or numbers")
    if not settings:
        return path
    texts = {name: v if isinstance(v, str) else json.dumps(v) for name, v in settings.items()}
    return f"{path}{'&' if '?' in path else '?'}{urlencode(texts)}"


def _typed(value: Any, hint: Any) -> Any:
    """`value` as the type `hint` says; TypeError with the expected type in words when it is not one."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for choice in typing.get_args(hint):
            try:
                return _typed(value, choice)
            except TypeError:
                continue
    elif origin is Literal:
        if value in typing.get_args(hint):
            return value
    elif origin is tuple:
        count = _fixed_length(hint)
        if isinstance(value, list) and count in (None, len(value)):
            return tuple(_typed(item, typing.get_args(hint)[0]) for item in value)
    elif hint is float and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 3e-4 as text
        except (TypeError, ValueError, OverflowError):
            pass
    elif hint is int and isinstance(value, bool):
        pass
    elif hint is Path and isinstance(value, str):
        if value:  # pathlib takes an empty one for the directory where the user stands
            return Path(value)
    elif isinstance(value, hint):
        return value
    raise TypeError(_words(hint))


def _fixed_length(hint: Any) -> int | None:
    """Of a tuple whose items are all of one type; None: any."""
    items = typing.get_args(hint)
    return None if items[-1] is ... else len(items)


def _words(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_words(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        count = _fixed_length(hint)
        return (
            f"a list{'' if count is None else f' of {count}'}, each item {_words(typing.get_args(hint)[0])}"
        )
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    return names.get(hint, "null")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value
