"""Flags and recipe files to `Config`, and back.

`megatron_ibpo.config` is the one source: every field is a flag (`--tensor-model-parallel-size 2`,
`--no-sequence-parallel`) and a key of a flat YAML recipe (dash or underscore). What wins, weakest first:
the fields' defaults, `--config` files in the order given, flags. The preset that `advantage-estimator` names
counts where it is named: it wins over files before that place, and what is given in the same file, in later
ones or by flags wins over it. Clips and `loss-param` belong to the loss variant: where a file, a flag or a
preset names another variant, those given before are forgotten.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import io
import os
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro
import yaml

from megatron_ibpo.config import Config, LossConfig
from megatron_ibpo.credit import PRESETS, check_algorithm

__all__ = ["ConfigError", "check_config", "config_yaml", "parse_config", "read_yaml", "write_config"]

_DESCRIPTION = """Train a policy by IBPO: Megatron-core trains, vLLM samples.

Besides the flags below: --config FILE.yaml reads a recipe with these flags as keys (may be repeated, the
later file wins, flags win over files); --print-config prints the resolved recipe and exits."""


class ConfigError(ValueError):
    """A configuration that cannot work; the text names every problem and what to do."""


def parse_config(argv: Sequence[str]) -> Config:
    """The configuration that a command line means.

    `--help`, `--print-config` and wrong flags end the process (SystemExit 0, 0 and 2); under a launcher only
    rank 0 prints.

    Raises:
        ConfigError: a recipe that cannot be read, has an unknown key or a value of the wrong type; an
            unknown preset.
    """
    speaks = int(os.environ.get("RANK", 0)) == 0
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", type=Path, action="append", default=[])
    early.add_argument("--print-config", "--print_config", action="store_true")
    early.add_argument("--advantage-estimator", "--advantage_estimator")
    early.add_argument("--loss-variant", "--loss_variant")
    known, flags = early.parse_known_args(list(argv))

    layers = [_read_recipe(path) for path in known.config]
    named = {name: getattr(known, name) for name in ("advantage_estimator", "loss_variant")}
    layers.append({name: value for name, value in named.items() if value is not None})
    defaults = Config()
    for name, value in _resolve(layers, defaults.algorithm.advantage_estimator).items():
        _set(defaults, name, value)

    config = tyro.cli(
        Config,
        args=flags,
        default=defaults,
        prog="megatron_ibpo.train",
        description=_DESCRIPTION,
        config=(tyro.conf.OmitArgPrefixes,),
        console_outputs=speaks,
    )
    if known.print_config:
        if speaks:
            print(config_yaml(config), end="")
        raise SystemExit(0)
    return config


_OF_VARIANT = ("eps_clip", "eps_clip_high", "loss_param")
"""Fields that mean something for one loss variant only."""


def _resolve(layers: Sequence[dict[str, Any]], default_preset: str) -> dict[str, Any]:
    """Fields and values of recipes, a later one winning over an earlier one, and of the preset in force.

    Raises:
        ConfigError: an unknown preset.
    """
    preset, given = default_preset, dict[str, Any]()
    for layer in layers:
        variant_before = (PRESETS[preset] | given)["loss_variant"]
        preset = layer.get("advantage_estimator", preset)
        if preset not in PRESETS:
            raise ConfigError(f"--advantage-estimator: no preset {preset!r}{_nearest(preset, PRESETS)}")
        if "advantage_estimator" in layer:
            given = {name: value for name, value in given.items() if name not in PRESETS[preset]}
        given |= layer
        if (PRESETS[preset] | given)["loss_variant"] != variant_before:
            given = {name: value for name, value in given.items() if name not in _OF_VARIANT or name in layer}
    return PRESETS[preset] | given


def config_yaml(config: Config) -> str:
    """The configuration as a flat recipe; read back by `--config` it gives an equal `Config`."""
    text = io.StringIO()
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        flat = {
            field.name.replace("_", "-"): _plain(getattr(part, field.name))
            for field in dataclasses.fields(part)
        }
        text.write(f"# {section.name}\n")
        yaml.safe_dump(flat, text, sort_keys=False, allow_unicode=True, width=1000)
    return text.getvalue()


def write_config(config: Config, path: Path) -> None:
    """Write the resolved configuration of a run as a recipe."""
    path.write_text(config_yaml(config), encoding="utf-8")


def check_config(config: Config) -> None:
    """Refuse what cannot work, as far as that shows without a model or data.

    Raises:
        ConfigError: with all problems at once, each naming its flag.
    """
    problems = [
        f"{_flag(name)}: must be {rule}, is {value}"
        for name, (holds, rule) in _RANGES.items()
        if (value := _get(config, name)) is not None and not holds(value)
    ]
    problems += _missing_inputs(config)
    problems += _contradictions(config)
    from megatron_ibpo.policy.objective import check_loss  # imports torch, which --help does not need

    for check in (
        partial(check_loss, config.loss),
        partial(
            check_algorithm,
            config.algorithm,
            config.data.reward_threshold,
            takes_token_advantages=_takes_token_advantages(config.loss),
        ),
    ):
        try:
            check()
        except ValueError as error:
            problems += str(error).splitlines()
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(
            f"{count} in the configuration:\n" + "\n".join(f"  {problem}" for problem in problems)
        )


def _takes_token_advantages(loss: LossConfig) -> bool:
    """Of an unknown variant too, whose name is another check's to refuse."""
    from megatron_ibpo.policy.objective import takes_token_advantages

    try:
        return takes_token_advantages(loss)
    except ValueError:
        return True


