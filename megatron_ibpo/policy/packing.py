"""The trainer's half of packing: from a micro-batch's records to the tensors that model and loss take.
Suffixes: S sequences, T tokens (prompts and responses), R response tokens, N rows of the model's output."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ibpo.basics.records import ExpertIds, Flags, Floats, TokenIds, TrainSequence, Weights, no_expert
from megatron_ibpo.basics.sampling_mask import SamplingMask
from megatron_ibpo.loss import LossRows, RowIndex, SamplingSets
from megatron_ibpo.loss.packed_rows import GradientPlaces, response_positions
from megatron_ibpo.models.layout import context_chunks
from megatron_ibpo.models.packed import places as packed_places
from megatron_ibpo.models.shared_prompts import Continuations, PackedSequences
from megatron_ibpo.policy.planning import MicroBatch
from megatron_ibpo.policy.sampling_masks import joined_mask, sets_of_rows

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PackedArrays:
    """A micro-batch's sequences laid end to end, on the host. May be empty."""

    tokens_T: TokenIds
    """Prompt and response of each sequence."""
    prompt_lengths_S: Lengths
    response_lengths_S: Lengths
    loss_mask_R: Flags
    weights_S: Weights
    advantages_S: Floats
    temperature_S: Floats
    rollout_logprobs_R: Floats | None
    """None if any sequence lacks them; the same holds for returns and values."""
    token_weights_R: Weights | None
    """None if no sequence has any. Not rounded yet: importance weights are multiplied in."""
    token_advantages_R: Floats | None
    """Used in place of `advantages_S`; None if no sequence has any."""
    returns_R: Floats | None
    values_R: Floats | None
    members_S: Lengths
    """Index of each sequence in the planned list."""
    old_logprobs_R: Floats | None = None
    """Log-probs of the proximal policy, filled in by the rank before its first step. None: the forward pass
    itself gives them."""
    ref_logprobs_R: Floats | None = None
    """Log-probs of the reference policy, filled in by the rank if there is one."""
    importance_weights_R: Weights | None = None
    """Weights that correct for the policy that sampled, filled in by the rank. They are part of
    `token_weights_R`, and so of the reported loss."""
    off_policy_S: Flags | None = None
    """Flags of sequences that were sampled from another prompt; None if there are none."""
    routed_experts: ExpertIds | None = None
    """Experts that the routers must choose, [tokens but the last of each sequence, layers, experts per
    token]. None if no sequence has any; `no_expert` throughout a sequence without any."""
    siblings: tuple[int, ...] = ()
    """As in `MicroBatch`."""
    sampling_mask_R: SamplingMask | None = None
    """Ids over which log-probs of response tokens are normalised in every pass; None if none is
    restricted."""

    @property
    def off_policy_R(self) -> Flags | None:
        """Flags of these sequences' response tokens."""
        return None if self.off_policy_S is None else np.repeat(self.off_policy_S, self.response_lengths_S)


@dataclass(frozen=True)
class Context:
    """This rank's place among the ranks that share every sequence: context parallelism."""

    rank: int = 0
    size: int = 1
    group: Any = None


SINGLE_RANK = Context()
"""Every sequence is whole on one rank."""


@dataclass(frozen=True)
class PackedBatch:
    """Sequences laid end to end, as the model and the loss take them.

    A last token is never an input. One more sequence of weight 0 pads the rows, so that they divide among
    tensor-parallel ranks. Under context parallelism each sequence is padded too, and this rank has its chunks
    of all of them (`models.packed.places`): arrays [N] cover these; boundaries and arrays [S] cover whole
    sequences.
    """

    input_ids_1N: Tensor
    position_ids_1N: Tensor
    sequences: PackedSequences
    """The sequences as the model's layers take them."""
    rows: LossRows
    """Rows of the loss with an index, including the padding sequence; the mask is float32. Without old
    log-probs the forward pass itself gives them; without a reference policy it has no log-probs."""
    rollout_logprobs_N: Tensor | None
    importance_weights_N: Tensor | None
    returns_N: Tensor | None
    values_N: Tensor | None
    num_sequences: int
    """Number of sequences without the padding."""
    compared_rows_R: Tensor
    """[R] int64, rising: rows in the loss whose rollout log-probs were sampled from this very prompt."""
    places_R: Lengths
    """Row of each response token; under context parallelism among the rows of all ranks, laid end to end."""
    places_T: Lengths
    """Row of each input token (all but the last of each sequence), in the same way. Those of a shared prompt
    have the same rows in all its sequences, but for its last token."""
    context: Context = SINGLE_RANK
    routed_experts_NLK: ExpertIds | None = None
    """Experts that the routers must choose, [N, layers, experts per token] on the host; `no_expert` in the
    padding."""

    @property
    def is_real_N(self) -> Flags:
        """[N] on the host: True for rows that are not padding."""
        is_real = np.zeros(self.context.size * self.input_ids_1N.shape[1], bool)
        is_real[self.places_T] = True
        return is_real.reshape(self.context.size, -1)[self.context.rank]

    def loss_rows(self) -> Tensor:
        """Return [R] int64, rising: the rows in the loss. With a mask the host would wait for their count."""
        assert self.rows.index is not None  # `lay_out` sets it
        return self.rows.index.response_rows_R


