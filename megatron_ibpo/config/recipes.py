"""Recipes: flat YAML files whose keys are the names of flags, read and checked, and written."""

import dataclasses
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

import yaml

from megatron_ibpo.basics.text import shown
from megatron_ibpo.basics.user_files import RECIPE_BYTES, UserFileError, read_user_file
from megatron_ibpo.config.config import ENTRIES, PARAMETERS, Config, Entry
from megatron_ibpo.config.config_error import ConfigError
from megatron_ibpo.config.values import JSON_OBJECT, SOURCES, as_type, type_words

BASE = "base"
"""Key of a recipe that names the recipe it builds on, relative to its own directory."""


@dataclass(frozen=True)
class Source:
    """The origin of settings, for messages."""

    file: Path | None = None
    """None: a command line or Python."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line of each key of the file."""

    def of(self, key: str) -> str:
        """Return the beginning of a message about a key: its file and line."""
        if self.file is None:
            return ""
        line = self.lines.get(key.replace("-", "_"))
        return f"{self.file}: " if line is None else f"{self.file}, line {line}: "


NO_FILE = Source()


@dataclass(frozen=True)
class Layer:
    """The settings of one recipe or command line, and their origin."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Config` and their values."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Other keys, as written: parameters of the choices, or unknown."""
    source: Source = NO_FILE


def read_recipe(path: Path, derived: tuple[Path, ...] = ()) -> list[Layer]:
    """Return a recipe after those that it builds on, weakest first.

    Args:
        derived: the recipes that build on this one.

    Raises:
        ConfigError: a file that cannot be read, a repeated key, a value of the wrong type, a recipe
            that builds on itself.
    """
    if path.resolve() in derived:
        raise ConfigError(f"--config {path}: builds on itself by its `{BASE}`")
    lines: dict[str, int] = {}
    content = read_yaml(path, f"--config {path}", lines)
    source = Source(path, lines)
    if not isinstance(content, dict | None):
        raise ConfigError(f"--config {path}: must hold `key: value` lines, holds a {type(content).__name__}")
    settings = content or {}
    base = settings.pop(BASE, None)
    if not isinstance(base, str | None):
        raise ConfigError(f"{source.of(BASE)}{BASE}: {shown(base)} is not the path of a recipe")
    bases = [] if base is None else read_recipe(path.parent / base, (*derived, path.resolve()))
    return [*bases, typed_settings(settings, source)]


def typed_settings(settings: Mapping[Any, Any], source: Source = NO_FILE) -> Layer:
    """Return settings by their keys as a layer, with absolute paths. Raises ConfigError for a value of the
    wrong type."""
    fields: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        entry = ENTRIES.get(name)
        if entry is None:
            parameters[str(key)] = value
        else:
            fields[name] = typed_value(value, entry, f"{source.of(name)}{key}")
    return Layer(fields, parameters, source)


def typed_value(value: Any, entry: Entry, key: str) -> Any:
    """Return a recipe's value as its field stores it. Raises ConfigError, which begins with `key`, for one
    of another type."""
    try:
        return entry.located(_value(value, entry), in_recipe=True)
    except TypeError as error:
        raise ConfigError(f"{key}: {shown(value)} is not {error}") from error


def read_yaml(path: Path, name: str, lines: dict[str, int] | None = None) -> Any:
    """Return the content of a YAML file.

    Args:
        name: the file, for messages.
        lines: gets the line of each key of the outermost mapping, with underscores.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or gives a key twice in one mapping; dashes and
            underscores are equivalent.
    """
    try:
        loader = _Loader(read_user_file(path, RECIPE_BYTES).decode())
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
            if lines is not None:
                lines |= loader.lines
    except UserFileError as error:
        raise ConfigError(f"{name}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from error
    except ConfigError as error:  # a repeated key
        raise ConfigError(f"{name}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: is not YAML: its brackets nest too deep") from error
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        # PyYAML raises all of these for malformed dates, numbers and tags
        raise ConfigError(f"{name}: is not YAML: {error}") from error


def config_yaml(config: Config) -> str:
    """Return the configuration as a flat recipe, which `--config` reads back as an equal `Config`."""
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
"""libyaml's dumper, ten times as fast, if PyYAML was built with it."""


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses repeated keys, as YAML's own rule does; PyYAML silently takes the last
    one."""

    lines: Mapping[str, int] = MappingProxyType({})
    """Key of the outermost mapping, which is constructed first → its line."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value).replace("-", "_"), key.start_mark.line + 1
            if name in lines:
                raise ConfigError(f"key {shown(key.value)} is given twice, on lines {lines[name]} and {line}")
            lines[name] = line
        self.lines = self.lines or lines
        return super().construct_mapping(node, deep)


def _value(value: Any, entry: Entry) -> Any:
    if entry.has_names and isinstance(value, dict):
        if any(isinstance(v, dict | list) for v in value.values()):
            raise TypeError(type_words(entry.type))
        # JSON spells numbers and booleans as a flag does
        value = [f"{name}={v if isinstance(v, str) else json.dumps(v)}" for name, v in value.items()]
    if SOURCES in entry.ranges:
        sources = value if isinstance(value, list | tuple) else [] if value is None else [value]
        value = [_source_spec(source) for source in sources]
    if JSON_OBJECT in entry.ranges and isinstance(value, dict):
        value = json.dumps(value)
    return as_type(value, entry.type)


def _source_spec(source: Any) -> Any:
    """Return a source of prompts as a flag spells it: {path: a.jsonl, weight: 2} is a.jsonl?weight=2."""
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


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value
