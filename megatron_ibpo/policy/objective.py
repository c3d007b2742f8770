"""From the configuration of the loss to the arguments of its door."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megatron_ibpo.config import Config, LossConfig
from megatron_ibpo.loss import ChosenBackend, choose_backend, resolve_variant

__all__ = ["Objective", "aggregation", "backend_in_use", "check_loss", "clip_params", "gspo_objective"]


@dataclass(frozen=True)
class Objective:
    """The loss of a mini-batch, as its door wants it told."""

    variant: str
    clip_params: dict[str, float]
    divisor: str | float
    """What divides a sequence's sum over tokens: see `aggregation`."""
    backend: Literal["triton", "torch"]


def gspo_objective(config: Config, device: torch.device) -> Objective:
    """GSPO as published, whatever the run trains with: what the gradient meter compares with."""
    dtype = torch.bfloat16 if config.model.bf16 else torch.float32
    backend = choose_backend(config.loss.loss_backend, device, dtype, "gspo")
    return Objective("gspo", {}, "sequence-mean", backend.name)


def clip_params(loss: LossConfig) -> dict[str, float]:
    """What --eps-clip and --eps-clip-high set of the variant's parameters; without them they are its own.

    Raises:
        ValueError: an unknown variant, or one that has no such clip.
    """
    low, high = loss.eps_clip, loss.eps_clip_high
    given = {"eps_low": low, "eps_high": low if high is None else high}
    params = {name: value for name, value in given.items() if value is not None}
    try:
        resolve_variant(loss.loss_variant, params)
    except ValueError as error:
        raise ValueError(f"--loss-variant with --eps-clip, --eps-clip-high: {error}") from error
    return params


def check_loss(loss: LossConfig) -> None:
    """Refuse settings that no loss has.

    Raises:
        ValueError: as `clip_params`; --fuse-lm-head with a variant whose token term needs its whole sequence
            first.
    """
    clip_params(loss)
    if loss.fuse_lm_head and resolve_variant(loss.loss_variant, None)[0].sequence_ratio:
        raise ValueError(
            f"--fuse-lm-head with --loss-variant {loss.loss_variant}: its token term needs the mean of its "
            "whole sequence; drop --fuse-lm-head, or take gspo, the same for one advantage a sequence"
        )


def aggregation(config: Config, mean_length: float) -> str | float:
    """What divides a sequence's sum over tokens in every micro-batch of a mini-batch.

    Args:
        mean_length: `planning.weighted_mean_length` of the mini-batch, which a token mean divides by.
    """
    chosen = config.loss.loss_aggregation
    if chosen == "variant":
        chosen = resolve_variant(config.loss.loss_variant, None)[0].aggregation
    if chosen == "constant":
        return float(config.rollout.rollout_max_response_len)
    return chosen if chosen == "sequence-mean" else mean_length


def backend_in_use(config: Config, device: torch.device) -> ChosenBackend:
    """What will compute the loss on this device.

    Raises:
        ValueError: --loss-backend triton where the kernels cannot be used.
    """
    dtype = torch.bfloat16 if config.model.bf16 else torch.float32
    return choose_backend(config.loss.loss_backend, device, dtype, config.loss.loss_variant)