# ---------------------------------------------------------------------------------------------- recipes


def read_yaml(path: Path, name: str) -> Any:
    """What the file holds. Raises ConfigError, with `name` for the file, where it cannot be read."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: is not YAML: {error}") from error


def _read_recipe(path: Path) -> dict[str, Any]:
    """A YAML recipe as {field name: value}, keys and types checked."""
    content = read_yaml(path, f"--config {path}")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: must hold `key: value` lines, holds a {type(content).__name__}")
    recipe: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in _TYPES:
            raise ConfigError(f"{path}: unknown key {key!r}{_nearest(name, _TYPES)}")
        if name in recipe:
            raise ConfigError(f"{path}: key {key!r} is given twice")
        try:
            recipe[name] = _typed(value, _TYPES[name])
        except TypeError as error:
            raise ConfigError(f"{path}: {key}: {value!r} is not {error}") from error
    return recipe


def _typed(value: Any, hint: Any) -> Any:
    """`value` as the type `hint` says; TypeError with the expected type in words when it is not one."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for choice in typing.get_args(hint):
            try:
                return _typed(value, choice)
            except TypeError:
                continue
    elif origin is Literal:
        if value in typing.get_args(hint):
            return value
    elif origin is tuple:
        if isinstance(value, list):
            return tuple(_typed(item, typing.get_args(hint)[0]) for item in value)
    elif hint is float and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 3e-4 as text
        except (TypeError, ValueError):
            pass
    elif hint is int and isinstance(value, bool):
        pass
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif isinstance(value, hint):
        return value
    raise TypeError(_words(hint))


