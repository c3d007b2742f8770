"""The scale of each row's gradient, found while the chunks of the fused LM head are computed.

The loss's derivative by the log-prob of row t of sequence i is c_t = slope_i · policy_t + penalty_t. The
token term's derivative times weights (policy_t) and the KL estimate's (penalty_t) are known with the row's
log-prob; slope_i, the derivative of the sequence's loss by the mean of its token values, needs all rows of
the sequence, and a chunk may end in the middle of one. Keeping logits until then would keep them all, and
recomputing them would be a fourth product. So rows without a slope are summed apart, and one number scales
that sum later. Sequences lie end to end: one is open at a time.
"""

from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ibpo.loss.objective import KL_ESTIMATORS, Objective
from megatron_ibpo.loss.packed_rows import LossRows, sum_over_ranks
from megatron_ibpo.loss.segments import divisors, shaped_surrogate
from megatron_ibpo.loss.term_inputs import SequenceInputs, TokenInputs, apply_term, further_inputs


@dataclass(frozen=True)
class Step:
    """One chunk: response rows start to stop. After it, sequences before `closed` are complete."""

    start: int
    stop: int
    closed: int


def schedule(rows: LossRows, rows_R: Tensor, ends: list[int], chunk: int) -> list[Step]:
    """Return steps of `chunk` response rows, where sequences end among these at `ends`. Ranks that share
    sequences have different response rows, but must close the same sequences at the same step: for them a
    step is `chunk` rows of any kind."""
    if rows.cp_group is None:
        stops = [*range(chunk, len(rows_R), chunk), len(rows_R)]
        closed = [bisect_right(ends, stop) for stop in stops]
    else:
        num_rows, bounds = len(rows.response_mask_N), rows.cu_seqlens[1:].tolist()
        cuts = [*range(chunk, num_rows, chunk), num_rows]
        stops = torch.searchsorted(rows_R, torch.tensor(cuts, device=rows_R.device)).tolist()
        closed = [bisect_right(bounds, cut) for cut in cuts]
    return [Step(*step) for step in zip([0, *stops[:-1]], stops, closed, strict=True)]


@dataclass(frozen=True)
class ChunkCoefficients:
    """Coefficients with which the rows of a chunk enter the weight's gradient."""

    final_C: Tensor
    """Coefficients of the leading rows. With a KL penalty the rows of the open sequence follow, with the
    penalty's part alone."""
    open_C: Tensor
    """Coefficients, without the slope, of the last rows, which belong to the open sequence."""
    closing: Tensor | None
    """Slope of the sequence that earlier chunks left open, if it ended in this one."""


