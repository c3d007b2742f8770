"""Inputs of the terms of a loss variant: each is read by a positional argument of its name, and computed or
loaded only if a term names it. All are floats, [N] for token terms, [S] for sequence terms. Gradients go
through log_ratio and logprobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megatron_ibpo.kernels import term_calls
from megatron_ibpo.loss.packed_rows import LossRows, sum_over_ranks

Term = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class TokenInputs:
    """Inputs of a token term, [N]; None: the term does not read it. Rows outside the mask hold any value."""

    log_ratio: Tensor
    """log π - log π_old of the token, or its sequence's mean for variants with `sequence_ratio`."""
    logprobs: Tensor
    """log π of the token, the policy in training."""
    advantages: Tensor
    """The token's advantage, or its sequence's."""
    lengths: Tensor | None = None
    """Response tokens of the token's sequence."""
    positions: Tensor | None = None
    """Place of the token among its sequence's response tokens, from 0."""
    entropy: Tensor | None = None
    """Entropy (nats) of the distribution that the token was drawn from, under the policy in training."""
    ref_logprobs: Tensor | None = None
    """log π_ref of the token; needs a reference policy."""
    rollout_logprobs: Tensor | None = None
    """log-prob under the weights and the engine that sampled the token."""


@dataclass(frozen=True)
class SequenceInputs:
    """Inputs of a sequence term, [S]."""

    log_ratio: Tensor
    """Mean over the response tokens of log π - log π_old, or of the token term's values."""
    lengths: Tensor
    """Response tokens."""
    advantages: Tensor


FURTHER_INPUTS = ("lengths", "positions", "entropy", "ref_logprobs", "rollout_logprobs")
"""Inputs that are made only for token terms that name them, in the order in which the kernels get them."""


def input_names(term: Term, kind: type[TokenInputs | SequenceInputs]) -> tuple[str, ...]:
    """Return the names of a term's positional arguments. Raises TermError for one that is no input."""
    names = term_calls.input_names(term)
    allowed = [field.name for field in fields(kind)]
    if unknown := [name for name in names if name not in allowed]:
        location = f"{term_calls.place(term)}: {term_calls.term_name(term)}"
        raise term_calls.TermError(
            f"{location} has an argument {unknown[0]!r}; a term reads its inputs by these names: "
            f"{', '.join(allowed)}, and its parameters come after a *"
        )
    return names


def apply_term(
    term: Term, inputs: TokenInputs | SequenceInputs, params: Mapping[str, float]
) -> tuple[Tensor, Tensor]:
    """Return (value, clipped) of a term."""
    return term(*(getattr(inputs, name) for name in input_names(term, type(inputs))), **params)


def further_inputs(
    rows: LossRows, names: tuple[str, ...], entropy_N: Tensor | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return those of the named inputs that are in `FURTHER_INPUTS`, [N], in its order. `rows` are as
    `LossRows.checked` returns them. Raises ValueError for an input that they lack."""
    sources: dict[str, Callable[[], Tensor | None]] = {
        "lengths": lambda: _lengths(rows, dtype),
        "positions": rows.position_of_row,
        "entropy": lambda: entropy_N,
        "ref_logprobs": lambda: rows.ref_logprobs_N,
        "rollout_logprobs": lambda: rows.rollout_logprobs_N,
    }
    inputs = {}
    for name in (name for name in FURTHER_INPUTS if name in names):
        values_N = sources[name]()
        if values_N is None:
            raise ValueError(f"the loss variant reads {name}, and these rows have no {name}_N")
        outside = 1.0 if name == "lengths" else 0.0  # terms divide by lengths
        inputs[name] = torch.where(rows.response_mask_N, values_N.detach().to(dtype), outside)
    return inputs


def _lengths(rows: LossRows, dtype: torch.dtype) -> Tensor:
    sequence_N = rows.sequence_of_row()
    counts_S = torch.zeros(rows.num_sequences, dtype=dtype, device=sequence_N.device)
    counts_S = counts_S.index_add(0, sequence_N, rows.response_mask_N.to(dtype))
    return sum_over_ranks(counts_S, rows.cp_group)[sequence_N]
