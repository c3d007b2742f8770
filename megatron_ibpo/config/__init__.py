"""What a run is told: fields with range and reason, flags, recipes, presets, and what cannot work."""

from megatron_ibpo.config.checks import check_config
from megatron_ibpo.config.config_error import ConfigError, nearest
from megatron_ibpo.config.device import on_device
from megatron_ibpo.config.eval_sampling import EVAL_PRESETS, EvalSampling, eval_sampling
from megatron_ibpo.config.eval_specs import EvalSpec, as_specs
from megatron_ibpo.config.fields import (
    AlgorithmConfig,
    Config,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
)
from megatron_ibpo.config.flags import parse_config
from megatron_ibpo.config.hooks import known_or_path, load_hook, load_module
from megatron_ibpo.config.paths import path_in_recipe, path_of_user, searched, user_directory
from megatron_ibpo.config.presets import PRESETS
from megatron_ibpo.config.ranges import named_values
from megatron_ibpo.config.recipes import config_yaml, read_yaml, write_config

__all__ = [
    "EVAL_PRESETS",
    "PRESETS",
    "AlgorithmConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "EvalSampling",
    "EvalSpec",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RolloutConfig",
    "as_specs",
    "check_config",
    "config_yaml",
    "eval_sampling",
    "known_or_path",
    "load_hook",
    "load_module",
    "named_values",
    "nearest",
    "on_device",
    "parse_config",
    "path_in_recipe",
    "path_of_user",
    "read_yaml",
    "searched",
    "user_directory",
    "write_config",
]
