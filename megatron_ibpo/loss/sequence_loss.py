"""The loss over packed sequences: one door; behind it plain torch, which defines it, or Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ibpo.loss.backend import LossBackend, choose_backend
from megatron_ibpo.loss.checks import (
    check_boundaries,
    check_penalty,
    check_sizes,
    resolve_aggregation,
    spread_temperature,
)
from megatron_ibpo.loss.kl import KLEstimator
from megatron_ibpo.loss.logprobs import packed_logprobs
from megatron_ibpo.loss.segments import Objective, Segments, SegmentStats, segment_loss
from megatron_ibpo.loss.variants import resolve_variant

__all__ = ["LossStats", "packed_sequence_loss"]


@dataclass(frozen=True)
class LossStats:
    """What the loss saw; nothing here carries a gradient."""

    logprobs_N: Tensor
    """Log-prob of each response token under the current policy; 0 in other rows."""
    entropy_N: Tensor
    """Entropy (nats) of the distribution in each response row; 0 in other rows."""
    mean_log_ratio_S: Tensor
    """Mean over response tokens of log π - log π_old; exp of it is GSPO's s_i."""
    clipped: Tensor
    """bool, [N] for variants with a token term, else [S]: the clip is what counts."""
    kl_N: Tensor | None
    """KL estimate of each response token against ref_logprobs_N, 0 in other rows; None without those."""


def packed_sequence_loss(
    logits_NV: Tensor,
    targets_N: Tensor,
    old_logprobs_N: Tensor | None,
    response_mask_N: Tensor,
    cu_seqlens: Tensor,
    advantages: Tensor,
    *,
    token_weights_N: Tensor | None = None,
    sequence_weights_S: Tensor | None = None,
    variant: str = "gspo",
    params: Mapping[str, float] | None = None,
    aggregation: str | float | None = None,
    temperature: Tensor | float = 1.0,
    ref_logprobs_N: Tensor | None = None,
    kl: KLEstimator = "k3",
    kl_coef: float = 0.0,
    tp_group: Any = None,
    cp_group: Any = None,
    vocab_range: tuple[int, int] | None = None,
    inplace: bool = False,
    backend: LossBackend = "auto",
) -> tuple[Tensor, LossStats]:
    """Σ_i sequence_weights_i · loss_i over S packed sequences, and what it saw.

    Args:
        logits_NV: [N, V] this rank's vocabulary columns; row t predicts targets_N[t].
        targets_N: [N] int64.
        old_logprobs_N: [N] log-probs under the policy that sampled; None: the present values, detached, which
            is the first update after a rollout.
        response_mask_N: [N], 0 for rows (prompt, padding) that take no part.
        cu_seqlens: [S + 1] int32 boundaries of the sequences in the rows; the last one is N. A sequence must
            lie in one call whole.
        advantages: [S], or [N] for variants without a sequence term; [S] is meant where N = S.
        token_weights_N: [N] factors on the policy gradient of each token; they do not change the ratio's
            value (IBPO's mask, `ibpo` step 10), nor the KL penalty.
        sequence_weights_S: [S], 1/S each when None.
        variant, params: name in VARIANTS and overrides of its parameters.
        aggregation: what divides the sum over a sequence's tokens: "sequence-mean", its response tokens;
            "token-mean", the weighted mean of response tokens over the sequences of this call, so that every
            token counts the same; a number, itself (for a token mean over several micro-batches, or
            "constant"). None: as the variant was published. A sequence term's loss counts once for each
            token, and so once for the sequence under "sequence-mean".
        temperature: of sampling, a number or [S].
        ref_logprobs_N, kl, kl_coef: [N] log-probs of the reference policy; kl_coef times the estimate
            (k1, k2, k3) is added for each response token. Without a coefficient it is only measured.
        tp_group, vocab_range, inplace: as in `packed_logprobs`.
        cp_group: ranks that share every sequence equally: each has 1/size of its rows, in any order, and all
            arguments [N] are of those; cu_seqlens and arguments [S] are of the whole sequences. Loss and [S]
            statistics are the same on every rank, and the gradient is that of the whole loss. One all-reduce
            of two floats a sequence, three with a token term, one more with a KL penalty; gspo-token takes
            another one.
        backend: "triton", "torch" or "auto", see `choose_backend`.

    Returns:
        (scalar loss, LossStats). Sequences without response rows, and as far as the policy goes those of
        advantage 0, lose exactly 0, whatever their ratio.

    Raises:
        ValueError: shapes that do not fit, cut sequences, an unknown variant, parameter, aggregation or
            estimator, a backend that cannot be used.
    """
    segments, objective = describe(
        len(logits_NV),
        old_logprobs_N,
        response_mask_N,
        cu_seqlens,
        advantages,
        token_weights_N=token_weights_N,
        sequence_weights_S=sequence_weights_S,
        variant=variant,
        params=params,
        aggregation=aggregation,
        ref_logprobs_N=ref_logprobs_N,
        kl=kl,
        kl_coef=kl_coef,
        cp_group=cp_group,
    )
    name = choose_backend(backend, logits_NV.device, logits_NV.dtype, variant).name
    logprobs_N, entropy_N = packed_logprobs(
        logits_NV,
        targets_N,
        response_mask_N=segments.mask_N,
        temperature_N=spread_temperature(temperature, segments.sequence_of_row, segments.num_sequences),
        tp_group=tp_group,
        vocab_range=vocab_range,
        inplace=inplace,
        backend=name,
    )
    assert entropy_N is not None
    loss, seen = _segment_step(name, logprobs_N, segments, objective, variant)
    stats = LossStats(logprobs_N.detach(), entropy_N, seen.mean_log_ratio_S, seen.clipped, seen.kl_N)
    return loss, stats


