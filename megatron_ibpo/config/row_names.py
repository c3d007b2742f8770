"""Names that a row of a data set may hold: a verifier and an environment.

Rows are as untrusted as a model's text: data sets come from the Hub. So an import path in a row, or a server,
is used only if the user allowed it by name. Every way to a row's verifier or environment leads through here.
"""

from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import parse_qsl

from megatron_ibpo.basics.records import ENVIRONMENT
from megatron_ibpo.basics.text import shown
from megatron_ibpo.config.config_error import ConfigError
from megatron_ibpo.config.data import DataConfig
from megatron_ibpo.config.hooks import is_import_path
from megatron_ibpo.config.paths import as_specs
from megatron_ibpo.config.rollout import EnvironmentConfig

RM_TYPE = "rm_type"
"""Key of a row's metadata that names its verifier; the other rows use --rm-type."""


def rm_type_in(metadata: Mapping[str, Any], data: DataConfig) -> str:
    """Return the name of a row's verifier: the row's own, or --rm-type.

    Raises:
        ConfigError: the row names an import path that the user did not.
    """
    named = metadata.get(RM_TYPE)
    name = data.rm_type if named is None else str(named)
    if name != data.rm_type and is_import_path(name):
        _check_allowed(RM_TYPE, name, _rewards_of_user(data), "--allowed-rm-types")
    return name


def environment_in(metadata: Mapping[str, Any], settings: EnvironmentConfig) -> str | None:
    """Return the environment that a row names, or --environment; None if its responses are of one turn.

    Raises:
        ConfigError: the row names an environment that the user did not.
    """
    named = metadata.get(ENVIRONMENT)
    if named is None:
        return settings.environment
    allowed = {settings.environment, *settings.allowed_environments}
    _check_allowed(ENVIRONMENT, str(named), allowed, "--allowed-environments")
    return str(named)


def _rewards_of_user(data: DataConfig) -> set[str]:
    """Return the verifiers that flags and recipes name."""
    specs = [*data.prompt_data, *(named.spec for named in as_specs(data.eval_prompt_data))]
    settings = [setting for spec in specs for setting in parse_qsl(spec.partition("?")[2])]
    of_sources = [value for name, value in settings if name == RM_TYPE]
    return {data.rm_type, *data.allowed_rm_types, *data.reward_weights, *of_sources}


def _check_allowed(key: str, name: str, allowed: Collection[str | None], flag: str) -> None:
    if name not in allowed:
        raise ConfigError(
            f"{key} {shown(name)}: a row may not choose code to run or a server to ask; if you trust this "
            f"one, allow it by name: {flag}"
        )
