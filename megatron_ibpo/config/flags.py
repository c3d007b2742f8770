"""A command line to `Config`.

Every field is a flag (`--tensor-model-parallel-size 2`, `--no-sequence-parallel`) and a key of a flat YAML
recipe (dash or underscore). What wins, weakest first: the fields' defaults, `--config` files in the order
given, flags. `megatron_ibpo.config.presets` says where a preset counts.
"""

import argparse
from collections.abc import Sequence

import tyro

from megatron_ibpo.config.entries import ENTRIES
from megatron_ibpo.config.fields import Config
from megatron_ibpo.config.paths import path_of_user
from megatron_ibpo.config.presets import resolve
from megatron_ibpo.config.recipes import config_yaml, read_recipe

_TRAINING = "Train a policy by IBPO: Megatron-core trains, vLLM samples."
_RECIPES = """

Besides the flags below: --config FILE.yaml reads a recipe with these flags as keys (may be repeated, the
later file wins, flags win over files); --print-config prints the resolved recipe and exits."""


def parse_config(
    argv: Sequence[str], *, program: str = "megatron_ibpo.train", description: str = _TRAINING
) -> Config:
    """The configuration that a command line means, with absolute paths (see `megatron_ibpo.config.paths`).

    Args:
        program: for --help, with what it does.

    `--help`, `--print-config` and wrong flags end the process (SystemExit 0, 0 and 2).

    Raises:
        ConfigError: a recipe that cannot be read, has an unknown or repeated key or a value of the wrong
            type; an unknown preset.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", type=path_of_user, action="append", default=[])
    early.add_argument("--print-config", "--print_config", action="store_true")
    # these two decide what earlier layers still mean
    early.add_argument("--advantage-estimator", "--advantage_estimator", default=argparse.SUPPRESS)
    early.add_argument("--loss-variant", "--loss_variant", default=argparse.SUPPRESS)
    known, flags = early.parse_known_args(list(argv))

    layers = [read_recipe(path) for path in known.config]
    layers.append({name: value for name, value in vars(known).items() if name in ENTRIES})
    defaults = Config()
    for name, value in resolve(layers, defaults.algorithm.advantage_estimator).items():
        ENTRIES[name].put(defaults, value)

    config = tyro.cli(
        Config,
        args=flags,
        default=defaults,
        prog=program,
        description=description + _RECIPES,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    for entry in ENTRIES.values():
        entry.put(config, entry.located(entry.get(config), in_recipe=False))
    if known.print_config:
        print(config_yaml(config), end="")
        raise SystemExit(0)
    return config
