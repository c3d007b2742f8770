"""Parameters of the choice of a setting: a credit method, a token credit, an estimator or an engine; and the
answer to a name that is neither a setting nor a parameter. Each choice is a dataclass whose fields are its
parameters, typed and documented as those of `Config`; they are accepted only when it is chosen."""

import dataclasses
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

from megatron_ibpo.basics.text import shown
from megatron_ibpo.config.config import ENTRIES, Config, Entry, entry_of, flag
from megatron_ibpo.config.config_error import SYNONYMS, ConfigError, nearest_name, peer_answer


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


def parameter_entries(choice: Any, section: str = "algorithm") -> dict[str, Entry]:
    """Return the parameters of a class by name; none unless it is a dataclass."""
    is_dataclass = isinstance(choice, type) and dataclasses.is_dataclass(choice)
    return _entries_of(choice, section) if is_dataclass else {}  # other objects may have no hash


@cache
def _entries_of(choice: type, section: str) -> dict[str, Entry]:
    hints = typing.get_type_hints(choice, include_extras=True)
    entries = {
        field.name: entry_of(field.name, section, hints[field.name], default=field.default, is_parameter=True)
        for field in dataclasses.fields(choice)
    }
    for name, entry in entries.items():
        if name in ENTRIES:
            raise ConfigError(f"{choice.__name__}: its parameter {name} is a setting of every run; rename it")
        if entry.default is dataclasses.MISSING:
            raise ConfigError(f"{choice.__name__}: its parameter {name} needs a default")
    return entries


def built(choice: Any, parameters: Mapping[str, Any]) -> Any:
    """Return the object that a choice builds from its own parameters. Raises ConfigError with one line per
    value out of range."""
    if not isinstance(choice, type):
        return choice
    entries = parameter_entries(choice)
    values = {name: parameters[name] for name in entries if name in parameters}
    problems = [problem for name in values if (problem := entries[name].out_of_range(values[name]))]
    if problems:
        raise ConfigError("\n".join(problems))
    return choice(**values)


def entries_of(config: Config, registries: Sequence[Registry]) -> dict[str, Entry]:
    """Return the parameters of all choices of a configuration."""
    chosen = {registry.setting: registry.choice_in(config) for registry in registries}
    return chosen_entries(chosen, registries)


def chosen_entries(chosen: Mapping[str, Any], registries: Sequence[Registry]) -> dict[str, Entry]:
    """Return the parameters of the choices made, by setting; a setting that is missing has its default."""
    return {
        name: entry
        for registry in registries
        for name, entry in registry.entries(chosen.get(registry.setting)).items()
    }


def not_a_parameter(
    name: str, chosen: Mapping[str, str | None], registries: Sequence[Registry]
) -> str | None:
    """Return the error message for a parameter of another choice than the one made for its setting; None if
    no known choice has it."""
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


_LONGEST, _DEEPEST, _MOST = 200, 6, 50
"""Most characters of a name that are shown, levels of a nested mapping, and settings of one."""


def unknown_setting(
    typed: str, names: Collection[str], chosen: Mapping[str, Any], registries: Sequence[Registry]
) -> str:
    """Return the answer to a name that is no setting: its name here if it is another trainer's, the choice
    that has such a parameter, a setting of the same meaning, or the nearest name.

    Args:
        typed: a flag with its dashes, a key of a recipe, or a keyword of Python.
        names: the names that exist, with underscores.
        chosen: setting → the choice made.
    """
    typed = typed if len(typed) <= _LONGEST and typed.isprintable() else shown(typed)
    name = typed.removeprefix("--").replace("-", "_")
    return (
        peer_answer(typed)
        or not_a_parameter(name.removeprefix("no_"), chosen, registries)
        or f"{typed}: no such setting{_suggestion(typed, name, names, chosen, registries)}"
    )


def _suggestion(
    typed: str, name: str, names: Collection[str], chosen: Mapping[str, Any], registries: Sequence[Registry]
) -> str:
    setting = SYNONYMS.get(name.replace("_", "-")) or nearest_name(name, names)
    if setting is None:
        return ""
    name_here = setting.replace("-", "_")
    lacking = None if name_here in names else not_a_parameter(name_here, chosen, registries)
    # a parameter of a choice that was not made is named with the choice that has it
    return f"; did you mean {_spelled(name_here, typed)!r}?" if lacking is None else f"; {lacking}"


def _spelled(name: str, typed: str) -> str:
    """Return a setting's name as the user spells names: as a flag, with dashes or with underscores."""
    if typed.startswith("--"):
        return flag(name)
    return name if "_" in typed and "-" not in typed else name.replace("_", "-")


def nested_names(key: str, value: Any) -> list[str]:
    """Return the names of the settings under an unknown key. A mapping, as in other trainers' recipes, has a
    name for each of its parts, joined by dots."""
    return list(islice(_leaves(key, value, _DEEPEST), _MOST))


def _leaves(key: str, value: Any, depth: int) -> Iterator[str]:
    if not isinstance(value, Mapping) or not value or not depth:
        yield key
        return
    for part, inner in value.items():
        yield from _leaves(f"{key}.{part}", inner, depth - 1)
