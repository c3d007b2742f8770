"""A run's settings from a command line or a recipe, including the parameters of all methods."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ibpo import config
from megatron_ibpo.credit import REGISTRIES


def parse_config(argv: Sequence[str], **about: Any) -> config.Config:
    """Return the configuration for a command line (`megatron_ibpo.config.parse_config`).

    Args:
        about: `program` and `description`, for --help.

    Raises:
        ConfigError: as there.
    """
    return config.parse_config(argv, REGISTRIES, **about)


def load_recipe(path: Path | str, **settings: Any) -> config.Config:
    """Return the configuration of a recipe, as `--config` reads it, with `settings` on top.

    Args:
        path: the recipe's YAML file; a relative path counts from the working directory, or from the
            repository if nothing is there.
        settings: the names of flags with underscores and their values, such as `num_rollout=2`.

    Raises:
        ConfigError: as `megatron_ibpo.config.load_recipe`.
    """
    return config.load_recipe(path, settings, REGISTRIES)
