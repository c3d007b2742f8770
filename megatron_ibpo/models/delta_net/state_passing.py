"""The gated delta net under context parallelism: each rank's two chunks of every sequence get the last tokens
before them, for the short convolution, and the recurrent state.

The rule is affine in the state S at a chunk's start: outputs are O + Q S, and the state at the end is M S +
N. Every rank computes O, Q, M and N of its own chunks by the rule over the values [v | 0] from the state [0 |
1]; then states pass on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_ibpo.models.packed import once_per_batch

Convolve = Callable[[Tensor, Tensor], Tensor]
"""([N, F], boundaries of sequences) → the convolution within each sequence, [N, F]."""
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(query [N, G, D], key [N, G, D], value [N, H, E], decay [N, H], beta [N, H], boundaries, first states [S,
H, D, E]) → (outputs [N, H, E], last states [S, H, D, E])."""


@dataclass(frozen=True)
class Slices:
    """This rank's chunks with tokens of a micro-batch's sequences, C = 2 per sequence, and the places of the
    W tokens before each that the convolution sees besides the present one."""

    group: Any
    lengths: list[int]
    """Tokens of each chunk."""
    cu_chunks: Tensor
    """[C + 1] int32 boundaries of the chunks, as if each were a sequence."""
    last_CW: Tensor
    """int64: the last tokens of each chunk, the very last first; arbitrary if a chunk has fewer."""
    before_CW: Tensor
    """int64: places, among all ranks' last tokens, of those before each chunk, nearest first; one past their
    end marks the start of a sequence."""
    cu_led: Tensor
    """Boundaries of the chunks with W tokens before each."""
    led_M: Tensor
    """int64: content of the M = N + C W places then: index among the N tokens, followed by the C W tokens
    before chunks."""
    places_N: Tensor
    """int64: the place of each token among those."""