def pack(micro_batch: MicroBatch) -> PackedArrays:
    """Lay the sequences of a micro-batch end to end."""
    chosen = micro_batch.sequences
    weighted = any(s.token_weights is not None for s in chosen)
    differing = any(s.token_advantages is not None for s in chosen)
    return PackedArrays(
        tokens_T=_concatenate(
            [ids for s in chosen for ids in (s.prompt_token_ids, s.response_token_ids)], np.int32
        ),
        prompt_lengths_S=np.array([len(s.prompt_token_ids) for s in chosen], np.int64),
        response_lengths_S=np.array([len(s.response_token_ids) for s in chosen], np.int64),
        loss_mask_R=_concatenate([s.loss_mask for s in chosen], np.bool_),
        weights_S=np.array([s.weight for s in chosen], np.float64),
        advantages_S=np.array([s.advantage for s in chosen], np.float32),
        temperature_S=np.array([s.temperature for s in chosen], np.float32),
        rollout_logprobs_R=_concatenate_if_complete([s.rollout_logprobs for s in chosen]),
        token_weights_R=(
            _concatenate([_or_all(s.token_weights, 1.0, s) for s in chosen], np.float64) if weighted else None
        ),
        token_advantages_R=(
            _concatenate([_or_all(s.token_advantages, s.advantage, s) for s in chosen], np.float32)
            if differing
            else None
        ),
        returns_R=_concatenate_if_complete([s.returns for s in chosen]),
        values_R=_concatenate_if_complete([s.values for s in chosen]),
        members_S=np.array(micro_batch.members, np.int64),
        off_policy_S=np.array([s.off_policy for s in chosen]) if any(s.off_policy for s in chosen) else None,
        routed_experts=_concatenate_choices(chosen),
        siblings=micro_batch.siblings,
        sampling_mask_R=joined_mask(chosen),
    )


def packed(micro_batches: Sequence[MicroBatch]) -> list[PackedArrays]:
    """Pack each micro-batch."""
    return [pack(micro_batch) for micro_batch in micro_batches]


