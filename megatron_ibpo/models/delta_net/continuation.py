"""The gated delta net of sequences that continue others (`models.shared_prompts`): the short convolution sees
the last tokens of the root, and the recurrent state is the root's last one."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_ibpo.models import packed
from megatron_ibpo.models.shared_prompts import Continuations


def convolve(
    function: Callable[[Tensor, Tensor], Tensor], x_NF: Tensor, width: int, continuations: Continuations
) -> Tensor:
    """Apply a causal convolution over the present and the `width` tokens before it. [N, F].

    `function`: (tokens [M, F], position of each in its sequence) → [M, F]; it looks no further back than a
    sequence's start.
    """
    # not `continuations` itself, which would hold what is kept with the boundaries that it holds
    led_M, positions_M, places_N = _led(
        continuations.cu_seqlens, continuations.root_ends_C, continuations.positions_N, width
    )
    return function(x_NF.index_select(0, led_M), positions_M).index_select(0, places_N)


@packed.once_per_batch
def _led(
    cu_seqlens: Tensor, root_ends_C: Tensor, positions_N: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Lay the last `width` tokens of its root before each continuation. Returns (the token at each place, its
    position, the place of each token); tokens before a root's start are arbitrary, and none sees them."""
    device, starts_C, lengths_C = cu_seqlens.device, cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    back_W = torch.arange(width, 0, -1, device=device)
    leading_C = (torch.arange(len(lengths_C), device=device) + 1) * width
    before_N = torch.full_like(positions_N, width * len(lengths_C))
    before_N[: int(cu_seqlens[-1])] = leading_C.repeat_interleave(lengths_C)
    tokens = torch.arange(len(positions_N), device=device)
    places_N = tokens + before_N
    led_M = tokens.new_empty(len(tokens) + width * len(lengths_C))
    led_M[places_N] = tokens
    led_M[(starts_C + leading_C)[:, None] - back_W] = (root_ends_C[:, None] - back_W).clamp(min=0)
    return led_M, positions_N[led_M], places_N


def recur(
    rule: Callable[..., tuple[Tensor, Tensor]],
    query_NGD: Tensor,
    key_NGD: Tensor,
    value_NHE: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    continuations: Continuations,
) -> Tensor:
    """Apply the gated delta rule, continuations starting from the last states of their roots. [N, H, E].
    `rule` is as `delta_net.layer.gated_delta_rule`."""
    inputs = query_NGD, key_NGD, value_NHE, decay_NH, beta_NH
    others = len(continuations.cu_roots) - 1
    zero_SHDE = value_NHE.new_zeros(others, value_NHE.shape[1], key_NGD.shape[2], value_NHE.shape[2])
    of_roots, last_SHDE = rule(*(x[continuations.rows :] for x in inputs), continuations.cu_roots, zero_SHDE)
    first_CHDE = last_SHDE.index_select(0, continuations.root_C)
    continued, _ = rule(*(x[: continuations.rows] for x in inputs), continuations.cu_seqlens, first_CHDE)
    return torch.cat((continued, of_roots))
