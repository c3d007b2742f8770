"""Configuration of a run: fields with range and reason, flags, recipes, presets, and checks."""

from megatron_ibpo.config.algorithm import AlgorithmConfig, LossConfig
from megatron_ibpo.config.config import Config, EvalSampling, check_config, eval_sampling
from megatron_ibpo.config.config_error import ConfigError, nearest
from megatron_ibpo.config.data import DataConfig, environment_in, rm_type_in
from megatron_ibpo.config.flags import load_recipe, parse_config
from megatron_ibpo.config.hooks import known_or_path, load_hook, load_module, stored_settings
from megatron_ibpo.config.parameters import Registry, built
from megatron_ibpo.config.paths import (
    EvalSpec,
    as_specs,
    display_name,
    path_in_recipe,
    path_of_user,
    searched,
    user_directory,
)
from megatron_ibpo.config.presets import PRESETS, algorithm_of
from megatron_ibpo.config.recipes import config_yaml, read_yaml, write_config
from megatron_ibpo.config.rollout import EnvironmentConfig, RolloutConfig
from megatron_ibpo.config.run import EVAL_PRESETS
from megatron_ibpo.config.trainer import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_ibpo.config.values import (
    COUNT,
    NOT_NEGATIVE,
    UNIT,
    at_least,
    named_values,
    or_word,
    within,
)

__all__ = [
    "COUNT",
    "EVAL_PRESETS",
    "NOT_NEGATIVE",
    "PRESETS",
    "UNIT",
    "AlgorithmConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "EnvironmentConfig",
    "EvalSampling",
    "EvalSpec",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Registry",
    "RolloutConfig",
    "algorithm_of",
    "as_specs",
    "at_least",
    "built",
    "check_config",
    "config_yaml",
    "display_name",
    "environment_in",
    "eval_sampling",
    "known_or_path",
    "load_hook",
    "load_module",
    "load_recipe",
    "named_values",
    "nearest",
    "or_word",
    "parse_config",
    "path_in_recipe",
    "path_of_user",
    "read_yaml",
    "rm_type_in",
    "searched",
    "stored_settings",
    "user_directory",
    "within",
    "write_config",
]
