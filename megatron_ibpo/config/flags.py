"""Parsing a command line into `Config`.

Every field is a flag (`--tensor-model-parallel-size 2`, `--no-sequence-parallel`) and a key of a flat YAML
recipe (dash or underscore). Precedence, weakest first: the fields' defaults, `--config` files in the order
given, flags. `megatron_ibpo.config.presets` defines where a preset counts.
"""

import argparse
import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.text import shown
from megatron_ibpo.config.config import ENTRIES, Config, Entry, flag
from megatron_ibpo.config.config_error import ConfigError, peer_override
from megatron_ibpo.config.help import COMMON_FLAGS, HELP_FLAGS, help_text, usage_text
from megatron_ibpo.config.parameters import Registry, entries_of, unknown_setting
from megatron_ibpo.config.paths import path_in_recipe, path_of_user, recipe_file
from megatron_ibpo.config.presets import Layer, of_this_version, resolve
from megatron_ibpo.config.ranges import SOURCES
from megatron_ibpo.config.recipes import config_yaml, read_recipe, typed_settings
from megatron_ibpo.config.typed_values import alternatives, as_type, type_words

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
        early_flags, flags = early.parse_known_args(argv)
    except argparse.ArgumentError as error:
        name = str(error.argument_name).partition("/")[0]
        problem = "is a switch, which takes no value" if "ignored" in error.message else "needs a value"
        raise ConfigError(f"{name}: {problem}") from None

    recipes = [recipe_file(name, path_of_user) for name in early_flags.config]
    recipe_layers = [layer for path in recipes for layer in _recipe_layers(path, registries)]
    typed = {name: value for name, value in vars(early_flags).items() if name in ENTRIES}
    if specs := typed.get("eval_prompt_data"):
        typed["eval_prompt_data"] = specs[0] if len(specs) == 1 else tuple(specs)
    names_prompts = any(word.partition("=")[0].replace("_", "-") == "--prompt-data" for word in flags)
    layers = [Layer(defaults or {}), *recipe_layers, Layer(typed)]
    config = resolve(_held_out_with_their_prompts(layers, names_prompts), registries)
    if early_flags.help_all or early_flags.help is not None:
        if early_flags.help_all or not early_flags.help:
            print(usage_text(program, description))
        print(help_text(config, registries, None if early_flags.help_all else early_flags.help, common))
        raise SystemExit(0)
    if flags:
        _refuse_unknown(flags, config, registries)
        config = _with_flags(config, registries, flags)
    _locate(config, registries)
    config = fit(config, typed.keys() | (ENTRIES.keys() & _names_set(flags)))
    if early_flags.print_config:
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
    layers = [*recipe, Layer(*typed_settings(settings))]
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
    new_layers: list[Layer] = []
    are_a_pair = False
    for number, layer in enumerate(layers, start=1):
        prompts = "prompt_data" in layer.fields or (names_prompts and number == len(layers))
        if "eval_prompt_data" in layer.fields:
            are_a_pair = prompts
        elif prompts and are_a_pair:
            layer = dataclasses.replace(layer, fields={**layer.fields, "eval_prompt_data": None})
            are_a_pair = False
        new_layers.append(layer)
    return new_layers


def _with_flags(config: Config, registries: Sequence[Registry], flags: Sequence[str]) -> Config:
    entries = ENTRIES | entries_of(config, registries)
    problems: list[str] = []
    for flag_name, words in _by_flag(flags)[1:]:
        entry = _entry_of(flag_name, entries)
        assert entry is not None  # others were refused
        try:
            entry.put(config, _value(flag_name, words, entry, config))
        except TypeError:
            problems.append(f"{flag_name}: {shown(' '.join(words))} is not {type_words(entry.type)}")
    if problems:
        raise ConfigError("\n  ".join(problems))
    return config


def _value(flag_name: str, words: Sequence[str], entry: Entry, config: Config) -> Any:
    """Return the value that a flag with these words gives to its field; TypeError if they mean none."""
    if _is_switch(entry) and not words:
        return not _turns_off(flag_name, entry)
    spells_none = [*words] == ["None"] and types.NoneType in _kinds(entry)
    value = as_type(words if _is_list(entry) and not spells_none else words[0], entry.type)
    return (*entry.get(config), *value) if entry.has_names else value


