"""The reference loss over packed sequences: the definition that every kernel is tested against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_ibpo.loss.logprobs import packed_logprobs
from megatron_ibpo.loss.variants import VARIANTS, Variant

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
    """bool, [S] for sequence-level variants, [N] for token-level ones: the clip is what counts."""


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
    temperature: Any = 1.0,
    ref_logprobs_N: Tensor | None = None,
    tp_group: Any = None,
    cp_group: Any = None,
    vocab_range: tuple[int, int] | None = None,
    inplace: bool = False,
    backend: Literal["auto", "torch"] = "auto",
) -> tuple[Tensor, LossStats]:
    """Σ_i sequence_weights_i · loss_i over S packed sequences, and what it saw.

    Args:
        logits_NV: [N, V] this rank's vocabulary columns; row t predicts targets_N[t].
        targets_N: [N] int64.
        old_logprobs_N: [N] log-probs under the policy that sampled; None: the present values, detached, which
            is the first update after a rollout.
        response_mask_N: [N], 0 for rows (prompt, padding) that take no part.
        cu_seqlens: [S + 1] int32 boundaries of the sequences in the rows; the last one is N.
        advantages: [S], or [N] for token-level variants.
        token_weights_N: [N] factors on the gradient of each token; they do not change the ratio's value
            (IBPO's mask, `ibpo` step 10).
        sequence_weights_S: [S], 1/S each when None.
        variant, params: name in VARIANTS and overrides of its parameters.
        temperature: of sampling, a number or [S].
        ref_logprobs_N, cp_group: not supported yet; must be None.
        tp_group, vocab_range, inplace: as in `packed_logprobs`.
        backend: "auto" and "torch" are this reference.

    Returns:
        (scalar loss, LossStats). Sequences without response rows and sequences of advantage 0 lose
        exactly 0, whatever their ratio.

    Raises:
        ValueError: shapes that do not fit, unknown variant or parameter.
        NotImplementedError: ref_logprobs_N or cp_group given.
    """
    if ref_logprobs_N is not None:
        raise NotImplementedError("a KL penalty (ref_logprobs_N) is not supported yet")
    if cp_group is not None:
        raise NotImplementedError("context parallelism (cp_group) is not supported yet")
    if backend not in ("auto", "torch"):
        raise ValueError(f"unknown loss backend {backend!r}; there are 'auto' and 'torch'")
    chosen, resolved = _variant(variant, params)
    num_rows, num_sequences = len(logits_NV), len(cu_seqlens) - 1
    _check_shapes(num_rows, num_sequences, cu_seqlens, advantages, chosen)

    mask_N = response_mask_N.to(torch.bool)
    sequence_N = torch.repeat_interleave(
        torch.arange(num_sequences, device=logits_NV.device), cu_seqlens.diff().long(), output_size=num_rows
    )
    temperature_N = (
        temperature[sequence_N] if isinstance(temperature, Tensor) and temperature.ndim else temperature
    )
    logprobs_N, entropy_N = packed_logprobs(
        logits_NV,
        targets_N,
        response_mask_N=mask_N,
        temperature_N=temperature_N,
        tp_group=tp_group,
        vocab_range=vocab_range,
        inplace=inplace,
    )
    dtype = logprobs_N.dtype
    old_N = logprobs_N.detach() if old_logprobs_N is None else old_logprobs_N.to(dtype)
    log_ratio_N = torch.where(mask_N, logprobs_N - old_N, 0.0)
    if token_weights_N is not None:
        value = log_ratio_N.detach()
        log_ratio_N = value + token_weights_N.to(dtype) * (log_ratio_N - value)

    mean_over = _SequenceMean(sequence_N, mask_N, num_sequences, dtype)
    mean_log_ratio_S = mean_over(log_ratio_N)
    advantages = advantages.to(dtype)
    if chosen.sequence_term is not None:
        live = advantages != 0
        loss_S, clipped = chosen.sequence_term(
            torch.where(live, mean_log_ratio_S, 0.0), advantages, **resolved
        )
        loss_S = torch.where(mean_over.counts_S > 0, loss_S, 0.0)
    else:
        assert chosen.token_term is not None
        advantages_N = advantages[sequence_N] if len(advantages) == num_sequences else advantages
        live = mask_N & (advantages_N != 0)
        loss_N, clipped = chosen.token_term(torch.where(live, log_ratio_N, 0.0), advantages_N, **resolved)
        loss_S = mean_over(torch.where(live, loss_N, 0.0))
    if sequence_weights_S is None:
        sequence_weights_S = torch.full_like(loss_S, 1.0 / num_sequences)
    stats = LossStats(logprobs_N.detach(), entropy_N, mean_log_ratio_S.detach(), clipped & live)
    return (sequence_weights_S.to(dtype) * loss_S).sum(), stats


class _SequenceMean:
    """Mean over each sequence's response rows; 0 for a sequence without any."""

    def __init__(self, sequence_N: Tensor, mask_N: Tensor, num_sequences: int, dtype: torch.dtype):
        self.sequence_N, self.mask_N = sequence_N, mask_N
        zeros = torch.zeros(num_sequences, dtype=dtype, device=mask_N.device)
        self.counts_S = zeros.index_add(0, sequence_N, mask_N.to(dtype))

    def __call__(self, values_N: Tensor) -> Tensor:
        masked = torch.where(self.mask_N, values_N, 0.0)
        sums_S = torch.zeros_like(self.counts_S).index_add(0, self.sequence_N, masked)
        return sums_S / self.counts_S.clamp(min=1)


def _variant(name: str, params: Mapping[str, float] | None) -> tuple[Variant, dict[str, float]]:
    if name not in VARIANTS:
        raise ValueError(f"unknown loss variant {name!r}; there are {', '.join(sorted(VARIANTS))}")
    variant = VARIANTS[name]
    unknown = set(params or {}) - set(variant.params)
    if unknown:
        raise ValueError(f"loss variant {name!r} has no parameter {', '.join(sorted(unknown))}")
    return variant, {**variant.params, **(params or {})}


def _check_shapes(
    num_rows: int, num_sequences: int, cu_seqlens: Tensor, advantages: Tensor, variant: Variant
) -> None:
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != num_rows or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(f"cu_seqlens must rise from 0 to the number of rows ({num_rows})")
    sizes = {num_sequences} if variant.token_term is None else {num_sequences, num_rows}
    if advantages.ndim != 1 or len(advantages) not in sizes:
        raise ValueError(f"advantages have shape {tuple(advantages.shape)}, wanted one of the sizes {sizes}")