def describe(
    num_rows: int,
    old_logprobs_N: Tensor | None,
    response_mask_N: Tensor,
    cu_seqlens: Tensor,
    advantages: Tensor,
    *,
    token_weights_N: Tensor | None,
    sequence_weights_S: Tensor | None,
    variant: str,
    params: Mapping[str, float] | None,
    aggregation: str | float | None,
    ref_logprobs_N: Tensor | None,
    kl: KLEstimator,
    kl_coef: float,
    cp_group: Any,
) -> tuple[Segments, Objective]:
    """The arguments of a door, checked, as the segment step takes them.

    Raises:
        ValueError: as `packed_sequence_loss` says.
    """
    chosen, resolved = resolve_variant(variant, params)
    check_penalty(kl, kl_coef, ref_logprobs_N)
    objective = Objective(chosen, resolved, resolve_aggregation(aggregation, chosen), kl, kl_coef)
    num_sequences = len(cu_seqlens) - 1
    bounds = check_boundaries(cu_seqlens, num_rows, cp_group)
    rows = {
        "response_mask_N": response_mask_N,
        "old_logprobs_N": old_logprobs_N,
        "token_weights_N": token_weights_N,
        "ref_logprobs_N": ref_logprobs_N,
    }
    check_sizes(rows, num_rows, advantages, sequence_weights_S, num_sequences, chosen)
    if sequence_weights_S is None:
        equal, device = 1.0 / num_sequences, response_mask_N.device
        sequence_weights_S = torch.full((num_sequences,), equal, dtype=torch.float64, device=device)
    segments = Segments(
        bounds,
        response_mask_N.to(torch.bool),
        old_logprobs_N,
        advantages,
        token_weights_N,
        sequence_weights_S,
        ref_logprobs_N,
        cp_group,
    )
    return segments, objective


def _segment_step(
    backend: str, logprobs_N: Tensor, segments: Segments, objective: Objective, variant: str
) -> tuple[Tensor, SegmentStats]:
    if backend == "torch":
        return segment_loss(logprobs_N, segments, objective)
    from megatron_ibpo.kernels.segment_loss import triton_segment_loss

    loss, mean_log_ratio_S, clipped, kl_N = triton_segment_loss(
        logprobs_N,
        cu_seqlens=segments.cu_seqlens,
        mask_N=segments.mask_N,
        old_logprobs_N=segments.old_logprobs_N,
        ref_logprobs_N=segments.ref_logprobs_N,
        token_weights_N=segments.token_weights_N,
        advantages=segments.advantages,
        sequence_weights_S=segments.sequence_weights_S,
        variant=variant,
        params=tuple(objective.params.values()),
        sequence_ratio=objective.variant.sequence_ratio,
        aggregation=objective.aggregation,
        kl=objective.kl,
        kl_coef=objective.kl_coef,
        cp_group=segments.cp_group,
    )
    return loss, SegmentStats(mean_log_ratio_S, clipped, kl_N)
