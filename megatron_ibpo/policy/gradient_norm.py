"""The norm of a model's gradient, and the optimizer step that is clipped by it.

Megatron-core computes the norm again in its step, and without Transformer Engine or Apex the host waits for
the GPU once for each parameter. Here it is computed once, and the host waits once.
"""

from collections import defaultdict
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def gradient_norm(optimizer: Any) -> float:
    """Return the norm of the gradient buffers, with each parameter of the whole model counted once.
    Collective.

    Megatron decides which of a rank's gradients count, and over which ranks their squares are summed. In
    float32 on a CPU the result is Megatron's, bit for bit.

    Args:
        optimizer: Megatron's ChainedOptimizer.
    """
    optimizer.prepare_grads()
    by_group: dict[Any, list[Tensor]] = defaultdict(list)
    for part in optimizer.chained_optimizers:
        by_group[part.get_grad_stats_parallel_group()] += part.get_grads_for_grad_norm()
    squares = [_sum_of_squares(gradients, group) for group, gradients in by_group.items()]
    norms = [square**0.5 for square in torch.cat(squares).tolist()]
    return norms[0] if len(norms) == 1 else sqrt(sum(norm**2 for norm in norms))  # rounded as in Megatron


def take_step(optimizer: Any, norm: float) -> None:
    """Clip the gradients by their norm and step. Collective.

    Args:
        optimizer: Megatron's ChainedOptimizer.
        norm: result of `gradient_norm`, with the same gradients.
    """
    optimizer.get_grad_norm = lambda: norm  # in place of the method that computes it once more
    try:
        optimizer.step()
    finally:
        del optimizer.get_grad_norm


def _sum_of_squares(gradients: list[Tensor], group: Any) -> Tensor:
    """Return [1] float32 on the device, the sum over all ranks of the group. No host waits for it."""
    if gradients:
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        square = torch.linalg.vector_norm(torch.stack(norms)).reshape(1) ** 2
    else:
        square = torch.zeros(1, device=torch.cuda.current_device())
    dist.all_reduce(square, group=group)
    return square
