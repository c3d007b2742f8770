"""Parameters of what a setting names: a credit method, a token credit, an estimator.

Each is a dataclass whose fields are its parameters, typed and documented as those of `Config`. A flag or
recipe key of one counts where that one is chosen, and is refused elsewhere.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_ibpo.config.algorithm import AlgorithmConfig
from megatron_ibpo.config.all_fields import ENTRIES, PARAMETERS, Entry, entry_of, flag
from megatron_ibpo.config.config_error import ConfigError
from megatron_ibpo.config.hooks import MOVED_PARAMETERS


@dataclass(frozen=True)
class Registry:
    """The choices of one setting."""

    setting: str
    """Field of AlgorithmConfig that names the choice."""
    known: Mapping[str, Any]
    """Name → the class that has the parameters, or an object without any."""
    find: Callable[[str], Any]
    """Return the same for a name or an import path; ValueError where there is none."""

    def entries(self, name: str) -> dict[str, Entry]:
        """Return the parameters of what is called `name`."""
        return parameter_entries(self.find(name))


@cache
def parameter_entries(found: Any) -> dict[str, Entry]:
    """Return the parameters of a class by name; none where it is no dataclass."""
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        return {}
    hints = typing.get_type_hints(found, include_extras=True)
    entries = {
        field.name: entry_of(field.name, PARAMETERS, hints[field.name], default=field.default)
        for field in dataclasses.fields(found)
    }
    for name, entry in entries.items():
        if name in ENTRIES:
            raise ConfigError(f"{found.__name__}: its parameter {name} is a setting of every run; rename it")
        if entry.default is dataclasses.MISSING:
            raise ConfigError(f"{found.__name__}: its parameter {name} needs a default")
    return entries


def built(found: Any, parameters: Mapping[str, Any]) -> Any:
    """Return the object that `found` makes of those of the parameters that are its own.

    Raises:
        ConfigError: with a line for every value that lies outside its range.
    """
    if not isinstance(found, type):
        return found
    entries = parameter_entries(found)
    own = {name: parameters[name] for name in entries if name in parameters}
    problems = [problem for name in own if (problem := entries[name].out_of_range(own[name]))]
    if problems:
        raise ConfigError("\n".join(problems))
    return found(**own)


def entries_of(algorithm: AlgorithmConfig, registries: Sequence[Registry]) -> dict[str, Entry]:
    """Return the parameters of all that the algorithm chooses."""
    return {
        name: entry
        for registry in registries
        for name, entry in registry.entries(getattr(algorithm, registry.setting)).items()
    }


def not_a_parameter(name: str, chosen: Mapping[str, str], registries: Sequence[Registry]) -> str | None:
    """Return what to say of a parameter of a choice that is not made; None where no known choice has it.

    Args:
        chosen: setting → what it names.
    """
    if name in MOVED_PARAMETERS:
        return f"{flag(name)}: moved out of the package; name {MOVED_PARAMETERS[name]}"
    for registry in registries:
        owners = [choice for choice in registry.known if name in registry.entries(choice)]
        if owners:
            setting, preset = flag(registry.setting), chosen["advantage_estimator"]
            return (
                f"{flag(name)}: {preset} with {setting} {chosen[registry.setting]} has no such parameter; "
                f"{setting} {' or '.join(owners)} has it"
            )
    return None
