"""The answer to a name that is no setting, and to a value that is no choice: the same on the command line, in
recipes and in Python."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from megatron_ibpo.basics.text import shown
from megatron_ibpo.config.all_fields import flag
from megatron_ibpo.config.config_error import nearest_name
from megatron_ibpo.config.parameters import Registry, not_a_parameter
from megatron_ibpo.config.peer_flags import SYNONYMS, peer_answer

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
    other = setting.replace("-", "_")
    lacking = None if other in names else not_a_parameter(other, chosen, registries)
    # a parameter of a choice that was not made is named with the choice that has it
    return f"; did you mean {_spelled(other, typed)!r}?" if lacking is None else f"; {lacking}"


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