class RowCoefficients:
    """The known coefficients of the response rows; see above."""

    def __init__(self, rows: LossRows, objective: Objective, rows_R: Tensor, dtype: torch.dtype):
        """`rows` are as `LossRows.checked` returns them, `rows_R` the response rows among them, rising."""
        self.rows, self.objective = rows, objective
        sequence_R = rows.sequence_of_row()[rows_R]
        zeros_S = torch.zeros(rows.num_sequences, dtype=torch.int64, device=rows_R.device)
        self.local_S = zeros_S.index_add(0, sequence_R, torch.ones_like(sequence_R))
        self.ends = list(rows.index.ends) if rows.index else self.local_S.cumsum(0).tolist()
        """Each sequence's end among the response rows."""
        self.counts_S = sum_over_ranks(self.local_S.to(dtype), rows.cp_group)
        assert rows.sequence_weights_S is not None
        weights_S = rows.sequence_weights_S.to(dtype)
        factor_S = weights_S / divisors(objective.aggregation, self.counts_S, weights_S)

        def of_rows(values_N: Tensor | None) -> Tensor | None:
            return None if values_N is None else values_N[rows_R].to(dtype)

        self.advantages = rows.advantages.to(dtype)
        per_token = len(self.advantages) != rows.num_sequences
        self.sequence_R, self.advantages_R = sequence_R, self.advantages[rows_R if per_token else sequence_R]
        self.factor_R = factor_S[sequence_R]
        """The sequence's weight over its divisor."""
        self.old_R, self.ref_R = of_rows(rows.old_logprobs_N), of_rows(rows.ref_logprobs_N)
        self.token_weights_R = of_rows(rows.token_weights_N)
        names = tuple(name for name in objective.variant.token_inputs if name != "entropy")
        further_N = further_inputs(rows, names, None, dtype)  # entropies come with the log-probs
        self.further = {name: values_N[rows_R] for name, values_N in further_N.items()}
        self.off_policy_S = rows.off_policy_S
        self.off_policy_R = None if rows.off_policy_S is None else rows.off_policy_S[sequence_R]
        self.slope_S = torch.ones_like(factor_S)
        self.value_R, self.policy_R, self.penalty_R = (torch.zeros_like(self.factor_R) for _ in range(3))
        self.closed = 0
        """Number of sequences whose slope is known: those before this one."""
        self.open: int | None = None
        """Sequence with rows in earlier chunks that still lack their slope."""

    def see(self, step: Step, logprobs_C: Tensor, entropy_C: Tensor) -> None:
        """Take in log-probs and entropies of a step's rows, and the slopes of sequences that it completes."""
        part = slice(step.start, step.stop)
        with torch.enable_grad():
            logprobs_C = logprobs_C.detach().requires_grad_()
            value_C = self._token_values(part, logprobs_C, entropy_C)
            (policy_C,) = torch.autograd.grad(value_C.sum(), logprobs_C)
        if self.token_weights_R is not None:
            policy_C = policy_C * self.token_weights_R[part]
        self.value_R[part] = value_C.detach()
        self.policy_R[part] = policy_C * self.factor_R[part]
        if self.ref_R is not None:
            self.penalty_R[part] = self._penalty(part, logprobs_C) * self.factor_R[part]
        if step.closed > self.closed:
            self._close(self.closed, step.closed)
            self.closed = step.closed

    def of_chunk(self, step: Step) -> ChunkCoefficients:
        """Return the coefficients of the rows of the step seen last in the weight's gradient."""
        closed_end = self.ends[self.closed - 1] if self.closed else 0
        open_from = min(max(closed_end, step.start), step.stop)
        waits = open_from if self.ref_R is None else step.stop
        final_C = self.penalty_R[step.start : waits].clone()
        slope_C = self.slope_S[self.sequence_R[step.start : open_from]]
        final_C[: open_from - step.start] += slope_C * self.policy_R[step.start : open_from]
        closing = None
        if self.open is not None and self.open < self.closed:
            closing, self.open = self.slope_S[self.open], None
        if open_from < step.stop:
            self.open = self.closed
        return ChunkCoefficients(final_C, self.policy_R[open_from : step.stop], closing)

    def of_all_rows(self) -> Tensor:
        """Return the coefficients [R], after all rows were seen."""
        return self.slope_S[self.sequence_R] * self.policy_R + self.penalty_R

    def _token_values(self, part: slice, logprobs_C: Tensor, entropy_C: Tensor) -> Tensor:
        old_C = logprobs_C.detach() if self.old_R is None else self.old_R[part]
        log_ratio_C = logprobs_C - old_C
        value_C, term, advantages_C = log_ratio_C, self.objective.variant.token_term, self.advantages_R[part]
        if term is not None:
            live_C = advantages_C != 0
            seen_C = torch.where(live_C, log_ratio_C, 0.0)
            further_C = {name: values_R[part] for name, values_R in self.further.items()}
            inputs = TokenInputs(seen_C, logprobs_C, advantages_C, **further_C, entropy=entropy_C)
            value_C, _ = apply_term(term, inputs, self.objective.params)
            value_C = torch.where(live_C, value_C, 0.0)
        if self.off_policy_R is None:
            return value_C
        return torch.where(self.off_policy_R[part], shaped_surrogate(logprobs_C, advantages_C), value_C)

    def _penalty(self, part: slice, logprobs_C: Tensor) -> Tensor:
        assert self.ref_R is not None
        with torch.enable_grad():
            estimate_C = KL_ESTIMATORS[self.objective.kl](logprobs_C - self.ref_R[part])
            (slope_C,) = torch.autograd.grad(estimate_C.sum(), logprobs_C)
        return self.objective.kl_coef * slope_C

    def _close(self, first: int, last: int) -> None:
        term = self.objective.variant.sequence_term
        if term is None:
            return
        part = slice(self.ends[first - 1] if first else 0, self.ends[last - 1])
        lengths_S = self.local_S[first:last]
        # "unsafe": the lengths are right, and checking them would make the host wait for the device
        sums_S = torch.segment_reduce(self.value_R[part], "sum", lengths=lengths_S, unsafe=True)
        sums_S = sum_over_ranks(sums_S, self.rows.cp_group)
        counts_S, advantages_S = self.counts_S[first:last], self.advantages[first:last]
        live_S = (advantages_S != 0) & (counts_S > 0)
        n_S = counts_S.clamp(min=1.0)
        with torch.enable_grad():
            mean_S = torch.where(live_S, sums_S / n_S, 0.0).requires_grad_()
            loss_S, _ = apply_term(term, SequenceInputs(mean_S, n_S, advantages_S), self.objective.params)
            (slope_S,) = torch.autograd.grad(loss_S.sum(), mean_S)
        slope_S = torch.where(live_S, slope_S, 0.0)
        if self.off_policy_S is not None:
            slope_S = torch.where(self.off_policy_S[first:last], 1.0, slope_S)
        self.slope_S[first:last] = slope_S