def _refuse_unknown(flags: Sequence[str], config: Config, registries: Sequence[Registry]) -> None:
    """Refuse all flags that do not exist, that belong to a method not chosen or to another trainer, and those
    with too many values or without one."""
    entries = ENTRIES | entries_of(config, registries)
    chosen = vars(config.algorithm) | vars(config.rollout)
    names = [*entries, *(name.split()[0][2:] for name in HELP_FLAGS)]
    problems: list[str] = []
    for flag_name, words in _by_flag(flags):
        entry = _entry_of(flag_name, entries)
        if flag_name and entry is None:
            problems.append(unknown_setting(flag_name, names, chosen, registries))
        overrides = {word: answer for word in words if (answer := peer_override(word)) is not None}
        problems += overrides.values()
        problems += _wrong_number(flag_name, entry, [word for word in words if word not in overrides])
    if len(problems) > 1:
        problems.insert(0, f"{len(problems)} wrong flags:")
    if problems:
        raise ConfigError("\n  ".join(problems))


def _entry_of(flag_name: str, entries: Mapping[str, Entry]) -> Entry | None:
    """Return the field that a flag sets, also as --no-NAME if it is a switch; None if there is none."""
    name = flag_name.removeprefix("--").replace("-", "_")
    switch = entries.get(name.removeprefix("no_"))
    return entries.get(name) or (switch if switch is not None and _is_switch(switch) else None)


def _kinds(entry: Entry) -> set[Any]:
    return {typing.get_origin(kind) or kind for kind in alternatives(entry.type)}


def _is_switch(entry: Entry) -> bool:
    return bool in _kinds(entry)


def _is_list(entry: Entry) -> bool:
    return not _kinds(entry).isdisjoint((list, tuple))


def _turns_off(flag_name: str, entry: Entry) -> bool:
    """Return whether a flag of a switch is its --no-NAME."""
    return flag_name[2:].replace("-", "_") != entry.name


def _by_flag(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each flag with the words that follow it. Those before the first flag, and those from a word with
    one dash on, are with ""."""
    groups: list[tuple[str, list[str]]] = [("", [])]
    for word in words:
        if word.startswith("--"):
            flag_name, is_pair, value = word.partition("=")
            groups.append((flag_name, [value] if is_pair else []))
        elif re.match("-[A-Za-z]", word):
            groups.append(("", [word]))
        else:
            groups[-1][1].append(word)
    return groups


def _wrong_number(flag_name: str, entry: Entry | None, values: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with the number of a flag's values, if anything is."""
    if entry is None:
        if values and not flag_name:
            yield f"{values[0]}: not a flag; flags begin with --"
    elif _is_switch(entry):
        may_have_value = entry.type is not bool and not _turns_off(flag_name, entry)
        if values and not (may_have_value and [*values] in (["True"], ["False"], ["None"])):
            name = flag(entry.name)[2:]
            elsewhere = f"; {_GIVEN_ELSEWHERE[name]}" if name in _GIVEN_ELSEWHERE else ""
            switch = f"--{name} or --no-{name}"
            yield f"{flag_name} {values[-1]}: a switch, {switch}, which takes no value{elsewhere}"
    elif not values:
        # no value empties a recipe's list, but a run cannot do without prompts, and named values add up
        if not _is_list(entry) or SOURCES in entry.ranges or entry.has_names:
            yield f"{flag_name}: needs a value"
    elif values[1:] and not _is_list(entry):
        yield f"{flag_name}: takes one value, so {values[1]} is one too many"


_GIVEN_ELSEWHERE = {
    "save": "the directory is --run-dir",
    "save-debug-rollout-data": "the records are written into --run-dir",
    "use-wandb": "the key is set by `wandb login`",
}
"""Switches of ours that take a value in other trainers → where that value is given here."""
_DECIDE = (
    "--advantage-estimator", "--loss-variant", "--ibpo-operator", "--token-credit", "--advantages",
    "--rollout-backend",
)  # fmt: skip
"""Flags that are parsed before the others."""
_NEVER_DASHES = ("--config", *_DECIDE)
"""Flags whose value `--` argparse would drop, as the end of the flags."""


def _check_words(argv: Sequence[str]) -> None:
    """Refuse words that the parsers would fail on or misread."""
    paths = {flag(name) for name, entry in ENTRIES.items() if Path in alternatives(entry.type)}
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
