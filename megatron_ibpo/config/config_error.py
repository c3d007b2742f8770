"""The error for a configuration that cannot work, and helpers for its message: names that are close, and the
names of other trainers.

`peer_flags.yaml` holds the flags and keys of TRL, slime, OpenRLHF, verl and NeMo-RL: their names here, and
where a meaning differs.
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

_RESEMBLANCE = 0.5
"""Smallest share of matching letters for a suggestion; weaker matches would only puzzle the user."""
_LONGEST = 200
"""Characters of an unknown name that are compared: a data row may have any number of them."""


class ConfigError(ValueError):
    """A configuration that cannot work. The message names every problem and what to do."""


def broken(rules: Mapping[str, bool]) -> list[str]:
    """Return the problems that are present; a rule says for each whether it is."""
    return [problem for problem, is_there in rules.items() if is_there]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: `; did you mean 'lr'?`, or "" if no name is close.
    Dashes and underscores are equivalent."""
    close = nearest_name(name, known)
    return "" if close is None else f"; did you mean {close!r}?"


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is closest to an unknown one; None if none is close."""
    spellings = {str(other).replace("_", "-"): other for other in known}
    close = difflib.get_close_matches(
        str(name)[:_LONGEST].replace("_", "-"), spellings, n=1, cutoff=_RESEMBLANCE
    )
    return spellings[close[0]] if close else None


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TABLES = yaml.load(Path(__file__).with_name("peer_flags.yaml").read_text(encoding="utf-8"), _Loader)


def _by_word(words: Mapping[str, str]) -> dict[str, str]:
    return {word: ours for ours, theirs in words.items() for word in theirs.split()}


FLAGS: dict[str, dict[str, str]] = _TABLES["flags"]
"""Project → flag, without dashes → what it is here."""
KEYS: dict[str, dict[str, str]] = {
    project: {f"{section}.{key}": text for section, keys in sections.items() for key, text in keys.items()}
    for project, sections in _TABLES["keys"].items()
}
"""Project → key → what it is here."""
SYNONYMS = _by_word(_TABLES["synonyms"])
"""Another word for a setting, with dashes → the setting."""
VALUES = {flag: _by_word(words) for flag, words in _TABLES["values"].items()}
"""Flag → a value of other trainers, or another word → the value here."""
_KEYS_BY_FLAG = {
    leaf.replace("_", "-"): key for key in KEYS["verl"] if "_" in (leaf := key.rpartition(".")[2])
}
"""Last part of a key of verl, as a flag → the key."""


def peer_answer(typed: str) -> str | None:
    """Return what a setting of another trainer is called here; None for any other name. It may be a flag with
    its dashes, a key of a recipe, or a keyword of Python."""
    name = typed.removeprefix("--").replace("_", "-")
    for project, flags in FLAGS.items():
        if name in flags:
            return f"{typed}: a flag of {project}; here {flags[name]}"
    return _key_answer(typed, _KEYS_BY_FLAG.get(name, typed.removeprefix("--")))


def peer_override(word: str) -> str | None:
    """Return the answer of `peer_answer` for a word of the command line that is a Hydra override, KEY=VALUE;
    None for other words."""
    key, is_pair, _ = word.lstrip("+").partition("=")
    return _key_answer(key, key) if is_pair else None


def _key_answer(typed: str, key: str) -> str | None:
    for project, keys in KEYS.items():
        if key in keys:
            origin = f"a key of {project}" if typed.removeprefix("--") == key else f"{project}'s {key}"
            return f"{typed}: {origin}; here {keys[key]}"
    return None


def nearest_value(flag: str, name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown value, as `nearest`: other trainers' words come first."""
    meant = VALUES.get(flag, {}).get(name.lower())
    return nearest(name, known) if meant is None else f"; did you mean {meant!r}?"
