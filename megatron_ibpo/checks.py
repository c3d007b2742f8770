"""The checks of a configuration, those that need a room's registry included; imports torch."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_ibpo.config import Config, check_config, nearest
from megatron_ibpo.credit.assign import OPERATORS
from megatron_ibpo.loss import VARIANTS
from megatron_ibpo.policy.objective import check_loss

__all__ = ["check_run"]

_ADVANTAGES = ("group", "critic")


def check_run(config: Config) -> None:
    """Refuse a run that cannot work, as far as that shows without a model or data.

    Raises:
        ConfigError: with all problems at once, each naming its flag.
    """
    check_config(config, [lambda config: check_loss(config.loss), _check_critic, _check_credit])


def _check_critic(config: Config) -> None:
    variant = VARIANTS.get(config.loss.loss_variant)
    if config.algorithm.advantages == "critic" and variant and not variant.takes_token_advantages:
        raise ValueError(
            "--advantages critic gives every token its own advantage, and the --loss-variant takes one for a "
            "whole sequence; take ppo-clip, grpo or dapo"
        )


def _check_credit(config: Config) -> None:
    algorithm = config.algorithm
    problems = [
        *_unknown("--ibpo-operator", algorithm.ibpo_operator, OPERATORS),
        *_unknown("--advantages", algorithm.advantages, _ADVANTAGES),
    ]
    if problems:
        raise ValueError("\n".join(problems))


def _unknown(flag: str, name: str, known: Iterable[str]) -> list[str]:
    if name in known:
        return []
    return [f"{flag} {name}: unknown; there are {', '.join(known)}{nearest(name, known)}"]
