"""The checks of a configuration that need the registries of other packages."""

from collections.abc import Callable, Collection
from functools import partial

from megatron_ibpo.basics.versions import missing
from megatron_ibpo.config import EVAL_PRESETS, Config, ConfigError, as_specs, check_config, eval_sampling
from megatron_ibpo.credit import Operator, check_credit, find_estimator, find_group_filter, find_operator
from megatron_ibpo.credit.estimators import gives_token_advantages
from megatron_ibpo.engines.registry import check_engine, check_limits, check_truncation, variant_readers
from megatron_ibpo.policy.overrides import check_overrides
from megatron_ibpo.rewards import reward_functions


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
