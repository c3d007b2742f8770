"""The loss and its gradient from log-probs: `megatron_ibpo.loss.segments` in three kernels, for sums over
each sequence, the sequences' losses, and each token's coefficient. One program walks one sequence (the
second: all of them), so that nothing is atomic and the order of programs changes nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from megatron_ibpo.kernels.traced_terms import PASSED, SEQUENCE_PASSED, traced_term

BLOCK = 1024
BLOCK_S = 256
NUM_WARPS = 4
_AGGREGATIONS = {"sequence-mean": 0, "token-mean": 1}
_CONSTANT = 2


@triton.jit
def load_rows(row, end, logprobs_ptr, old_ptr, mask_ptr):
    """Return (which rows belong to the response, their log-probs, their log-ratios); both are 0 in other
    rows, whatever lies there."""
    mask = tl.load(mask_ptr + row, mask=row < end, other=0) != 0
    logprob = tl.load(logprobs_ptr + row, mask=mask, other=0.0)
    log_ratio = tl.zeros_like(logprob)
    if old_ptr is not None:
        log_ratio = logprob - tl.load(old_ptr + row, mask=mask, other=0.0)
    return mask, logprob, log_ratio


@triton.jit
def load_advantage(advantages_ptr, sequence, row, mask, ADVANTAGE_PER_TOKEN: tl.constexpr):
    if ADVANTAGE_PER_TOKEN:
        return tl.load(advantages_ptr + row, mask=mask, other=0.0)
    return tl.where(mask, tl.load(advantages_ptr + sequence), 0.0)


@triton.jit(do_not_specialize=["num_sequences"])
def segment_sums_kernel(
    logprobs_ptr, old_ptr, ref_ptr, mask_ptr, cu_ptr, advantages_ptr, mean_log_ratio_ptr, out_ptr,
    num_sequences, pointers, parameters,
    TOKEN_TERM: tl.constexpr, KL: tl.constexpr, ADVANTAGE_PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the sums of one sequence per program: out [4, S] fp32, response tokens, Σ log-ratio, Σ KL, Σ
    token term. With mean_log_ratio_ptr only the last, whose term sees that in place of the token's own."""
    sequence = tl.program_id(0)
    begin, end = tl.load(cu_ptr + sequence), tl.load(cu_ptr + sequence + 1)
    count = tl.zeros((BLOCK,), tl.float32)
    ratio_sum = tl.zeros((BLOCK,), tl.float32)
    kl_sum = tl.zeros((BLOCK,), tl.float32)
    value_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(begin, end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask, logprob, log_ratio = load_rows(row, end, logprobs_ptr, old_ptr, mask_ptr)
        if mean_log_ratio_ptr is None:
            count += tl.where(mask, 1.0, 0.0)
            ratio_sum += log_ratio
        else:
            log_ratio = tl.load(mean_log_ratio_ptr + sequence) + tl.zeros_like(log_ratio)
        if KL is not None:
            kl, _ = KL(
                logprob - tl.load(ref_ptr + row, mask=mask, other=0.0), pointers, row, mask, parameters
            )
            kl_sum += tl.where(mask, kl, 0.0)
        if TOKEN_TERM is not None:
            advantage = load_advantage(advantages_ptr, sequence, row, mask, ADVANTAGE_PER_TOKEN)
            value, _, _ = TOKEN_TERM(log_ratio, logprob, advantage, pointers, row, mask, parameters)
            value_sum += tl.where(advantage != 0, value, 0.0)
    out_ptr += sequence
    if mean_log_ratio_ptr is None:
        tl.store(out_ptr, tl.sum(count, 0))
        tl.store(out_ptr + num_sequences, tl.sum(ratio_sum, 0))
        tl.store(out_ptr + 2 * num_sequences, tl.sum(kl_sum, 0))
    tl.store(out_ptr + 3 * num_sequences, tl.sum(value_sum, 0))


@triton.jit(do_not_specialize=["num_sequences"])
def sequence_loss_kernel(
    sums_ptr, advantages_ptr, weights_ptr,
    loss_ptr, mean_log_ratio_ptr, slope_ptr, kl_slope_ptr, clipped_ptr,
    num_sequences, constant, kl_coef, pointers, parameters,
    SEQUENCE_TERM: tl.constexpr, HAS_TOKEN_TERM: tl.constexpr, AGGREGATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute, in one program, the loss and the factor of each sequence on its tokens' derivatives."""
    divisor = tl.zeros((BLOCK,), tl.float32) + constant
    if AGGREGATION == 1:
        tokens = tl.zeros((BLOCK,), tl.float32)
        weights = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, num_sequences, BLOCK):
            i = start + tl.arange(0, BLOCK)
            weight = tl.load(weights_ptr + i, mask=i < num_sequences, other=0.0)
            tokens += weight * tl.load(sums_ptr + i, mask=i < num_sequences, other=0.0)
            weights += weight
        mean_length = tl.sum(tokens, 0) / tl.sum(weights, 0)
        divisor = tl.zeros((BLOCK,), tl.float32) + tl.where(mean_length > 0, mean_length, 1.0)
    loss_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_sequences, BLOCK):
        i = start + tl.arange(0, BLOCK)
        real = i < num_sequences
        count = tl.load(sums_ptr + i, mask=real, other=0.0)
        n = tl.maximum(count, 1.0)
        mean_log_ratio = tl.load(sums_ptr + num_sequences + i, mask=real, other=0.0) / n
        kl_sum = tl.load(sums_ptr + 2 * num_sequences + i, mask=real, other=0.0)
        mean = mean_log_ratio
        if HAS_TOKEN_TERM:
            mean = tl.load(sums_ptr + 3 * num_sequences + i, mask=real, other=0.0) / n
        weight = tl.load(weights_ptr + i, mask=real, other=0.0)
        if AGGREGATION == 0:
            divisor = n
        loss, slope = mean, tl.full((BLOCK,), 1.0, tl.float32)
        if SEQUENCE_TERM is not None:
            advantage = tl.load(advantages_ptr + i, mask=real, other=0.0)
            live = (advantage != 0) & (count > 0)
            live_mean = tl.where(live, mean, 0.0)
            loss, slope, clipped = SEQUENCE_TERM(live_mean, n, advantage, pointers, i, live, parameters)
            loss, slope = tl.where(live, loss, 0.0), tl.where(live, slope, 0.0)
            tl.store(clipped_ptr + i, clipped & live, mask=real)
        loss_sum += weight * (loss * (count / divisor) + kl_coef * kl_sum / divisor)
        tl.store(mean_log_ratio_ptr + i, mean_log_ratio, mask=real)
        tl.store(slope_ptr + i, weight * slope / divisor, mask=real)
        tl.store(kl_slope_ptr + i, weight * kl_coef / divisor, mask=real)
    tl.store(loss_ptr, tl.sum(loss_sum, 0))


