"""The checks of a configuration, those that need a room's registry included; imports torch."""

from __future__ import annotations

from megatron_ibpo.config import Config, check_config
from megatron_ibpo.credit import CRITIC, find_estimator, find_group_filter, find_operator
from megatron_ibpo.loss import VARIANTS
from megatron_ibpo.policy.objective import check_loss

__all__ = ["check_run"]


def check_run(config: Config) -> None:
    """Refuse a run that cannot work, as far as that shows without a model or data.

    Raises:
        ConfigError: with all problems at once, each naming its flag.
    """
    check_config(
        config,
        [
            lambda config: check_loss(config.loss),
            _check_critic,
            lambda config: find_operator(config.algorithm),
            lambda config: find_estimator(config.algorithm.advantages),
            lambda config: find_group_filter(config.algorithm),
        ],
    )


def _check_critic(config: Config) -> None:
    variant = VARIANTS.get(config.loss.loss_variant)
    if config.algorithm.advantages == CRITIC and variant and not variant.takes_token_advantages:
        raise ValueError(
            "--advantages critic gives every token its own advantage, and the --loss-variant takes one for a "
            "whole sequence; take ppo-clip, grpo or dapo"
        )