def _concatenate(parts: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Join the parts; float64 becomes float32 here, rounded once."""
    return np.concatenate([np.empty(0, dtype), *parts], dtype=dtype, casting="same_kind")


def _concatenate_if_complete(parts: Sequence[npt.NDArray[Any] | None]) -> Floats | None:
    present = [part for part in parts if part is not None]
    return _concatenate(present, np.float32) if parts and len(present) == len(parts) else None


def _concatenate_choices(sequences: Sequence[TrainSequence]) -> ExpertIds | None:
    example = next((s.routed_experts for s in sequences if s.routed_experts is not None), None)
    if example is None:
        return None

    def choices_of(sequence: TrainSequence) -> ExpertIds:
        if sequence.routed_experts is not None:
            return sequence.routed_experts
        return np.full((sequence.num_tokens - 1, *example.shape[1:]), no_expert(example), example.dtype)

    return np.concatenate([choices_of(sequence) for sequence in sequences])


def _or_all(values: Weights | None, value: float, sequence: TrainSequence) -> Weights:
    return np.full(len(sequence.response_token_ids), value) if values is None else values


@dataclass(frozen=True)
class _Rows:
    """The rows of a micro-batch on all ranks that share it: of each sequence, then of roots (see
    `models.shared_prompts`), then padding. To the loss, roots and padding are one more sequence."""

    bounds: Lengths
    """Boundaries of the loss's sequences."""
    model_bounds: Lengths
    """Boundaries of the model's sequences: each root, and the padding, is one of its own."""
    positions: Lengths
    """Position of each row in its sequence."""
    rows_T: Lengths
    """The row of each input token: of all but the last of each sequence."""
    is_response_T: Flags
    """Input tokens that are followed by a response token."""
    max_seqlen: int


def _place_rows(arrays: PackedArrays, chunks: int, multiple: int) -> _Rows:
    """Give each sequence a multiple of `chunks` rows, and all together a multiple of `multiple`."""
    prompts_S, siblings = arrays.prompt_lengths_S, np.array(arrays.siblings, np.int64)
    lengths_S = prompts_S + arrays.response_lengths_S - 1
    family_C = np.repeat(np.arange(len(siblings)), siblings)
    in_roots_S = np.where(np.arange(len(lengths_S)) < len(family_C), prompts_S - 1, 0)
    roots_F = in_roots_S[siblings.cumsum() - siblings]
    rows_S = -(-(lengths_S - in_roots_S) // chunks) * chunks
    padding = -int(rows_S.sum() + roots_F.sum()) % multiple or (0 if len(lengths_S) else multiple)

    parts = np.concatenate([rows_S, roots_F, [padding] if padding else []]).astype(np.int64)
    before = np.append(in_roots_S, np.zeros(len(parts) - len(in_roots_S), np.int64))
    model_bounds = np.append(0, parts.cumsum())
    sequence_T = np.repeat(np.arange(len(lengths_S)), lengths_S)
    position_T = np.arange(len(sequence_T)) - np.repeat(lengths_S.cumsum() - lengths_S, lengths_S)
    rows_T = (model_bounds[:-1] - before)[sequence_T] + position_T
    in_root_T = position_T < in_roots_S[sequence_T]
    root_starts_F = model_bounds[len(lengths_S) : len(lengths_S) + len(roots_F)]
    rows_T[in_root_T] = root_starts_F[family_C[sequence_T[in_root_T]]] + position_T[in_root_T]
    return _Rows(
        bounds=np.unique(np.append(model_bounds[: len(lengths_S) + 1], model_bounds[-1])),
        model_bounds=model_bounds,
        positions=np.arange(model_bounds[-1]) - np.repeat(model_bounds[:-1] - before, parts),
        rows_T=rows_T,
        is_response_T=position_T >= prompts_S[sequence_T] - 1,
        max_seqlen=int((parts + before).max()),
    )


def _continuations(
    arrays: PackedArrays, model_bounds: Lengths, tensor: Callable[..., Tensor]
) -> Continuations | None:
    """Return which of the model's sequences continue others. `tensor`: (array, dtype) → on the device."""
    if not arrays.siblings:
        return None
    count = sum(arrays.siblings)
    rows = int(model_bounds[count])
    root_C = len(arrays.members_S) - count + np.repeat(np.arange(len(arrays.siblings)), arrays.siblings)
    return Continuations(
        rows,
        tensor(model_bounds[: count + 1], torch.int32),
        tensor(model_bounds[count:] - rows, torch.int32),
        tensor(root_C, torch.int64),
    )


def lay_out(
    arrays: PackedArrays, *, multiple: int, device: torch.device, context: Context = SINGLE_RANK
) -> PackedBatch:
    """Return the tensors of a micro-batch on this rank, with rows padded to a multiple of `multiple`."""
    chunks = context_chunks(context.size)
    rows = _place_rows(arrays, chunks, math.lcm(chunks, multiple * context.size))

    bounds = rows.bounds

    def with_padding(values_S: npt.NDArray[Any], value: float) -> npt.NDArray[Any]:
        return np.append(values_S, np.array(value, values_S.dtype))[: len(bounds) - 1]

    rows_R = rows.rows_T[rows.is_response_T]
    ends = (arrays.prompt_lengths_S + arrays.response_lengths_S).cumsum()
    places = packed_places(torch.from_numpy(bounds), context.size).numpy()
    rank_rows = np.argsort(places).reshape(context.size, -1)[context.rank]
    places_R = places[rows_R]
    is_own_R = places_R // len(rank_rows) == context.rank
    own_rows_R = places_R % len(rank_rows)

    def tensor(values: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
        on_host = torch.from_numpy(values).to(dtype)
        if device.type == "cuda":  # a copy from memory that is not pinned makes the host wait
            on_host = on_host.pin_memory()
        return on_host.to(device, non_blocking=True)

    def token_rows(tokens: npt.NDArray[Any]) -> Tensor:
        all_rows = np.zeros(bounds[-1], tokens.dtype)
        all_rows[rows.rows_T] = tokens
        return tensor(all_rows[rank_rows], torch.int64)

    def per_row(values_R: npt.NDArray[Any] | None) -> Tensor | None:
        if values_R is None:
            return None
        values_N = np.zeros(len(rank_rows), np.float32)
        values_N[own_rows_R[is_own_R]] = values_R[is_own_R]
        return tensor(values_N, torch.float32)

    def choices(ids: ExpertIds | None) -> ExpertIds | None:
        if ids is None:
            return None
        all_rows = np.full((bounds[-1], *ids.shape[1:]), no_expert(ids), ids.dtype)
        all_rows[rows.rows_T] = ids
        return all_rows[rank_rows]

    def sampling_sets(mask: SamplingMask | None) -> SamplingSets | None:
        if mask is None:
            return None
        ids, starts, stops = sets_of_rows(mask, is_trained_R, own_rows_R, len(rank_rows))
        if not len(ids):  # other ranks have the restricted rows
            return None
        return SamplingSets(tensor(ids, torch.int32), tensor(starts, torch.int64), tensor(stops, torch.int64))

    def sequences(values_S: npt.NDArray[Any], fill: float) -> Tensor:
        return tensor(with_padding(values_S, fill).copy(), torch.float32)

    is_trained_R = is_own_R & arrays.loss_mask_R
    mask_N = per_row(arrays.loss_mask_R)
    assert mask_N is not None
    token_advantages_N = per_row(arrays.token_advantages_R)
    rollout_logprobs_N = per_row(arrays.rollout_logprobs_R)
    has_critic = arrays.returns_R is not None and arrays.values_R is not None
    loss_rows = own_rows_R[is_trained_R]
    policy_places = np.flatnonzero(_has_policy_gradient(arrays)[is_trained_R])
    loss_rows_R = compared_rows_R = tensor(loss_rows, torch.int64)
    off_policy_S = None
    if arrays.off_policy_S is not None and arrays.off_policy_R is not None:
        off_policy_S = tensor(with_padding(arrays.off_policy_S, False), torch.bool)
        compared_rows_R = tensor(own_rows_R[is_trained_R & ~arrays.off_policy_R], torch.int64)
    positions_N = None
    if context.size > 1:  # elsewhere the loss counts
        responses = torch.from_numpy(np.append(0, arrays.response_lengths_S.cumsum()))
        positions_N = per_row(response_positions(torch.from_numpy(arrays.loss_mask_R), responses).numpy())
    index = RowIndex(
        bounds=tuple(bounds.tolist()),
        response_rows_R=loss_rows_R,
        ends=tuple(np.searchsorted(loss_rows, bounds[1:] // context.size).tolist()),
        policy_places=GradientPlaces(policy_places, tensor(policy_places, torch.int64)),
    )
    cu_seqlens = tensor(bounds, torch.int32)
    if arrays.siblings and device.type == "cuda":
        raise ValueError("the kernels of GPUs take whole sequences: resolve the configuration for GPUs")
    continuations = _continuations(arrays, rows.model_bounds, tensor)
    of_model = cu_seqlens if continuations is None else tensor(rows.model_bounds, torch.int32)
    return PackedBatch(
        input_ids_1N=token_rows(np.delete(arrays.tokens_T, ends - 1))[None],
        position_ids_1N=tensor(rows.positions[rank_rows], torch.int64)[None],
        sequences=PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=of_model,
            cu_seqlens_kv=of_model,
            max_seqlen_q=rows.max_seqlen,
            max_seqlen_kv=rows.max_seqlen,
            continuations=continuations,
        ),
        rows=LossRows(
            targets_N=token_rows(np.delete(arrays.tokens_T, np.append(0, ends[:-1])[: len(ends)])),
            response_mask_N=mask_N,
            cu_seqlens=cu_seqlens,
            advantages=(
                sequences(arrays.advantages_S, 0.0) if token_advantages_N is None else token_advantages_N
            ),
            old_logprobs_N=per_row(arrays.old_logprobs_R),
            ref_logprobs_N=per_row(arrays.ref_logprobs_R),
            rollout_logprobs_N=rollout_logprobs_N,
            positions_N=positions_N,
            token_weights_N=per_row(arrays.token_weights_R),
            sequence_weights_S=sequences(arrays.weights_S, 0.0),
            off_policy_S=off_policy_S,
            temperature=sequences(arrays.temperature_S, 1.0),
            sampling_sets=sampling_sets(arrays.sampling_mask_R),
            cp_group=context.group,
            index=index,
        ),
        rollout_logprobs_N=rollout_logprobs_N,
        importance_weights_N=per_row(arrays.importance_weights_R),
        returns_N=per_row(arrays.returns_R) if has_critic else None,
        values_N=per_row(arrays.values_R) if has_critic else None,
        num_sequences=len(arrays.members_S),
        compared_rows_R=compared_rows_R,
        places_R=places_R,
        places_T=places[rows.rows_T],
        context=context,
        routed_experts_NLK=choices(arrays.routed_experts),
    )


def _has_policy_gradient(arrays: PackedArrays) -> Flags:
    """Return [R], False for response tokens of advantage 0 or weight 0."""
    advantages_R, token_weights_R = arrays.token_advantages_R, arrays.token_weights_R
    if advantages_R is None:
        advantages_R = np.repeat(arrays.advantages_S, arrays.response_lengths_S)
    has_gradient_R = (advantages_R != 0) & (np.repeat(arrays.weights_S, arrays.response_lengths_S) != 0)
    return has_gradient_R if token_weights_R is None else has_gradient_R & (token_weights_R != 0)


def response_values(batches: Sequence[PackedBatch], values: Sequence[Tensor]) -> list[Floats]:
    """Return [R] float32 for each micro-batch, one or more: the value of each response token, 0 outside of
    the loss. One copy from the device; under context parallelism after one all-gather."""
    masked = [
        torch.where(batch.rows.response_mask_N.bool(), values_N, 0.0).float()
        for batch, values_N in zip(batches, values, strict=True)
    ]
    bounds = np.cumsum([len(values_N) for values_N in masked])[:-1]
    context, flat = batches[0].context, torch.cat(masked)
    by_rank = flat[None]
    if context.size > 1:
        by_rank = flat.new_empty(context.size, len(flat))
        dist.all_gather(list(by_rank), flat, group=context.group)
    values_by_pack = np.split(by_rank.cpu().numpy(), bounds, axis=1)
    return [values.reshape(-1)[batch.places_R] for batch, values in zip(batches, values_by_pack, strict=True)]


def split_sequences(arrays: PackedArrays, values_R: Floats) -> list[tuple[int, Floats]]:
    """Return (index in the planned list, values of its response tokens) for each sequence."""
    ends = arrays.response_lengths_S.cumsum()
    starts = ends - arrays.response_lengths_S
    spans = zip(arrays.members_S.tolist(), starts.tolist(), ends.tolist(), strict=True)
    return [(member, values_R[start:end]) for member, start, end in spans]


def split_choices(arrays: PackedArrays, ids: ExpertIds) -> list[tuple[int, ExpertIds]]:
    """Return (index in the planned list, routers' choices for its tokens but the last) for each sequence."""
    ends = (arrays.prompt_lengths_S + arrays.response_lengths_S - 1).cumsum()
    return list(zip(arrays.members_S.tolist(), np.split(ids, ends[:-1]), strict=True)) if len(ends) else []


def with_choices(
    packs: Sequence[PackedArrays], choices: Sequence[tuple[int, ExpertIds]]
) -> list[PackedArrays]:
    """Return each micro-batch with the experts that routers must choose, from choices by sequence."""
    by_member = dict(choices)
    return [
        replace(arrays, routed_experts=np.concatenate([by_member[m] for m in arrays.members_S.tolist()]))
        if len(arrays.members_S)
        else arrays
        for arrays in packs
    ]


def packed_values(packs: Sequence[PackedArrays], values: Sequence[tuple[int, Floats]]) -> list[Floats | None]:
    """Return [R] for each micro-batch, from values by sequence; None where a sequence has none, as on
    pipeline stages that compute none."""
    by_member = dict(values)
    members_by_pack = [arrays.members_S.tolist() for arrays in packs]
    return [
        _concatenate([by_member[member] for member in members], np.float32)
        if by_member.keys() >= set(members)
        else None
        for members in members_by_pack
    ]
