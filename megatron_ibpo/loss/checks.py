"""What the doors of the loss refuse, each with what, where and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_ibpo.loss.kl import KL_ESTIMATORS
from megatron_ibpo.loss.variants import Variant

__all__ = [
    "check_boundaries",
    "check_penalty",
    "check_sizes",
    "resolve_aggregation",
    "spread_temperature",
]


def check_penalty(kl: str, kl_coef: float, ref_logprobs_N: Tensor | None) -> None:
    """Refuse a penalty that cannot be computed.

    Raises:
        ValueError: an unknown estimator, or a coefficient without reference log-probs.
    """
    if kl not in KL_ESTIMATORS:
        raise ValueError(f"unknown KL estimator {kl!r}; there are {', '.join(KL_ESTIMATORS)}")
    if kl_coef != 0 and ref_logprobs_N is None:
        raise ValueError(f"kl_coef={kl_coef} needs ref_logprobs_N")


def resolve_aggregation(asked: str | float | None, variant: Variant) -> str | float:
    """The aggregation in force.

    Raises:
        ValueError: an unknown name, a number that is not above 0, or a variant that wants a constant and
            got none.
    """
    chosen = variant.aggregation if asked is None else asked
    if chosen == "constant":
        raise ValueError(
            "this loss variant divides by a constant: give the number of tokens, such as the longest "
            "response allowed (aggregation=8192)"
        )
    if isinstance(chosen, str):
        if chosen not in ("sequence-mean", "token-mean"):
            raise ValueError(
                f"unknown aggregation {chosen!r}; there are 'sequence-mean', 'token-mean' and a number "
                "of tokens"
            )
        return chosen
    if not chosen > 0:
        raise ValueError(f"aggregation {chosen}: a number of tokens to divide by must be above 0")
    return float(chosen)


def spread_temperature(
    temperature: Tensor | float, sequence_of_row: Callable[[], Tensor], num_sequences: int
) -> Tensor | float:
    """A temperature for each sequence as one for each row; a number stays one.

    Raises:
        ValueError: neither a number nor [S].
    """
    if not isinstance(temperature, Tensor) or temperature.ndim == 0:
        return temperature
    if temperature.shape != (num_sequences,):
        raise ValueError(
            f"temperature has shape {tuple(temperature.shape)}, wanted a number or ({num_sequences},)"
        )
    return temperature[sequence_of_row()]


def check_boundaries(cu_seqlens: Tensor, num_rows: int, cp_group: Any) -> Tensor:
    """This rank's cu_seqlens: those given, divided by the ranks of cp_group. One copy to the host.

    Raises:
        ValueError: boundaries that fall, do not span the rows, or do not divide among the ranks.
    """
    size = 1 if cp_group is None else dist.get_world_size(cp_group)
    bounds = cu_seqlens.tolist()
    lengths = [after - before for before, after in pairwise(bounds)]
    if not lengths or bounds[0] != 0 or bounds[-1] != num_rows * size or min(lengths) < 0:
        shared = f", {size} times over for the ranks of cp_group" if size > 1 else ""
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of rows ({num_rows}{shared}) and goes from "
            f"{bounds[0]} to {bounds[-1]}: a sequence cannot be cut across micro-batches, since its ratio "
            "needs all its tokens"
        )
    uneven = [length for length in lengths if length % size]
    if uneven:
        raise ValueError(f"a sequence of {uneven[0]} rows does not divide among the {size} ranks of cp_group")
    return cu_seqlens if size == 1 else cu_seqlens // size


def check_sizes(
    rows: Mapping[str, Tensor | None],
    num_rows: int,
    advantages: Tensor,
    sequence_weights_S: Tensor | None,
    num_sequences: int,
    variant: Variant,
) -> None:
    """Refuse tensors of the wrong length.

    Raises:
        ValueError: naming the tensor, its shape and the one wanted.
    """
    for name, tensor in rows.items():
        if tensor is not None and tensor.shape != (num_rows,):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, wanted ({num_rows},)")
    if sequence_weights_S is not None and sequence_weights_S.shape != (num_sequences,):
        raise ValueError(
            f"sequence_weights_S has shape {tuple(sequence_weights_S.shape)}, wanted ({num_sequences},)"
        )
    sizes = [num_sequences, num_rows] if variant.takes_token_advantages else [num_sequences]
    if advantages.ndim != 1 or len(advantages) not in sizes:
        wanted = " or ".join(f"({size},)" for size in sizes)
        raise ValueError(f"advantages have shape {tuple(advantages.shape)}, wanted {wanted}")
