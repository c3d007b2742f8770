"""A run's settings from a command line or a recipe, including the parameters of all methods; and the checks
of them that need the registries of other packages."""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ibpo import config, credit
from megatron_ibpo.basics.versions import missing
from megatron_ibpo.config import EVAL_PRESETS, Config, ConfigError, as_specs, check_config, eval_sampling
from megatron_ibpo.credit import Operator, check_credit, find_estimator, find_group_filter, find_operator
from megatron_ibpo.credit.estimators import gives_token_advantages
from megatron_ibpo.engines.registry import (
    DEFAULTS,
    check_engine,
    check_limits,
    check_truncation,
    samples_in_trainer,
    variant_readers,
)
from megatron_ibpo.engines.registry import PARAMETERS as ENGINE_PARAMETERS
from megatron_ibpo.models import ModelConfigError, read_hf_config
from megatron_ibpo.policy.overrides import check_overrides
from megatron_ibpo.rewards import reward_functions

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


def check_installed() -> None:
    """Raise ConfigError with the names of required packages that are missing."""
    if names := missing():
        raise ConfigError(
            f"not installed: {', '.join(names)}; `bash tools/bootstrap.sh` installs what a run needs"
        )


def check_run(config: Config) -> None:
    """Refuse a run that cannot work, as far as that shows without a model or data. Raises ConfigError with
    all problems at once, each naming its flag."""
    # top-k and top-p for a variant that needs other log-probs; in a run `resolve`, which knows its devices
    _check(config, _check_loss, lambda config: check_truncation(config, variant_readers(config)))


def check_settings(config: Config) -> None:
    """Run the part of `check_run` that needs no torch. Raises as it."""
    _check(config)


def check_evaluation(config: Config) -> None:
    """Refuse an evaluation on its own that cannot work, as far as that shows without a model or data. Raises
    as `check_run`."""
    _check(config, trains=False)


def check_loss_of_run(config: Config) -> None:
    """Run the part of `check_run` that needs torch, which takes a second to import. Raises ConfigError for an
    unknown variant, parameters that it lacks or that are out of range, and a combination that no loss
    supports."""
    try:
        _check_loss(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def doubtful_settings(config: Config, operator: Operator) -> list[str]:
    """Return warnings about settings that work but may not be intended."""
    algorithm = config.algorithm
    shapes_alone = operator.ibpo_lambda > 0 and operator.ibpo_plain_prompt == "none"
    notes = {
        "samples may be older than the policy that they train, and nothing corrects for it; --use-tis, "
        "--icepop or --sequence-rejection would (docs/loss_variants.md)": (
            config.rollout.max_staleness > 0 and not config.loss.corrections
        ),
        f"with --n-samples-per-prompt 2, --advantages {algorithm.advantages} gives a right and a wrong "
        "response advantages of equal size and opposite sign, whatever the bonus is; the bonus has an "
        "effect with 3 or more responses, or with --advantages group-mean": (
            shapes_alone
            and config.rollout.n_samples_per_prompt == 2
            and algorithm.advantages in ("group", "group-bessel")
        ),
    }
    return [note for note, holds in notes.items() if holds]


def _check(config: Config, *further_checks: Callable[[Config], object], trains: bool = True) -> None:
    checks: list[Callable[[Config], object]] = [*_WITHOUT_TORCH, partial(check_limits, trains=trains)]
    if trains:
        checks.append(check_truncation)
    check_config(config, [*checks, *further_checks], trains=trains)


def _check_corrected_evaluation(config: Config) -> None:
    run, data = config.run, config.data
    if not run.eval_compare_and_correct or not (run.eval_preset is None or run.eval_preset in EVAL_PRESETS):
        return
    samples, k = eval_sampling(config).samples, find_operator(config.algorithm).ibpo_k
    says_how_many = run.n_samples_per_eval_prompt is not None or run.eval_preset is not None
    schemes = [
        spec.spec.partition("://")[0] for spec in as_specs(data.eval_prompt_data) if "://" in spec.spec
    ]
    # a benchmark has its own number of samples
    has_benchmark = any(scheme not in ("reasoning_gym", "import") for scheme in schemes)
    if samples < k and (says_how_many or not has_benchmark):
        raise ValueError(
            f"--eval-compare-and-correct: a correction is shown --ibpo-k {k} samples of its prompt, but "
            f"--n-samples-per-eval-prompt is {samples}; raise it to {k} or more"
        )


_WITHOUT_TORCH: tuple[Callable[[Config], object], ...] = (
    check_credit,
    lambda config: find_group_filter(config.algorithm),
    lambda config: check_engine(config.rollout),
    lambda config: reward_functions(config.data),
    check_overrides,
    _check_corrected_evaluation,
)


def _check_loss(config: Config) -> None:
    from megatron_ibpo.loss import resolve_variant
    from megatron_ibpo.policy.loss_objective import check_kernels, check_loss

    variant, _ = resolve_variant(config.loss.loss_variant)
    _check_token_inputs(variant.token_inputs, config)
    check_loss(config.loss)
    check_kernels(config)
    try:
        by_token = gives_token_advantages(find_estimator(config.algorithm))
    except ValueError:  # `check_credit` says what is wrong with it
        return
    if by_token and not variant.takes_token_advantages:
        raise ValueError(
            f"--advantages {config.algorithm.advantages} gives every token its own advantage, but this "
            "--loss-variant takes one advantage per sequence; take ppo-clip, grpo or dapo"
        )


def _check_token_inputs(token_inputs: Collection[str], config: Config) -> None:
    if "ref_logprobs" in token_inputs and config.loss.kl_coef == 0:
        raise ValueError(
            "this --loss-variant reads ref_logprobs, which need a reference policy; set --kl-coef above 0"
        )
    if "positions" in token_inputs and config.parallel.context_parallel_size > 1:
        raise ValueError(
            "this --loss-variant reads token positions, which are not known under context parallelism; "
            "use --context-parallel-size 1"
        )
