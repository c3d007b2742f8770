"""The checks of a configuration that need a room's registry."""

from collections.abc import Callable

from megatron_ibpo.basics.versions import missing
from megatron_ibpo.config import Config, ConfigError, check_config
from megatron_ibpo.credit import (
    CRITIC,
    find_estimator,
    find_group_filter,
    find_operator,
    find_token_credit,
)
from megatron_ibpo.engines.registry import check_engine
from megatron_ibpo.policy.overrides import check_overrides
from megatron_ibpo.rewards import reward_functions


def check_installed() -> None:
    """Refuse to start where a package is missing that runs need.

    Raises:
        ConfigError: with the names of the packages.
    """
    if names := missing():
        raise ConfigError(
            f"not installed: {', '.join(names)}; `bash tools/bootstrap.sh` installs what a run needs"
        )


def check_run(config: Config) -> None:
    """Refuse a run that cannot work, as far as that shows without a model or data.

    Raises:
        ConfigError: with all problems at once, each naming its flag.
    """
    check_config(config, [*_WITHOUT_TORCH, _check_loss])


def check_settings(config: Config) -> None:
    """The part of `check_run` that needs no torch.

    Raises:
        ConfigError: as there.
    """
    check_config(config, _WITHOUT_TORCH)


def check_evaluation(config: Config) -> None:
    """Refuse an evaluation on its own that cannot work, as far as that shows without a model or data.

    Raises:
        ConfigError: with all problems at once, each naming its flag.
    """
    check_config(config, _WITHOUT_TORCH, trains=False)


def check_loss_of_run(config: Config) -> None:
    """The other part: a loss that cannot work. Importing torch takes a second.

    Raises:
        ConfigError: an unknown variant, parameters that it has not or that lie outside its ranges, or a
            combination that no loss has.
    """
    try:
        _check_loss(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None


_WITHOUT_TORCH: tuple[Callable[[Config], object], ...] = (
    lambda config: find_operator(config.algorithm),
    lambda config: find_estimator(config.algorithm.advantages),
    lambda config: find_token_credit(config.algorithm),
    lambda config: find_group_filter(config.algorithm),
    lambda config: check_engine(config.rollout.rollout_backend),
    lambda config: reward_functions(config.data),
    check_overrides,
)


def _check_loss(config: Config) -> None:
    from megatron_ibpo.loss import resolve_variant
    from megatron_ibpo.policy.loss_objective import check_loss

    check_loss(config.loss)
    variant, _ = resolve_variant(config.loss.loss_variant)
    if config.algorithm.advantages == CRITIC and not variant.takes_token_advantages:
        raise ValueError(
            "--advantages critic gives every token its own advantage, and the --loss-variant takes one for a "
            "whole sequence; take ppo-clip, grpo or dapo"
        )
