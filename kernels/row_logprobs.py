"""Log-probs and entropies of packed rows by the kernels."""

from typing import Any

import torch
from torch import Tensor

from megatron_ibpo.kernels.row_statistics import row_statistics


def row_logprobs(
    logits_NV: Tensor,
    targets_N: Tensor,
    mask_N: Tensor | None,
    temperature_N: Tensor | float,
    tp_group: Any,
    vocab_range: tuple[int, int],
    entropy: bool,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor, Tensor]]:
    """As `megatron_ibpo.loss.logprobs.row_functions` says. Kept are the temperature, [1] or [N] fp32, and
    8 bytes per row for `write_gradient`, which reads the logits once and writes once.

    Raises:
        ValueError: a target that no shard has. On a GPU the device asserts, without waiting.
    """
    temperature = torch.as_tensor(temperature_N, dtype=torch.float32, device=logits_NV.device)
    temperature = temperature.reshape(-1).contiguous()
    found = row_statistics(logits_NV, targets_N, mask_N, temperature, tp_group, vocab_range, entropy=entropy)
    _check_targets(found.logprobs, targets_N)
    return found.logprobs, found.entropy if entropy else None, (temperature, found.shift, found.total)


def _check_targets(logprobs_N: Tensor, targets_N: Tensor) -> None:
    inside = logprobs_N != -torch.inf  # of a target that no shard has
    if logprobs_N.is_cuda:
        torch._assert_async(inside.all(), "a target id is outside the vocabulary of the logits")
    elif not bool(inside.all()):
        bad = targets_N[~inside][0].item()
        raise ValueError(f"target id {bad} is outside the vocabulary of the logits")
