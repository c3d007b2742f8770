"""A run's settings from a command line or a recipe, including the parameters of all methods."""

import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ibpo import config, credit
from megatron_ibpo.engines.registry import DEFAULTS, samples_in_trainer
from megatron_ibpo.engines.registry import PARAMETERS as ENGINE_PARAMETERS
from megatron_ibpo.models import ModelConfigError, read_hf_config

REGISTRIES = (*credit.REGISTRIES, ENGINE_PARAMETERS)
"""Settings whose choices have parameters of their own."""
CONTEXTS_PER_RESPONSE = 4
"""Context length per response length where neither is given, since a correction prompt holds two
responses."""


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parse_config(
    argv: Sequence[str],
    *,
    note: Callable[[str], None] = _to_stderr,
    unused: Mapping[str, str] | None = None,
    **about: Any,
) -> config.Config:
    """Return the configuration for a command line (`megatron_ibpo.config.parse_config`). Lengths of a recipe
    that exceed the model's context are lowered; lengths that the user typed are not.

    Args:
        note: gets a line for every length that is lowered, and for every unused field that the user typed.
        unused: field without effect in this command → what is said if the user typed it.
        about: `program` and `description`, for --help.

    Raises:
        ConfigError: as there.
    """

    def fit(parsed: config.Config, typed: Set[str]) -> config.Config:
        fitted, notes = fit_to_model(parsed, typed)
        idle = unused or {}
        lines = [line for name, line in notes.items() if name not in idle]
        for line in [*lines, *(reason for name, reason in idle.items() if name in typed)]:
            note(line)
        return fitted

    return config.parse_config(argv, REGISTRIES, fit=fit, **about)


def with_engine(parsed: config.Config) -> config.Config:
    """Return the configuration for sampling without a trainer. An engine that samples inside a trainer is
    replaced by the default one, with its default settings, which a line to stderr says."""
    backend = parsed.rollout.rollout_backend
    if not samples_in_trainer(backend):
        return parsed
    _to_stderr(
        f"--rollout-backend {backend} samples in a trainer's process; without one, "
        f"{' or '.join(DEFAULTS)} does: the first that can compute the model"
    )
    defaults = {name: entry.default for name, entry in ENGINE_PARAMETERS.entries(None).items()}
    return replace(parsed, rollout=replace(parsed.rollout, rollout_backend=None, parameters=defaults))


def fit_to_model(parsed: config.Config, typed: Set[str]) -> tuple[config.Config, dict[str, str]]:
    """Return the configuration with lengths that the model's context allows, and for every field that changed
    a line that says so.

    The limit of responses is lowered in proportion to the context. A configuration that fits, or whose model
    cannot be read, is returned unchanged; opening the run says what is wrong with such a model.

    Args:
        typed: fields that the user set on the command line; these keep their values.
    """
    hf_dir, requested = parsed.model.hf_checkpoint, parsed.rollout.rollout_max_context_len
    if hf_dir is None or "rollout_max_context_len" in typed:
        return parsed, {}
    try:
        limit = read_hf_config(hf_dir).max_position_embeddings
    except ModelConfigError:
        return parsed, {}
    longest = parsed.rollout.rollout_max_response_len
    if limit < CONTEXTS_PER_RESPONSE or limit >= (longest + 1 if requested is None else requested):
        return parsed, {}
    rollout, run, changes = parsed.rollout, parsed.run, dict[str, str]()
    if requested is not None:
        rollout = replace(rollout, rollout_max_context_len=limit)
        changes["rollout_max_context_len"] = f"{requested} of the recipe → {limit}, the model's context"
    meant = requested or CONTEXTS_PER_RESPONSE * longest
    proportion = f"in proportion to the context of {limit}"
    if "rollout_max_response_len" not in typed:
        shorter = max(1, longest * limit // meant)
        rollout = replace(rollout, rollout_max_response_len=shorter)
        changes["rollout_max_response_len"] = f"{longest} → {shorter}, {proportion}"
    held_out = run.eval_max_response_len
    if held_out is not None and "eval_max_response_len" not in typed:
        shorter = max(1, held_out * limit // meant)
        run = replace(run, eval_max_response_len=shorter)
        changes["eval_max_response_len"] = f"{held_out} → {shorter}, {proportion}"
    notes = {name: f"{name} {change}" for name, change in changes.items()}
    return replace(parsed, rollout=rollout, run=run), notes


def load_recipe(path: Path | str, **settings: Any) -> config.Config:
    """Return the configuration of a recipe, as `--config` reads it, with `settings` on top.

    Args:
        path: the name of a recipe of the package, such as "small_cpu"; or a YAML file. A relative path counts
            from the working directory, or from the repository if nothing is there.
        settings: the names of flags with underscores and their values, such as `num_rollout=2`. Where a flag
            names code, the object itself is taken too, and where it names prompts, a list of rows or a
            `datasets.Dataset`: they are stored under the run's directory, and the configuration names the
            files (`megatron_ibpo.config.hooks`).

    Raises:
        ConfigError: as `megatron_ibpo.config.load_recipe`; or an object or a row cannot be stored.
    """
    chosen_dir = {"run_dir": settings["run_dir"]} if "run_dir" in settings else {}
    settings = config.stored_settings(
        settings, lambda: config.load_recipe(path, chosen_dir, REGISTRIES).run.run_dir
    )
    loaded = config.load_recipe(path, settings, REGISTRIES)
    fitted, notes = fit_to_model(loaded, settings.keys())
    for line in notes.values():
        _to_stderr(line)
    return fitted
