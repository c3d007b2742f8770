"""Parsing a command line into `Config`.

Every field is a flag (`--tensor-model-parallel-size 2`, `--no-sequence-parallel`) and a key of a flat YAML
recipe (dash or underscore). Precedence, weakest first: the fields' defaults, `--config` files in the order
given, flags. `megatron_ibpo.config.presets` defines where a preset counts.
"""

import argparse
import dataclasses
import io
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import redirect_stderr
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.text import shown
from megatron_ibpo.config.all_fields import ENTRIES, Entry, flag
from megatron_ibpo.config.config import Config
from megatron_ibpo.config.config_error import ConfigError
from megatron_ibpo.config.help import COMMON_FLAGS, HELP_FLAGS, help_text, usage_text
from megatron_ibpo.config.parameters import Registry, entries_of
from megatron_ibpo.config.paths import path_in_recipe, path_of_user, recipe_file
from megatron_ibpo.config.peer_flags import peer_override
from megatron_ibpo.config.presets import Layer, of_this_version, resolve
from megatron_ibpo.config.recipes import config_yaml, read_recipe, type_words, typed_settings
from megatron_ibpo.config.unknown_settings import unknown_setting

_TRAINING = "Train a policy by IBPO: Megatron-core trains, vLLM samples."


def parse_config(
    argv: Sequence[str],
    registries: Sequence[Registry],
    *,
    fit: Callable[[Config, Set[str]], Config] = lambda config, typed: config,
    program: str = "ibpo train",
    description: str = _TRAINING,
    common: Sequence[str] = COMMON_FLAGS,
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """Return the configuration for a command line, with absolute paths (see `megatron_ibpo.config.paths`).

    Args:
        registries: the choices that have their own parameters.
        fit: changes the configuration, given the names of the fields that the user set by flags; all others
            come from recipes, presets or defaults.
        program: name for --help, with `description` and the fields that matter most to it (`common`).
        defaults: its own defaults of fields, which recipes and flags override.

    `--help`, `--print-config` and wrong values end the process (SystemExit 0, 0 and 2).

    Raises:
        ConfigError: unknown flags, those of other trainers with their name here; too many values, or none; a
            recipe that cannot be read, has an unknown or repeated key or a value of the wrong type; an
            unknown preset or choice; a parameter that the choice does not have; words that are not UTF-8.
    """
    _check_words(argv)
    argv = ["--help" if word in ("-h", "-help") else word for word in argv]
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--help", nargs="*")
    early.add_argument("--help-all", "--help_all", action="store_true")
    early.add_argument("--config", action="append", default=[])
    early.add_argument("--print-config", "--print_config", action="store_true")
    # these decide which values of earlier layers still apply, and which parameters exist
    for name in _DECIDE:
        early.add_argument(name, "--" + name[2:].replace("-", "_"), default=argparse.SUPPRESS)
    # may be repeated, and replaces a recipe's
    early.add_argument(
        "--eval-prompt-data", "--eval_prompt_data", nargs="+", action="extend", default=argparse.SUPPRESS
    )
    try:
        known, flags = early.parse_known_args(argv)
    except argparse.ArgumentError as error:
        name = str(error.argument_name).partition("/")[0]
        said = "is a switch, which takes no value" if "ignored" in error.message else "needs a value"
        raise ConfigError(f"{name}: {said}") from None
    flags = _with_values(flags)

    recipes = [recipe_file(name, path_of_user) for name in known.config]
    layers = [layer for path in recipes for layer in _recipe_layers(path, registries)]
    typed = {name: value for name, value in vars(known).items() if name in ENTRIES}
    if specs := typed.get("eval_prompt_data"):
        typed["eval_prompt_data"] = specs[0] if len(specs) == 1 else tuple(specs)
    names_prompts = any(word.partition("=")[0].replace("_", "-") == "--prompt-data" for word in flags)
    given = [Layer(defaults or {}), *layers, Layer(typed)]
    config = resolve(_held_out_with_their_prompts(given, names_prompts), registries)
    if known.help_all or known.help is not None:
        if known.help_all or not known.help:
            print(usage_text(program, description))
        print(help_text(config, registries, None if known.help_all else known.help, common))
        raise SystemExit(0)
    if flags:
        _refuse_unknown(flags, config, registries)
        config = _with_flags(config, registries, flags)
    _locate(config, registries)
    config = fit(config, typed.keys() | (ENTRIES.keys() & _names_set(flags)))
    if known.print_config:
        print(config_yaml(config), end="")
        raise SystemExit(0)
    return config


def load_recipe(path: Path | str, settings: Mapping[str, Any], registries: Sequence[Registry]) -> Config:
    """Return the configuration of a recipe with `settings` on top, typed and located as a second recipe's.

    Raises:
        ConfigError: the recipe cannot be read; an unknown key, a value of the wrong type, an unknown preset
            or choice, or a parameter that the choice does not have.
    """
    recipe = _recipe_layers(recipe_file(path, path_in_recipe), registries)
    listed = {name: list(own) if isinstance(own, tuple) else own for name, own in settings.items()}
    layers = [*recipe, Layer(*typed_settings(listed))]
    config = resolve(_held_out_with_their_prompts(layers, names_prompts=False), registries)
    _locate(config, registries)
    return config


def _recipe_layers(path: Path, registries: Sequence[Registry]) -> list[Layer]:
    """Return the settings of a recipe, after those of the recipes that it builds on."""
    return [of_this_version(Layer(*recipe), registries) for recipe in read_recipe(path)]


def _locate(config: Config, registries: Sequence[Registry]) -> None:
    """Make the paths absolute that no recipe has given, in place."""
    for entry in (ENTRIES | entries_of(config, registries)).values():
        entry.put(config, entry.located(entry.get(config), in_recipe=False))


def _names_set(flags: Sequence[str]) -> set[str]:
    """Return the names of the fields and parameters that flags set, among other words."""
    names = {word.partition("=")[0][2:].replace("-", "_") for word in flags if word.startswith("--")}
    return names | {name.removeprefix("no_") for name in names}


def _held_out_with_their_prompts(layers: Sequence[Layer], names_prompts: bool) -> list[Layer]:
    """Return the layers, of which one that names prompts of its own takes back held-out prompts that an
    earlier one named together with others: those say nothing about a policy that is trained on these.

    Args:
        names_prompts: True if a flag, in the last layer, names prompts.
    """
    found: list[Layer] = []
    are_a_pair = False
    for number, layer in enumerate(layers, start=1):
        prompts = "prompt_data" in layer.fields or (names_prompts and number == len(layers))
        if "eval_prompt_data" in layer.fields:
            are_a_pair = prompts
        elif prompts and are_a_pair:
            layer = dataclasses.replace(layer, fields={**layer.fields, "eval_prompt_data": None})
            are_a_pair = False
        found.append(layer)
    return found


def _with_flags(config: Config, registries: Sequence[Registry], flags: Sequence[str]) -> Config:
    parameters = entries_of(config, registries)
    # of all fields only those that are set: tyro takes a quarter of a second for a parser of all
    given = _names_set(flags)
    known = {name: entry for name, entry in (ENTRIES | parameters).items() if name in given}
    try:
        values = _values(known, flags, config)
    except SystemExit:
        raise ConfigError("\n  ".join(_of_another_type(known, flags, config))) from None
    for name, entry in known.items():
        entry.put(config, values[name])
    return config


def _values(entries: Mapping[str, Entry], flags: Sequence[str], config: Config) -> dict[str, Any]:
    """Return the values that these flags give to fields, by name; SystemExit if they cannot be read."""
    import tyro  # imported here so that a trainer needs no tyro

    kind = dataclasses.make_dataclass("Flags", [(name, entry.hint) for name, entry in entries.items()])
    default = kind(**{name: entry.get(config) for name, entry in entries.items()})
    with redirect_stderr(io.StringIO()):  # tyro draws a box
        return vars(tyro.cli(kind, args=flags, default=default))


def _of_another_type(known: Mapping[str, Entry], flags: Sequence[str], config: Config) -> Iterator[str]:
    """Yield a line for each flag whose value is not of its field's type."""
    for typed, words in _by_flag(flags)[1:]:
        entry = _entry_of(typed, known)
        assert entry is not None  # others were refused
        try:
            _values({entry.name: entry}, [typed, *words], config)
        except SystemExit:
            yield f"{typed}: {shown(' '.join(words))} is not {type_words(entry.type)}"


def _refuse_unknown(flags: Sequence[str], config: Config, registries: Sequence[Registry]) -> None:
    """Refuse all flags that do not exist, that belong to a method not chosen or to another trainer, and those
    with too many values or without one."""
    known = ENTRIES | entries_of(config, registries)
    chosen = vars(config.algorithm) | vars(config.rollout)
    names = [*known, *(name.split()[0][2:] for name in HELP_FLAGS)]
    problems: list[str | None] = []
    for typed, words in _by_flag(flags):
        entry = _entry_of(typed, known)
        if typed and entry is None:
            problems.append(unknown_setting(typed, names, chosen, registries))
        answers = [peer_override(word) for word in words]
        values = [word for word, answer in zip(words, answers, strict=True) if answer is None]
        problems += [*answers, _wrong_number(typed, entry, values)]
    found = [problem for problem in problems if problem is not None]
    if len(found) > 1:
        found.insert(0, f"{len(found)} wrong flags:")
    if found:
        raise ConfigError("\n  ".join(found))


def _entry_of(typed: str, known: Mapping[str, Entry]) -> Entry | None:
    """Return the field that a flag sets, also as --no-NAME if it is a switch; None if there is none."""
    name = typed.removeprefix("--").replace("-", "_")
    off = known.get(name.removeprefix("no_"))
    return known.get(name) or (off if off is not None and _is_switch(off) else None)


def _is_switch(entry: Entry) -> bool:
    return bool in (entry.type, *typing.get_args(entry.type))


def _by_flag(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each flag with the words that follow it; those before the first flag with ""."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for word in words:
        if word.startswith("--"):
            typed, is_pair, value = word.partition("=")
            found.append((typed, [value] if is_pair else []))
        else:
            found[-1][1].append(word)
    return found


def _wrong_number(typed: str, entry: Entry | None, values: Sequence[str]) -> str | None:
    """Return what is wrong with the number of a flag's values; None if nothing is."""
    if entry is None:
        return f"{values[0]}: not a flag; flags begin with --" if values and not typed else None
    on, is_switch = flag(entry.name), _is_switch(entry)
    if is_switch and len(values) > (entry.type is not bool):
        elsewhere = f"; {_GIVEN_ELSEWHERE[on[2:]]}" if on[2:] in _GIVEN_ELSEWHERE else ""
        switch = f"{on} or {on.replace('--', '--no-', 1)}"
        return f"{typed} {values[-1]}: a switch, {switch}, which takes no value{elsewhere}"
    kinds = (entry.type, *typing.get_args(entry.type))
    # no value empties a recipe's list, but a run cannot do without prompts
    is_list = tuple in [typing.get_origin(kind) for kind in kinds] and (values or not entry.has_sources)
    if is_switch or is_list or len(values) == 1:
        return None
    return (
        f"{typed}: takes one value, so {values[1]} is one too many" if values else f"{typed}: needs a value"
    )


_GIVEN_ELSEWHERE = {
    "save": "the directory is --run-dir",
    "save-debug-rollout-data": "the records are written into --run-dir",
    "use-wandb": "the key is set by `wandb login`",
}
"""Switches of ours that take a value in other trainers → where that value is given here."""


def _with_values(words: Sequence[str]) -> list[str]:
    """Add the value to switches that may also be None. Users type them as plain switches, but tyro wants a
    value."""
    switches = {flag(name) for name, entry in ENTRIES.items() if entry.type == bool | None}
    spelled = {switch: [switch, "True"] for switch in switches}
    spelled |= {switch.replace("--", "--no-", 1): [switch, "False"] for switch in switches}
    found: list[str] = []
    for word, following in zip_longest(words, words[1:]):
        has_value = following in ("None", "True", "False")
        found += [word] if has_value else spelled.get(word.replace("_", "-"), [word])
    return found


_DECIDE = (
    "--advantage-estimator", "--loss-variant", "--ibpo-operator", "--token-credit", "--advantages",
    "--rollout-backend",
)  # fmt: skip
"""Flags that are parsed before the others."""
_NEVER_DASHES = ("--config", *_DECIDE)
"""Flags whose value `--` argparse would drop, as the end of the flags."""


def _check_words(argv: Sequence[str]) -> None:
    """Refuse words that the parsers would fail on or misread."""
    paths = {flag(name) for name, entry in ENTRIES.items() if entry.is_path}
    previous = ""
    for word in argv:
        if not word.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ConfigError(f"the command line's {word!r} is not UTF-8")
        name, is_pair, value = word.partition("=")
        name, previous_name = name.replace("_", "-"), previous.replace("_", "-")
        if is_pair and value == "--" and name in _NEVER_DASHES:
            raise ConfigError(f"{name}: -- is not a value; give one, or leave the flag out")
        empty = name if is_pair and not value else previous_name if not word else ""
        if empty in paths:  # pathlib reads it as the user's directory
            raise ConfigError(f"{empty}: is empty; name a path, or leave the flag out")
        previous = word