def _words(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_words(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return f"a list, each item {_words(typing.get_args(hint)[0])}"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    return names.get(hint, "null")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


# --------------------------------------------------------------------------------------- fields by name


def _field_places() -> tuple[dict[str, str], dict[str, Any]]:
    sections, hints = {}, {}
    for section, kind in typing.get_type_hints(Config).items():
        for name, hint in typing.get_type_hints(kind).items():
            if name in sections:
                raise AssertionError(f"two configuration fields are called {name}")
            sections[name], hints[name] = section, hint
    return sections, hints


_SECTIONS, _TYPES = _field_places()


def _get(config: Config, name: str) -> Any:
    return getattr(getattr(config, _SECTIONS[name]), name)


def _set(config: Config, name: str, value: Any) -> None:
    setattr(getattr(config, _SECTIONS[name]), name, value)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.0)
    return f"; did you mean {close[0]!r}?" if close else ""


# ------------------------------------------------------------------------------------------------ checks

_Rule = tuple[Callable[[Any], bool], str]
_AT_LEAST_1: _Rule = (lambda value: value >= 1, "at least 1")
_NOT_NEGATIVE: _Rule = (lambda value: value >= 0, "at least 0")
_POSITIVE: _Rule = (lambda value: value > 0, "above 0")
_BELOW_1: _Rule = (lambda value: 0 <= value < 1, "at least 0 and below 1")
_TOP_K: _Rule = (lambda value: value == -1 or value >= 1, "-1 (off) or at least 1")
_SHARE: _Rule = (lambda value: 0 < value <= 1, "above 0 and at most 1")

_RANGES: dict[str, _Rule] = {
    "max_tokens_per_gpu": _AT_LEAST_1,
    "recompute_num_layers": _AT_LEAST_1,
    "moe_aux_loss_coeff": _NOT_NEGATIVE,
    "tensor_model_parallel_size": _AT_LEAST_1,
    "pipeline_model_parallel_size": _AT_LEAST_1,
    "decoder_first_pipeline_num_layers": _AT_LEAST_1,
    "decoder_last_pipeline_num_layers": _AT_LEAST_1,
    "expert_model_parallel_size": _AT_LEAST_1,
    "expert_tensor_parallel_size": _AT_LEAST_1,
    "context_parallel_size": (lambda value: value == 1, "1 (context parallel is not built yet)"),
    "distributed_timeout_minutes": _POSITIVE,
    "lr": _POSITIVE,
    "critic_lr": _POSITIVE,
    "min_lr_ratio": (lambda value: 0 <= value <= 1, "between 0 and 1"),
    "lr_warmup_fraction": _BELOW_1,
    "adam_beta1": _BELOW_1,
    "adam_beta2": _BELOW_1,
    "adam_eps": _POSITIVE,
    "weight_decay": _NOT_NEGATIVE,
    "clip_grad": _POSITIVE,
    "kl_coef": _NOT_NEGATIVE,
    "tis_clip": _POSITIVE,
    "value_clip": _POSITIVE,
    "num_steps_per_rollout": _AT_LEAST_1,
    "reward_timeout": _POSITIVE,
    "reward_workers": _AT_LEAST_1,
    "rollout_batch_size": _AT_LEAST_1,
    "n_samples_per_prompt": _AT_LEAST_1,
    "rollout_max_response_len": _AT_LEAST_1,
    "rollout_temperature": (lambda value: value > 0, "above 0 (greedy samples of a prompt are all the same)"),
    "rollout_top_p": _SHARE,
    "rollout_top_k": _TOP_K,
    "rollout_temperature_cycle": (lambda values: all(value > 0 for value in values), "all above 0"),
    "rollout_top_p_cycle": (lambda values: all(map(_SHARE[0], values)), f"all {_SHARE[1]}"),
    "rollout_top_k_cycle": (lambda values: all(map(_TOP_K[0], values)), f"all {_TOP_K[1]}"),
    "dynamic_sampling_rounds": _AT_LEAST_1,
    "rollout_num_gpus_per_engine": _AT_LEAST_1,
    "vllm_gpu_memory_utilization": _SHARE,
    "vllm_kv_cache_bytes": _AT_LEAST_1,
    "vllm_max_num_seqs": _AT_LEAST_1,
    "vllm_start_timeout": _POSITIVE,
    "rollout_timeout": _POSITIVE,
    "update_weight_buffer_size": _AT_LEAST_1,
    "update_weight_timeout": _POSITIVE,
    "num_rollout": _AT_LEAST_1,
    "budget": _POSITIVE,
    "seed": _NOT_NEGATIVE,
    "data_seed": _NOT_NEGATIVE,
    "save_interval": _AT_LEAST_1,
    "eval_interval": _AT_LEAST_1,
    "eval_num_prompts": _NOT_NEGATIVE,
    "n_samples_per_eval_prompt": _AT_LEAST_1,
    "gradient_meter_interval": _AT_LEAST_1,
    "gradient_meter_blocks": (lambda value: value >= 2, "at least 2 (a spread needs two of them)"),
    "max_nonfinite_steps": _AT_LEAST_1,
    "dry_run_world_size": _AT_LEAST_1,
    "dry_run_gpus_per_node": _AT_LEAST_1,
    "dry_run_gpu_memory_gib": _POSITIVE,
}


def _missing_inputs(config: Config) -> list[str]:
    """What has to be named or to exist; a dry run needs the model only."""
    run, data = config.run, config.data
    problems = []
    if config.model.hf_checkpoint is None:
        problems.append("--hf-checkpoint: required, a directory in Hugging Face format")
    elif not config.model.hf_checkpoint.is_dir():
        problems.append(f"--hf-checkpoint: {config.model.hf_checkpoint} is not a directory")
    if run.load is not None and not run.load.is_dir():
        problems.append(f"--load: {run.load} is not a directory")
    replayed = run.load_debug_rollout_data
    if replayed is not None and not replayed.is_dir():
        problems.append(f"--load-debug-rollout-data: {replayed} is not a directory")
    if run.use_wandb and importlib.util.find_spec("wandb") is None:
        problems.append("--use-wandb: the package wandb is not installed; pip install wandb")
    if run.dry_run or replayed is not None:
        return problems
    if data.prompt_data is None:
        problems.append(
            "--prompt-data: required, PATH.jsonl or a generated task such as reasoning_gym://chain_sum"
        )
    if run.eval_num_prompts > 0 and data.eval_prompt_data is None:
        problems.append(
            "--eval-prompt-data: required for evaluation; --eval-num-prompts 0 turns evaluation off"
        )
    return problems


def _contradictions(config: Config) -> list[str]:
    """Fields that are fine alone and not together."""
    rollout, loss, run = config.rollout, config.loss, config.run
    problems = []
    if loss.num_steps_per_rollout >= 1 and rollout.rollout_batch_size % loss.num_steps_per_rollout:
        problems.append(
            f"--num-steps-per-rollout: {loss.num_steps_per_rollout} mini-batches of whole prompts cannot be "
            f"made equally from --rollout-batch-size {rollout.rollout_batch_size}"
        )
    if rollout.n_samples_per_prompt == 1 and config.algorithm.advantages == "group":
        problems.append(
            "--n-samples-per-prompt: 1 leaves nothing to compare; at least 2, or --advantages critic"
        )
    if run.eval_compare_and_correct and run.n_samples_per_eval_prompt < config.algorithm.ibpo_k:
        problems.append(
            f"--eval-compare-and-correct: shows --ibpo-k {config.algorithm.ibpo_k} samples of a prompt, and "
            f"--n-samples-per-eval-prompt is {run.n_samples_per_eval_prompt}"
        )
    context = rollout.rollout_max_context_len
    if context is not None and context <= rollout.rollout_max_response_len:
        problems.append(
            f"--rollout-max-context-len: {context} leaves no room for a prompt beside "
            f"--rollout-max-response-len {rollout.rollout_max_response_len}"
        )
    schedule = config.optimizer
    if run.budget is not None and (schedule.lr_decay_style != "constant" or schedule.lr_warmup_fraction > 0):
        problems.append(
            "--budget: how many steps it allows is not known beforehand, so the learning rate can follow no "
            "schedule; use --lr-decay-style constant --lr-warmup-fraction 0"
        )
    if run.debug_rollout_only and run.load_debug_rollout_data is not None:
        problems.append("--debug-rollout-only: cannot be combined with --load-debug-rollout-data")
    return problems
