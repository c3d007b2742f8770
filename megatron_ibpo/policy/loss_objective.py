"""Builds the objective of the loss entry points from the configuration."""

from collections.abc import Iterable

import torch

from megatron_ibpo.config import Config, LossConfig, named_values
from megatron_ibpo.loss import (
    ChosenBackend,
    Objective,
    check_calls,
    check_terms,
    choose_backend,
    make_objective,
    resolve_variant,
)


def run_objective(config: Config, divisor: str | float, backend: ChosenBackend) -> Objective:
    """Return the run's loss of a mini-batch, with the divisor of `aggregation`. Raises as `loss_params`."""
    loss = config.loss
    return make_objective(
        loss.loss_variant,
        loss_params(loss),
        aggregation=divisor,
        kl=loss.kl_estimator,
        kl_coef=loss.kl_coef,
        backend=backend.name,
    )


def gspo_objective(config: Config, device: torch.device) -> Objective:
    """Return GSPO as published, whatever the run trains with: the gradient meter compares with it."""
    backend = choose_backend(config.loss.loss_backend, device, _logits_dtype(config))
    return make_objective("gspo", backend=backend.name)


def loss_params(loss: LossConfig) -> dict[str, float]:
    """Return all parameters of the run's loss variant: those of the flags, and the variant's own defaults.
    Raises ValueError for an unknown variant, and for a parameter that it lacks, that is out of range, no
    number, or given by a clip's flag and --loss-param."""
    named = _named_params(loss.loss_param)
    low, high = loss.eps_clip, loss.eps_clip_high
    if high is None and "eps_high" not in named:
        high = low
    flag_values = {"eps_low": low, "eps_high": high}
    clips = {name: value for name, value in flag_values.items() if value is not None}
    for name in named.keys() & clips.keys():
        raise ValueError(
            f"--loss-param {name}: is set by --eps-clip or --eps-clip-high too; keep one of them"
        )
    try:
        return resolve_variant(loss.loss_variant, clips | named)[1]
    except ValueError as error:
        prefix = f"--loss-variant {loss.loss_variant}: "
        clipped = " (--eps-clip and --eps-clip-high are eps_low and eps_high)" if clips else ""
        raise ValueError(f"{prefix}{str(error).removeprefix(prefix)}{clipped}") from error


def _named_params(pairs: Iterable[str]) -> dict[str, float]:
    params: dict[str, float] = {}
    for name, value in named_values(pairs).items():
        try:
            params[name] = float(value)
        except ValueError as error:
            raise ValueError(f"--loss-param {name}={value}: must be a number, such as {name}=0.2") from error
    return params


def check_loss(loss: LossConfig) -> None:
    """Refuse settings that no loss supports. Raises ValueError as `loss_params` does, for a mistake in a
    term, and for --fuse-lm-head with a variant whose token term needs its whole sequence first."""
    params = loss_params(loss)
    variant = resolve_variant(loss.loss_variant)[0]
    try:
        check_calls(variant, params)
    except ValueError as error:
        raise ValueError(f"--loss-variant {loss.loss_variant}: {error}") from error
    if loss.fuse_lm_head and variant.sequence_ratio:
        raise ValueError(
            f"--fuse-lm-head with --loss-variant {loss.loss_variant}: its token term needs the mean over "
            "the whole sequence; drop --fuse-lm-head, or take gspo, which is the same with one advantage "
            "per sequence"
        )


def aggregation(config: Config, mean_length: float) -> str | float:
    """Return the divisor of a sequence's sum over tokens in every micro-batch of a mini-batch with the
    `planning.weighted_mean_length` given."""
    chosen = config.loss.loss_aggregation
    if chosen == "variant":
        chosen = resolve_variant(config.loss.loss_variant)[0].aggregation
    if chosen == "constant":
        return float(config.rollout.rollout_max_response_len)
    return chosen if chosen == "sequence-mean" else mean_length


def backend_in_use(config: Config, device: torch.device) -> ChosenBackend:
    """Return the back end that computes the loss on this device. Raises ValueError for an unknown variant,
    one that kernels would compute and cannot, and --loss-backend triton where they cannot be used."""
    loss = config.loss
    chosen = choose_backend(loss.loss_backend, device, _logits_dtype(config))
    if chosen.name == "triton" and not loss.fuse_lm_head:  # the fused head takes terms in torch
        try:
            check_terms(run_objective(config, 1.0, chosen))
        except ValueError as error:
            raise ValueError(
                f"--loss-variant {loss.loss_variant}: {error}; --loss-backend torch needs no kernels"
            ) from error
    return chosen


def check_kernels(config: Config) -> None:
    """Refuse, before any process starts, a loss that kernels would compute and cannot."""
    if config.loss.loss_backend == "triton" or torch.cuda.is_available():
        backend_in_use(config, torch.device("cuda"))


def _logits_dtype(config: Config) -> torch.dtype:
    return torch.bfloat16 if config.model.bf16 else torch.float32
