"""The loss over packed sequences: one entry point for torch, which defines it, and the Triton kernels."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ibpo.loss.backend import choose_backend
from megatron_ibpo.loss.logprobs import packed_logprobs
from megatron_ibpo.loss.objective import Objective
from megatron_ibpo.loss.packed_rows import LossRows
from megatron_ibpo.loss.segments import checked_rows, segment_loss
from megatron_ibpo.loss.term_inputs import further_inputs


@dataclass(frozen=True)
class LossStats:
    """Statistics of the loss; nothing here carries a gradient."""

    logprobs_N: Tensor
    """Log-prob of each response token under the current policy; 0 in other rows."""
    entropy_N: Tensor
    """Entropy (nats) of the distribution in each response row, over its sampling set; 0 in other rows."""
    mean_log_ratio_S: Tensor
    """Mean over response tokens of log π - log π_old; exp of it is GSPO's s_i."""
    clipped: Tensor
    """bool, [N] for variants with a token term, otherwise [S]: True where the clip takes effect."""
    kl_N: Tensor | None
    """KL estimate of each response token against ref_logprobs_N, 0 in other rows; None without
    ref_logprobs_N."""


def policy_loss(
    logits_NV: Tensor,
    rows: LossRows,
    objective: Objective,
    *,
    tp_group: Any = None,
    vocab_range: tuple[int, int] | None = None,
    inplace: bool = False,
) -> tuple[Tensor, LossStats]:
    """Return Σ_i sequence_weights_i · loss_i over S packed sequences, and its statistics.

    Args:
        logits_NV: [N, V] this rank's vocabulary columns; row t predicts rows.targets_N[t].
        tp_group, vocab_range, inplace: as in `packed_logprobs`.

    Under context parallelism (rows.cp_group) loss and [S] statistics are the same on every rank, and the
    gradient is that of the whole loss. It costs one all-reduce of two floats per sequence, three with a token
    term, one more with a KL penalty; gspo-token takes another one.

    Returns:
        (scalar loss, LossStats). Sequences without response rows have a loss of exactly 0; so has the policy
        term of those with advantage 0, whatever their ratio.

    Raises:
        ValueError: shapes that do not fit, cut sequences, a target outside the vocabulary or its sampling
            set, a backend that cannot be used.
    """
    rows = checked_rows(rows, len(logits_NV), objective)
    backend = choose_backend(objective.backend, logits_NV.device, logits_NV.dtype).name
    logprobs_N, entropy_N = packed_logprobs(
        logits_NV,
        rows.targets_N,
        response_mask_N=rows.response_mask_N,
        temperature_N=rows.temperature_of_row(),
        sampling_sets=rows.sampling_sets,
        tp_group=tp_group,
        vocab_range=vocab_range,
        inplace=inplace,
        backend=backend,
    )
    assert entropy_N is not None
    return loss_of_logprobs(logprobs_N, entropy_N, rows, objective, backend)


def loss_of_logprobs(
    logprobs_N: Tensor, entropy_N: Tensor, rows: LossRows, objective: Objective, backend: str
) -> tuple[Tensor, LossStats]:
    """Return the loss, differentiable in the log-probs, and its statistics.

    Args:
        rows: as `LossRows.checked` returns them.
        backend: name of the implementation in use.
    """
    if backend == "triton" and rows.off_policy_S is None:  # the kernel has no shaped surrogate
        from megatron_ibpo.kernels.segment_loss import triton_segment_loss

        further_N = further_inputs(rows, objective.variant.token_inputs, entropy_N, torch.float32)
        loss, mean_log_ratio_S, clipped, kl_N = triton_segment_loss(logprobs_N, rows, objective, further_N)
    else:
        loss, mean_log_ratio_S, clipped, kl_N = segment_loss(logprobs_N, rows, objective, entropy_N)
    return loss, LossStats(logprobs_N.detach(), entropy_N, mean_log_ratio_S, clipped, kl_N)
