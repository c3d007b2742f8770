"""Log-probs and entropies of packed rows by the kernels, and their gradient."""

from typing import Any

import torch
from torch import Tensor

from megatron_ibpo.kernels import logits_gradient
from megatron_ibpo.kernels.row_statistics import combine_shards, shard_statistics
from megatron_ibpo.kernels.set_rows import write_set_gradient, write_set_statistics


def row_logprobs(
    logits_NV: Tensor,
    targets_N: Tensor,
    mask_N: Tensor | None,
    temperature_N: Tensor | float,
    sampling_sets: Any,
    tp_group: Any,
    vocab_range: tuple[int, int],
    entropy: bool,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Compute log-probs as `megatron_ibpo.loss.logprobs.row_functions` says. Saved are the temperature, [1]
    or [N] fp32, and 8 bytes per row for `write_gradient`, which reads the logits once and writes once; for
    restricted rows 4 bytes per id, and the sets.

    Raises:
        ValueError: a target that no shard has, or that is not in its row's set. On a GPU the device asserts,
            without waiting.
    """
    temperature = torch.as_tensor(temperature_N, dtype=torch.float32, device=logits_NV.device)
    temperature = temperature.reshape(-1).contiguous()
    of_shard: dict[str, Any] = {"temperature": temperature, "vocab_range": vocab_range, "entropy": entropy}
    saved_of_sets: tuple[Tensor, ...] = ()
    if sampling_sets is None or not len(logits_NV):
        shard_4N = shard_statistics(logits_NV, targets_N, mask_N, **of_shard)
    else:
        whole_N = sampling_sets.starts_N == sampling_sets.stops_N
        whole_N = whole_N if mask_N is None else whole_N & (mask_N != 0)
        shard_4N = shard_statistics(logits_NV, targets_N, whole_N, **of_shard)
        set_logits_K = write_set_statistics(
            shard_4N, logits_NV, targets_N, mask_N, sampling_sets=sampling_sets, **of_shard
        )
        saved_of_sets = (set_logits_K, *sampling_sets.tensors)
    statistics = combine_shards(shard_4N, mask_N, tp_group)
    _check_targets(statistics.logprobs, targets_N, restricted=sampling_sets is not None)
    saved = (temperature, statistics.shift, statistics.total, *saved_of_sets)
    return statistics.logprobs, statistics.entropy if entropy else None, saved


def write_gradient(
    out_NV: Tensor,
    logits_NV: Tensor,
    targets_N: Tensor,
    saved: tuple[Tensor, ...],
    coefficients_N: Tensor,
    vocab_range: tuple[int, int],
) -> None:
    """Write the gradient as `megatron_ibpo.loss.logprobs.row_functions` says."""
    temperature, shift_N, total_N, *saved_of_sets = saved
    of_rows: dict[str, Any] = {"temperature": temperature, "shift_N": shift_N, "total_N": total_N}
    of_rows["vocab_range"] = vocab_range
    whole_N = coefficients_N
    if saved_of_sets:
        _, _, starts_N, stops_N = saved_of_sets
        whole_N = torch.where(starts_N == stops_N, coefficients_N, 0.0)
    logits_gradient.write_gradient(out_NV, logits_NV, targets_N, coefficients_N=whole_N, **of_rows)
    if saved_of_sets:
        set_logits_K, *sets = saved_of_sets
        write_set_gradient(
            out_NV, targets_N, set_logits_K=set_logits_K, sets=sets, coefficients_N=coefficients_N, **of_rows
        )


def _check_targets(logprobs_N: Tensor, targets_N: Tensor, *, restricted: bool) -> None:
    inside = logprobs_N != -torch.inf  # of a target that no shard has
    restriction = ", or not in the sampling set of its row" if restricted else ""
    if logprobs_N.is_cuda:
        torch._assert_async(inside.all(), f"a target id is outside the vocabulary of the logits{restriction}")
    elif not bool(inside.all()):
        bad = targets_N[~inside][0].item()
        raise ValueError(f"target id {bad} is outside the vocabulary of the logits{restriction}")
