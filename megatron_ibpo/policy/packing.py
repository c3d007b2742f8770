"""From TrainSequences to packed micro-batches, the same on every rank without a word between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron_ibpo.records import TrainSequence

__all__ = ["PackedBatch", "pack", "plan_micro_batches", "split_minibatches"]


@dataclass(frozen=True)
class PackedBatch:
    """Sequences laid end to end. Row t of the model's output predicts `targets_N[t]`.

    A last token is never an input, since nothing is predicted from it. The rows are padded by one more
    sequence of weight 0, so that they divide among tensor-parallel ranks.
    """

    input_ids_1N: Tensor
    position_ids_1N: Tensor
    cu_seqlens: Tensor
    """[S + 1] int32, the padding sequence included."""
    max_seqlen: int
    targets_N: Tensor
    response_mask_N: Tensor
    old_logprobs_N: Tensor | None
    rollout_logprobs_N: Tensor | None
    token_weights_N: Tensor | None
    returns_N: Tensor | None
    values_N: Tensor | None
    advantages: Tensor
    """[S], or [N] where any of the sequences has one for each token."""
    weights_S: Tensor
    temperature_S: Tensor
    members: tuple[int, ...]
    """Index of each packed sequence in the list that was planned; shorter than S by the padding."""


def split_minibatches(sequences: Sequence[TrainSequence], count: int) -> list[list[TrainSequence]]:
    """Cut a step's sequences into `count` mini-batches of whole groups, as equal as may be.

    Weights are relative to the step; a mini-batch with a share of the groups gets them scaled up by the
    inverse of that share, so that each update is an average over its own prompts.
    """
    groups = sorted({sequence.group for sequence in sequences})
    cuts = [round(i * len(groups) / count) for i in range(count + 1)]
    minibatches = []
    for first, last in pairwise(cuts):
        chosen = set(groups[first:last])
        scale = len(groups) / max(1, len(chosen))
        minibatches.append([_reweighted(s, scale) for s in sequences if s.group in chosen])
    return minibatches


def _reweighted(sequence: TrainSequence, scale: float) -> TrainSequence:
    values = {name: getattr(sequence, name) for name in TrainSequence.__slots__}
    return TrainSequence(**{**values, "weight": sequence.weight * scale})


def plan_micro_batches(lengths: Sequence[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Which sequences go into which micro-batch of which data-parallel rank: [rank][micro-batch][index].

    Sequences are dealt by length, so ranks get about the same work and a micro-batch holds sequences of
    about the same length. Every rank gets the same number of micro-batches; some may be empty.
    """
    by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    plan: list[list[list[int]]] = []
    for rank in range(num_ranks):
        batches: list[list[int]] = []
        room = 0
        for turn in range(0, len(by_length), num_ranks):
            # deal back and forth, so that no rank always gets the longer one
            place = rank if (turn // num_ranks) % 2 == 0 else num_ranks - 1 - rank
            if turn + place >= len(by_length):
                continue
            index = by_length[turn + place]
            if not batches or lengths[index] > room:
                batches.append([])
                room = max_tokens
            batches[-1].append(index)
            room -= lengths[index]
        plan.append(batches)
    most = max(1, *(len(batches) for batches in plan))
    for batches in plan:
        batches.extend([] for _ in range(most - len(batches)))
    return plan


def pack(
    sequences: Sequence[TrainSequence],
    members: Sequence[int],
    *,
    multiple: int,
    own_old_logprobs: bool,
    device: torch.device,
) -> PackedBatch:
    """Pack `sequences[i] for i in members`; the number of rows becomes a multiple of `multiple`.

    With `own_old_logprobs` the forward pass itself gives the old log-probs.
    """
    chosen = [sequences[i] for i in members]
    lengths = [s.num_tokens - 1 for s in chosen]
    padding = -sum(lengths) % multiple or (0 if chosen else multiple)
    all_lengths = lengths + ([padding] if padding else [])

    def rows(parts: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
        flat = [value for part in parts for value in part] + [0] * padding
        return torch.tensor(flat, dtype=dtype, device=device)

    def response_rows(values: list[tuple[float, ...]]) -> Tensor:
        parts = [[0.0] * (len(s.prompt_token_ids) - 1) + list(v) for s, v in zip(chosen, values, strict=True)]
        return rows(parts, torch.float32)

    def per_sequence(values: list[float], fill: float) -> Tensor:
        return torch.tensor([*values, *([fill] if padding else [])], dtype=torch.float32, device=device)

    tokens = [[*s.prompt_token_ids, *s.response_token_ids] for s in chosen]
    old = None if own_old_logprobs else response_rows([_required(s.old_logprobs) for s in chosen])
    has_rollout = bool(chosen) and all(s.rollout_logprobs is not None for s in chosen)
    has_returns = bool(chosen) and all(s.returns is not None and s.values is not None for s in chosen)
    has_weights = any(s.token_weights is not None for s in chosen)
    return PackedBatch(
        input_ids_1N=rows([t[:-1] for t in tokens], torch.int64)[None],
        position_ids_1N=torch.cat([torch.arange(n, device=device) for n in all_lengths])[None],
        cu_seqlens=torch.tensor([0, *all_lengths], device=device).cumsum(0).to(torch.int32),
        max_seqlen=max(all_lengths),
        targets_N=rows([t[1:] for t in tokens], torch.int64),
        response_mask_N=response_rows([(1.0,) * len(s.response_token_ids) for s in chosen]),
        old_logprobs_N=old,
        rollout_logprobs_N=(
            response_rows([_required(s.rollout_logprobs) for s in chosen]) if has_rollout else None
        ),
        token_weights_N=(
            response_rows([s.token_weights or (1.0,) * len(s.response_token_ids) for s in chosen])
            if has_weights
            else None
        ),
        returns_N=response_rows([s.returns or () for s in chosen]) if has_returns else None,
        values_N=response_rows([s.values or () for s in chosen]) if has_returns else None,
        advantages=(
            response_rows([s.token_advantages or (s.advantage,) * len(s.response_token_ids) for s in chosen])
            if any(s.token_advantages is not None for s in chosen)
            else per_sequence([s.advantage for s in chosen], 0.0)
        ),
        weights_S=per_sequence([s.weight for s in chosen], 0.0),
        temperature_S=per_sequence([s.temperature for s in chosen], 1.0),
        members=tuple(members),
    )


def _required(logprobs: tuple[float, ...] | None) -> tuple[float, ...]:
    if logprobs is None:
        raise ValueError("a TrainSequence has no old log-probs: compute them with Trainer.logprobs first")
    return logprobs
