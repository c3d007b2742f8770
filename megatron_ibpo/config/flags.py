"""A command line to `Config`.

Every field is a flag (`--tensor-model-parallel-size 2`, `--no-sequence-parallel`) and a key of a flat YAML
recipe (dash or underscore). What wins, weakest first: the fields' defaults, `--config` files in the order
given, flags. `megatron_ibpo.config.presets` says where a preset counts.
"""

import argparse
from collections.abc import Sequence
from itertools import zip_longest

from megatron_ibpo.config.all_fields import ENTRIES, flag
from megatron_ibpo.config.config_error import ConfigError
from megatron_ibpo.config.fields import Config
from megatron_ibpo.config.paths import path_of_user
from megatron_ibpo.config.presets import resolve
from megatron_ibpo.config.recipes import config_yaml, read_recipe

_TRAINING = "Train a policy by IBPO: Megatron-core trains, vLLM samples."
_RECIPES = """

Besides the flags below: --config FILE.yaml reads a recipe with these flags as keys (may be repeated, the
later file wins, flags win over files); --print-config prints the resolved recipe and exits."""


def parse_config(
    argv: Sequence[str], *, program: str = "megatron_ibpo.commands.train", description: str = _TRAINING
) -> Config:
    """The configuration that a command line means, with absolute paths (see `megatron_ibpo.config.paths`).

    Args:
        program: for --help, with what it does.

    `--help`, `--print-config` and wrong flags end the process (SystemExit 0, 0 and 2).

    Raises:
        ConfigError: a recipe that cannot be read, has an unknown or repeated key or a value of the wrong
            type; an unknown preset; words that are no text, or no value where there must be one.
    """
    _check_words(argv)
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", type=path_of_user, action="append", default=[])
    early.add_argument("--print-config", "--print_config", action="store_true")
    # these two decide what earlier layers still mean
    early.add_argument("--advantage-estimator", "--advantage_estimator", default=argparse.SUPPRESS)
    early.add_argument("--loss-variant", "--loss_variant", default=argparse.SUPPRESS)
    # may be repeated, and takes the place of a recipe's
    early.add_argument(
        "--eval-prompt-data", "--eval_prompt_data", nargs="+", action="extend", default=argparse.SUPPRESS
    )
    known, flags = early.parse_known_args(list(argv))
    flags = _with_values(flags)

    layers = [read_recipe(path) for path in known.config]
    typed = {name: value for name, value in vars(known).items() if name in ENTRIES}
    if specs := typed.get("eval_prompt_data"):
        typed["eval_prompt_data"] = specs[0] if len(specs) == 1 else tuple(specs)
    layers.append(typed)
    defaults = Config()
    for name, value in resolve(layers, defaults.algorithm.advantage_estimator).items():
        ENTRIES[name].put(defaults, value)

    # tyro builds a parser for every field, which takes ten times as long as all the rest
    config = _with_flags(defaults, flags, program, description) if flags else defaults
    for entry in ENTRIES.values():
        entry.put(config, entry.located(entry.get(config), in_recipe=False))
    if known.print_config:
        print(config_yaml(config), end="")
        raise SystemExit(0)
    return config


def _with_flags(defaults: Config, flags: Sequence[str], program: str, description: str) -> Config:
    import tyro  # here, so that a trainer does without it

    return tyro.cli(
        Config,
        args=flags,
        default=defaults,
        prog=program,
        description=description + _RECIPES,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _with_values(words: Sequence[str]) -> list[str]:
    """A switch that has a third position, to be left to the device, is typed like any other; tyro wants its
    value."""
    switches = {flag(name) for name, entry in ENTRIES.items() if entry.type == bool | None}
    spelled = {switch: [switch, "True"] for switch in switches}
    spelled |= {switch.replace("--", "--no-", 1): [switch, "False"] for switch in switches}
    found: list[str] = []
    for word, following in zip_longest(words, words[1:]):
        has_value = following in ("None", "True", "False")
        found += [word] if has_value else spelled.get(word.replace("_", "-"), [word])
    return found


_NEVER_DASHES = ("--config", "--advantage-estimator", "--loss-variant")
"""Flags whose value argparse takes away when it is `--`, as the end of all flags."""


def _check_words(argv: Sequence[str]) -> None:
    """Refuse what the parsers would stumble over, or take for something else."""
    paths = {flag(name) for name, entry in ENTRIES.items() if entry.is_path}
    previous = ""
    for word in argv:
        if not word.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ConfigError(f"the command line's {word!r} is not UTF-8")
        name, is_pair, value = word.partition("=")
        name, previous_name = name.replace("_", "-"), previous.replace("_", "-")
        if is_pair and value == "--" and name in _NEVER_DASHES:
            raise ConfigError(f"{name}: -- is no value")
        empty = name if is_pair and not value else previous_name if not word else ""
        if empty in paths:  # pathlib takes it for the directory where the user stands
            raise ConfigError(f"{empty}: is empty; name a path, or leave the flag out")
        previous = word
