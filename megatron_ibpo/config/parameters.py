"""Parameters of the choice of a setting: a credit method, a token credit, an estimator or an engine.

Each choice is a dataclass whose fields are its parameters, typed and documented as those of `Config`. Flags
and recipe keys of a choice are accepted only when it is chosen.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_ibpo.config.all_fields import ENTRIES, Entry, entry_of, flag
from megatron_ibpo.config.config import Config
from megatron_ibpo.config.config_error import ConfigError
from megatron_ibpo.config.hooks import MOVED_PARAMETERS


@dataclass(frozen=True)
class Registry:
    """The choices of one setting."""

    setting: str
    """Field that names the choice. If it is None, the first of `known` is meant."""
    known: Mapping[str, Any]
    """Name → the class that has the parameters, or an object without any."""
    find: Callable[[str], Any]
    """Returns the same for a name or an import path; raises ValueError if there is none."""
    section: str = "algorithm"
    """Section of `Config` that has the setting and the parameters."""

    def entries(self, name: str | None) -> dict[str, Entry]:
        """Return the parameters of the choice `name`."""
        return parameter_entries(self.find(self.name_of(name)), self.section)

    def name_of(self, choice: str | None) -> str:
        """Return the name of a choice, also of None."""
        return next(iter(self.known)) if choice is None else choice

    def choice_in(self, config: Config) -> str:
        """Return the name of the choice made."""
        return self.name_of(getattr(getattr(config, self.section), self.setting))


def parameter_entries(found: Any, section: str = "algorithm") -> dict[str, Entry]:
    """Return the parameters of a class by name; none unless it is a dataclass."""
    return _entries_of(found, section) if isinstance(found, type) and dataclasses.is_dataclass(found) else {}


@cache
def _entries_of(found: type, section: str) -> dict[str, Entry]:
    hints = typing.get_type_hints(found, include_extras=True)
    entries = {
        field.name: entry_of(field.name, section, hints[field.name], default=field.default, is_parameter=True)
        for field in dataclasses.fields(found)
    }
    for name, entry in entries.items():
        if name in ENTRIES:
            raise ConfigError(f"{found.__name__}: its parameter {name} is a setting of every run; rename it")
        if entry.default is dataclasses.MISSING:
            raise ConfigError(f"{found.__name__}: its parameter {name} needs a default")
    return entries


def built(found: Any, parameters: Mapping[str, Any]) -> Any:
    """Return the object that a choice builds from its own parameters.

    Raises:
        ConfigError: with one line per value out of range.
    """
    if not isinstance(found, type):
        return found
    entries = parameter_entries(found)
    own = {name: parameters[name] for name in entries if name in parameters}
    problems = [problem for name in own if (problem := entries[name].out_of_range(own[name]))]
    if problems:
        raise ConfigError("\n".join(problems))
    return found(**own)


def entries_of(config: Config, registries: Sequence[Registry]) -> dict[str, Entry]:
    """Return the parameters of all choices of a configuration."""
    chosen = {registry.setting: registry.choice_in(config) for registry in registries}
    return chosen_entries(chosen, registries)


def chosen_entries(chosen: Mapping[str, Any], registries: Sequence[Registry]) -> dict[str, Entry]:
    """Return the parameters of the choices made.

    Args:
        chosen: setting → its choice; a setting that is missing has its default.
    """
    return {
        name: entry
        for registry in registries
        for name, entry in registry.entries(chosen.get(registry.setting)).items()
    }


def not_a_parameter(
    name: str, chosen: Mapping[str, str | None], registries: Sequence[Registry]
) -> str | None:
    """Return the error message for a parameter of a choice that was not made; None if no known choice has it.

    Args:
        chosen: setting → the choice made.
    """
    if name in MOVED_PARAMETERS:
        return f"{flag(name)}: moved out of the package; use {MOVED_PARAMETERS[name]}"
    for registry in registries:
        owners = [choice for choice in registry.known if name in registry.entries(choice)]
        if owners:
            setting, choice = flag(registry.setting), registry.name_of(chosen.get(registry.setting))
            preset = f"{chosen['advantage_estimator']} with " if registry.section == "algorithm" else ""
            return (
                f"{flag(name)}: {preset}{setting} {choice} has no such parameter; "
                f"{setting} {' or '.join(owners)} has it"
            )
    return None
