"""The fields of all sections by name. Names are unique; flags, recipes and checks use them."""

import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from megatron_ibpo.basics.text import shown
from megatron_ibpo.config.config import Config
from megatron_ibpo.config.config_error import ConfigError
from megatron_ibpo.config.paths import Kind, hub_id, path_in_recipe, path_of_user, relocated, source_located
from megatron_ibpo.config.ranges import EVAL_SETS, JSON_OBJECT, NAMED_VALUES, OF_ALL, SOURCES, Range

PARAMETERS = "parameters"
"""Field of a section that holds the parameters of its choices."""


@dataclass(frozen=True)
class Entry:
    """One field of one section."""

    name: str
    section: str
    type: Any
    ranges: tuple[Range, ...]
    kind: Kind | None
    """None as well for fields whose type already says whether they hold a path."""
    default: Any = None
    """Default of a parameter; the defaults of fields are those of `Config()`."""
    is_parameter: bool = False
    """True for a parameter of a choice in this section."""

    def get(self, config: Config) -> Any:
        section = getattr(config, self.section)
        if self.is_parameter:
            return section.parameters.get(self.name, self.default)
        return getattr(section, self.name)

    def put(self, config: Config, value: Any) -> None:
        section = getattr(config, self.section)
        if self.is_parameter:
            section.parameters[self.name] = value
        else:
            setattr(section, self.name, value)

    def out_of_range(self, value: Any) -> str | None:
        """Return an error message if `value` is out of range, otherwise None."""
        broken = None if value is None else next((r for r in self.ranges if not r.holds(value)), None)
        return None if broken is None else f"{flag(self.name)}: must be {broken.rule}, is {shown(value)}"

    @property
    def has_names(self) -> bool:
        """True if the field holds "name=value" settings; later ones are added to earlier ones."""
        return NAMED_VALUES in self.ranges

    @property
    def has_sources(self) -> bool:
        """True if the field holds sources of prompts."""
        return SOURCES in self.ranges

    @property
    def is_json(self) -> bool:
        """True if the field holds a JSON object as text."""
        return JSON_OBJECT in self.ranges

    @property
    def is_path(self) -> bool:
        """True if the field's type is a path."""
        return Path in (self.type, *typing.get_args(self.type))

    def located(self, value: Any, *, in_recipe: bool) -> Any:
        """Return `value` with paths made absolute; other values, Hub ids too, are returned unchanged."""
        if value is None or not (self.kind or isinstance(value, Path)):
            return value
        locate = path_in_recipe if in_recipe and self.kind is not Kind.WRITTEN else path_of_user
        if self.kind is Kind.MODEL and hub_id(value) is not None:
            return value
        if self.kind is not Kind.FILE_OR_URL:
            return type(value)(locate(value))
        if EVAL_SETS in self.ranges:
            return relocated(value, lambda spec: source_located(spec, locate))
        if isinstance(value, tuple):
            return tuple(source_located(spec, locate) for spec in value)
        return source_located(value, locate)


def flag(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def entry_of(name: str, section: str, hint: Any, *, default: Any = None, is_parameter: bool = False) -> Entry:
    """Return the entry of a field with this type."""
    plain, *extras = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    ranges = (*OF_ALL, *(extra for extra in extras if isinstance(extra, Range)))
    kinds = [extra for extra in extras if isinstance(extra, Kind)]
    return Entry(name, section, plain, ranges, kinds[0] if kinds else None, default, is_parameter)


def _entries() -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for section, kind in typing.get_type_hints(Config).items():
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            if name == PARAMETERS:
                continue
            if name in entries:
                raise AssertionError(f"two configuration fields are called {name}")
            entries[name] = entry_of(name, section, hint)
    return entries


ENTRIES = _entries()


def check_config(
    config: Config, rooms: Iterable[Callable[[Config], object]] = (), *, trains: bool = True
) -> None:
    """Refuse a configuration that cannot work.

    Args:
        rooms: checks by other parts of the package, such as for known loss variants; each raises ValueError
            with one line per problem.
        trains: False if the policy is only evaluated.

    Raises:
        ConfigError: with all problems at once, each naming its flag.
    """
    problems = [problem for e in ENTRIES.values() if (problem := e.out_of_range(e.get(config)))]
    problems += config.problems(trains=trains)
    for check in rooms:
        try:
            check(config)
        except ValueError as error:
            problems += str(error).splitlines()
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  ".join([f"{count} in the configuration:", *problems]))