@once_per_batch
def make_slices(cu_seqlens: Tensor, group: Any, width: int) -> Slices:
    """Return this rank's slices of a micro-batch, whose whole sequences are each a multiple of 2 x ranks
    long. `group` are the context-parallel ranks, `width` is W."""
    ranks, rank, device = group.size(), group.rank(), cu_seqlens.device
    lengths_S = cu_seqlens.diff().long() // (2 * ranks)
    length_C = lengths_S[lengths_S > 0].repeat_interleave(2)
    chunks = len(length_C)
    back_W = torch.arange(1, width + 1, device=device)
    ends_C = length_C.cumsum(0)
    starts_C = ends_C - length_C
    last_CW = torch.maximum(ends_C[:, None] - back_W, starts_C[:, None])

    number_C = torch.tensor([rank, 2 * ranks - 1 - rank], device=device).repeat(chunks // 2)
    position_CW = (number_C * length_C)[:, None] - back_W
    holder_CW = position_CW.clamp(min=0) // length_C[:, None]
    is_second_CW = holder_CW >= ranks
    from_rank_CW = torch.where(is_second_CW, 2 * ranks - 1 - holder_CW, holder_CW)
    first_C = torch.arange(chunks, device=device) // 2 * 2
    from_chunk_CW = from_rank_CW * chunks + first_C[:, None] + is_second_CW
    from_end_CW = (holder_CW + 1) * length_C[:, None] - position_CW - 1
    before_CW = torch.where(position_CW >= 0, from_chunk_CW * width + from_end_CW, ranks * chunks * width)

    tokens = torch.arange(int(ends_C[-1]), device=device)
    chunk_N = torch.arange(chunks, device=device).repeat_interleave(length_C)
    places_N = tokens + (chunk_N + 1) * width
    led_M = tokens.new_empty(len(tokens) + chunks * width)
    led_M[places_N] = tokens
    leading_CW = (starts_C + (torch.arange(chunks, device=device) + 1) * width)[:, None] - back_W
    led_M[leading_CW.flatten()] = len(tokens) + torch.arange(chunks * width, device=device)

    def boundaries(sizes_C: Tensor) -> Tensor:
        return torch.nn.functional.pad(sizes_C.cumsum(0), (1, 0)).to(torch.int32)

    return Slices(
        group,
        length_C.tolist(),
        boundaries(length_C),
        last_CW,
        before_CW,
        boundaries(length_C + width),
        led_M,
        places_N,
    )


def convolve(function: Convolve, x_NF: Tensor, slices: Slices) -> Tensor:
    """Apply `function` of whole sequences to this rank's tokens. [N, F]. Sends W tokens per chunk."""
    last_rows = x_NF.index_select(0, slices.last_CW.flatten())
    all_last_rows = gather_from_sequence_parallel_region(
        last_rows, tensor_parallel_output_grad=True, group=slices.group
    )
    all_last_rows = torch.cat((all_last_rows, all_last_rows.new_zeros(1, all_last_rows.shape[1])))
    preceding = all_last_rows.index_select(0, slices.before_CW.flatten())
    led = torch.cat((x_NF, preceding)).index_select(0, slices.led_M)
    return function(led, slices.cu_led).index_select(0, slices.places_N)


def delta_rule(
    rule: Rule, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, slices: Slices
) -> Tensor:
    """Apply `rule` of whole sequences to this rank's tokens. [N, H, E] in the dtype of `value`. Sends one
    state per chunk, and its gradient in the backward pass."""
    heads, width, dim = value.shape[1], value.shape[2], key.shape[2]
    dtype = torch.promote_types(value.dtype, torch.float32)
    first = torch.zeros(dim, width + dim, dtype=dtype, device=value.device)
    first[:, width:].fill_diagonal_(1)
    output, last = rule(
        query,
        key,
        torch.cat((value, value.new_zeros(*value.shape[:2], dim)), dim=2),
        decay,
        beta,
        slices.cu_chunks,
        first.expand(len(slices.lengths), heads, -1, -1).contiguous(),
    )
    from_nothing, of_state = output.split([width, dim], dim=2)
    added, transition = last.split([width, dim], dim=3)
    states_CHDE = _PassedStates.apply(transition, added, slices.group)
    reads = [
        torch.matmul(part_LHD.transpose(0, 1).to(dtype), state_HDE).transpose(0, 1)
        for part_LHD, state_HDE in zip(of_state.split(slices.lengths), states_CHDE, strict=True)
    ]
    return (from_nothing + torch.cat(reads)).to(value.dtype)


class _PassedStates(torch.autograd.Function):
    """The initial states of this rank's chunks, [C, H, D, E], from the effect of all chunks on a state: S ←
    transition S + added, [C, H, D, D] and [C, H, D, E].

    States go from the first rank to the last through the first chunks of their sequences, and back through
    the second ones; gradients go the other way.
    """

    @staticmethod
    def forward(ctx, transition, added, group):
        rank, last = group.rank(), group.size() - 1
        (through, through_back), (add, add_back) = _halves(transition), _halves(added)
        begin = _received(rank - 1, add, group) if rank else torch.zeros_like(add)
        state = through @ begin + add
        if rank < last:
            _send(rank + 1, state, group)
            state = _received(rank + 1, add, group)
        if rank:
            _send(rank - 1, through_back @ state + add_back, group)
        ctx.group = group
        states = torch.stack((begin, state), dim=1).flatten(0, 1)
        ctx.save_for_backward(transition, states)
        return states

    @staticmethod
    def backward(ctx, grad_states):
        transition, states = ctx.saved_tensors
        group, (through, through_back) = ctx.group, _halves(transition)
        rank, last = group.rank(), group.size() - 1
        grad, grad_back = _halves(grad_states)
        # of the states at the ends of the second chunks, and of the first ones
        end_back = _received(rank - 1, grad, group) if rank else torch.zeros_like(grad)
        end = grad_back + through_back.mT @ end_back
        if rank < last:
            _send(rank + 1, end, group)
            end = _received(rank + 1, grad, group)
        if rank:
            _send(rank - 1, grad + through.mT @ end, group)
        ends = torch.stack((end, end_back), dim=1).flatten(0, 1)
        return ends @ states.mT, ends, None


def _halves(x_CHDX: Tensor) -> tuple[Tensor, ...]:
    """Return [S, H, D, X] of the first chunks of sequences, and of the second ones."""
    return x_CHDX.unflatten(0, (-1, 2)).unbind(1)


def _send(rank: int, state: Tensor, group: Any) -> None:
    _exchange(dist.isend, state.contiguous(), rank, group)


def _received(rank: int, like: Tensor, group: Any) -> Tensor:
    state = torch.empty_like(like, memory_format=torch.contiguous_format)
    _exchange(dist.irecv, state, rank, group)
    return state


def _exchange(operation: Callable[..., Any], state: Tensor, rank: int, group: Any) -> None:
    """Exchange a state in a batch of one: NCCL then creates no communicator for the two ranks."""
    (work,) = dist.batch_isend_irecv([dist.P2POp(operation, state, group=group, group_peer=rank)])
    work.wait()
