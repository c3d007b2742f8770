"""Command-line parsing of a run's settings, including the parameters of all methods."""

from collections.abc import Sequence
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