@triton.jit
def token_coefficients_kernel(
    logprobs_ptr, old_ptr, ref_ptr, mask_ptr, cu_ptr, advantages_ptr, token_weights_ptr,
    mean_log_ratio_ptr, slope_ptr, kl_slope_ptr,
    out_ptr, kl_ptr, clipped_ptr,
    pointers, parameters,
    TOKEN_TERM: tl.constexpr, SEQUENCE_RATIO: tl.constexpr, KL: tl.constexpr,
    ADVANTAGE_PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient by each log-prob, KL estimates and token clips of one sequence per program."""
    sequence = tl.program_id(0)
    begin, end = tl.load(cu_ptr + sequence), tl.load(cu_ptr + sequence + 1)
    slope = tl.load(slope_ptr + sequence)
    for start in range(begin, end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask, logprob, log_ratio = load_rows(row, end, logprobs_ptr, old_ptr, mask_ptr)
        if TOKEN_TERM is None:
            coefficient = tl.where(mask, slope, 0.0)
        else:
            advantage = load_advantage(advantages_ptr, sequence, row, mask, ADVANTAGE_PER_TOKEN)
            if SEQUENCE_RATIO:
                log_ratio = tl.load(mean_log_ratio_ptr + sequence) + tl.zeros_like(log_ratio)
            _, derivative, clipped = TOKEN_TERM(
                log_ratio, logprob, advantage, pointers, row, mask, parameters
            )
            live = advantage != 0  # nowhere outside the mask
            coefficient = tl.where(live, slope * derivative, 0.0)
            tl.store(clipped_ptr + row, clipped & live, mask=row < end)
        if token_weights_ptr is not None:
            coefficient *= tl.load(token_weights_ptr + row, mask=mask, other=0.0)
        if KL is not None:
            gap = logprob - tl.load(ref_ptr + row, mask=mask, other=0.0)
            kl, derivative = KL(gap, pointers, row, mask, parameters)
            coefficient += tl.where(mask, tl.load(kl_slope_ptr + sequence) * derivative, 0.0)
            tl.store(kl_ptr + row, tl.where(mask, kl, 0.0), mask=row < end)
        tl.store(out_ptr + row, coefficient, mask=row < end)


def triton_segment_loss(
    logprobs_N: Tensor, rows: Any, objective: Any, loaded: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (loss, mean_log_ratio_S, clipped, kl_N), the first differentiable in logprobs_N. Arguments are
    as those of `megatron_ibpo.loss.segments.segment_loss`, on one device; floats of any precision are read as
    fp32. `loaded` are further inputs that the token term reads, [N], by name."""

    def floats(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(torch.float32).contiguous()

    plain_rows = replace(
        rows,
        response_mask_N=rows.response_mask_N.contiguous(),
        cu_seqlens=rows.cu_seqlens.contiguous(),
        advantages=floats(rows.advantages),
        old_logprobs_N=floats(rows.old_logprobs_N),
        ref_logprobs_N=floats(rows.ref_logprobs_N),
        token_weights_N=floats(rows.token_weights_N),
        sequence_weights_S=floats(rows.sequence_weights_S),
    )
    read = {name: values_N.to(torch.float32).contiguous() for name, values_N in loaded.items()}
    return _SegmentLoss.apply(logprobs_N.contiguous(), plain_rows, objective, read)


class Terms(NamedTuple):
    """The traced terms of an objective; None for one that it does not have."""

    token: Any
    sequence: Any
    kl: Any


def traced_terms(objective: Any, loaded: Sequence[str]) -> Terms:
    """Return the terms of an objective as Triton functions, of which the token term reads `loaded` inputs
    beside `PASSED`. Raises TermError for a term that Triton code cannot be made of."""
    variant, params = objective.variant, objective.params

    def traced(term: Any, passed: Sequence[str], names: Sequence[str]) -> Any:
        return None if term is None else traced_term(term, passed, names, params)

    return Terms(
        traced(variant.token_term, PASSED, loaded),
        traced(variant.sequence_term, SEQUENCE_PASSED, ()),
        traced_term(objective.kl_term, ("gap",), (), {}),
    )


class _SegmentLoss(torch.autograd.Function):
    """The gradient is known when the loss is: forward keeps it, backward scales it."""

    @staticmethod
    def forward(ctx, logprobs_N, rows, objective, loaded):
        token_term, sequence_term, kl_term = traced_terms(objective, tuple(loaded))
        parameters, sequence_ratio = tuple(objective.params.values()), objective.variant.sequence_ratio
        pointers = tuple(loaded.values())
        mask_N, cu_seqlens, advantages = rows.response_mask_N, rows.cu_seqlens, rows.advantages
        old_N, ref_N, cp_group = rows.old_logprobs_N, rows.ref_logprobs_N, rows.cp_group
        num_sequences = len(cu_seqlens) - 1
        per_token = len(advantages) != num_sequences
        kl_term = None if ref_N is None else kl_term

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=logprobs_N.device)

        def sums(term: Any, mean_log_ratio_S: Tensor | None) -> Tensor:
            sums_4S = empty(4, num_sequences)
            segment_sums_kernel[(num_sequences,)](
                logprobs_N, old_N, ref_N, mask_N, cu_seqlens, advantages, mean_log_ratio_S, sums_4S,
                num_sequences, pointers, parameters,
                TOKEN_TERM=term, KL=kl_term if mean_log_ratio_S is None else None,
                ADVANTAGE_PER_TOKEN=per_token, BLOCK=BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip
            return sums_4S

        sums_4S = sums(None if sequence_ratio else token_term, None)
        used = 2 if token_term is None or sequence_ratio else 4
        _sum_over_ranks(sums_4S, [0, 1, *([2] if kl_term else []), *([3] if used == 4 else [])], cp_group)
        mean_log_ratio_S = empty(num_sequences)
        if sequence_ratio:
            mean_log_ratio_S = sums_4S[1] / sums_4S[0].clamp(min=1.0)
            sums_4S[3] = sums(token_term, mean_log_ratio_S)[3]
            _sum_over_ranks(sums_4S, [3], cp_group)

        loss, slope_S, kl_slope_S = empty(), empty(num_sequences), empty(num_sequences)
        clipped_S = empty(num_sequences, dtype=torch.bool)
        code = _AGGREGATIONS.get(objective.aggregation, _CONSTANT)
        constant = float(objective.aggregation) if code == _CONSTANT else 1.0
        sequence_loss_kernel[(1,)](
            sums_4S, advantages, rows.sequence_weights_S,
            loss, mean_log_ratio_S, slope_S, kl_slope_S, clipped_S,
            num_sequences, constant, float(objective.kl_coef), (), parameters,
            SEQUENCE_TERM=sequence_term, HAS_TOKEN_TERM=token_term is not None, AGGREGATION=code,
            BLOCK=BLOCK_S, num_warps=NUM_WARPS,
        )  # fmt: skip
        coefficients_N = torch.empty_like(logprobs_N)
        kl_N = None if kl_term is None else torch.empty_like(logprobs_N)
        clipped_N = None if token_term is None else torch.empty_like(mask_N)
        token_coefficients_kernel[(num_sequences,)](
            logprobs_N, old_N, ref_N, mask_N, cu_seqlens, advantages, rows.token_weights_N,
            mean_log_ratio_S, slope_S, kl_slope_S, coefficients_N, kl_N, clipped_N,
            pointers, parameters,
            TOKEN_TERM=token_term, SEQUENCE_RATIO=sequence_ratio, KL=kl_term,
            ADVANTAGE_PER_TOKEN=per_token, BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
        ctx.save_for_backward(coefficients_N)
        clipped = clipped_S if clipped_N is None else clipped_N
        ctx.mark_non_differentiable(*(t for t in (mean_log_ratio_S, clipped, kl_N) if t is not None))
        return loss, mean_log_ratio_S, clipped, kl_N

    @staticmethod
    def backward(ctx, *grads):
        (coefficients_N,) = ctx.saved_tensors
        return coefficients_N * grads[0], None, None, None


def _sum_over_ranks(sums_4S: Tensor, rows: list[int], group: Any) -> None:
    """Add up these rows over the group, in place; one all-reduce."""
    if group is None or dist.get_world_size(group) == 1:
        return
    shared = sums_4S[rows]
    dist.all_reduce(shared, group=group)
    sums_4S[rows] = shared
