"""The driver's half of packing: which rank computes what, as flat arrays that are sent to that rank alone.

The driver has neither a GPU nor a model, so nothing here needs torch. Arrays are named by what they run over:
S sequences, T tokens (prompts and responses), R response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from megatron_ibpo.config import Config, ParallelConfig
from megatron_ibpo.records import Flags, Floats, TokenIds, TrainSequence, Weights

__all__ = [
    "Block",
    "MicroBatch",
    "MiniBatch",
    "Passes",
    "Plan",
    "RankForward",
    "RankMeasure",
    "RankUpdate",
    "data_parallel_rank",
    "merge_parts",
    "pack",
    "plan_forward",
    "plan_measure",
    "plan_micro_batches",
    "plan_update",
    "plan_value_update",
    "split_minibatches",
    "update_metrics",
    "weighted_mean_length",
]

Lengths = npt.NDArray[np.int64]
Share = TypeVar("Share")


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Sequences laid end to end, as they travel to the rank that computes them. May be empty."""

    tokens_T: TokenIds
    """Prompt and response of each sequence."""
    prompt_lengths_S: Lengths
    response_lengths_S: Lengths
    loss_mask_R: Flags
    weights_S: Weights
    advantages_S: Floats
    temperature_S: Floats
    rollout_logprobs_R: Floats | None
    """None where a sequence has none; so with returns and values."""
    token_weights_R: Weights | None
    """None where no sequence has any. Not rounded yet: truncated importance weights are multiplied in."""
    token_advantages_R: Floats | None
    """Instead of `advantages_S`; None where no sequence has any."""
    returns_R: Floats | None
    values_R: Floats | None
    members_S: Lengths
    """Index of each sequence in the list that was planned."""
    old_logprobs_R: Floats | None = None
    """Filled in by the rank itself, before its first step; None: the forward pass itself gives them."""
    ref_logprobs_R: Floats | None = None
    """Of the reference policy; filled in by the rank itself where there is one."""


@dataclass(frozen=True)
class MiniBatch:
    """One rank's part of one optimizer step, and what it must know of the other ranks'."""

    micro_batches: list[MicroBatch]
    """As many on every rank; none where no rank has a sequence."""
    needs_old_logprobs: bool
    """Else its own forward pass gives them."""
    mean_length: float
    """`weighted_mean_length` of the whole mini-batch, sequences without advantage included."""
    trained_tokens: int
    """Tokens in the loss, on all ranks."""


@dataclass(frozen=True)
class RankUpdate:
    """One rank's part of a rollout's optimizer steps."""

    minibatches: list[MiniBatch]


@dataclass(frozen=True)
class RankForward:
    """One rank's part of a forward pass."""

    micro_batches: list[MicroBatch]
    """As many on every rank; none where there is no sequence."""


@dataclass(frozen=True)
class Block:
    """One rank's part of the sequences of a block of prompts."""

    prompts: int
    """Those without any gradient included."""
    micro_batches: list[MicroBatch]
    """As many on every rank; none where no sequence has an advantage."""


@dataclass(frozen=True)
class RankMeasure:
    """One rank's part of a measurement of the gradient's noise."""

    own: list[Block]
    """What the step trains on; empty for fewer than two prompts, of which nothing can be said."""
    mean_length: float
    """`weighted_mean_length` of `own`."""
    plain: list[Block] | None
    """The same responses with plain advantages; None: as `own`."""


@dataclass(frozen=True)
class Passes:
    """Sequences that go through the model, by their lengths in tokens."""

    forward: list[int] = field(default_factory=list)
    """In a forward pass alone, for log-probs or values."""
    updates: list[int] = field(default_factory=list)
    """In a forward and backward pass of an optimizer step."""


@dataclass(frozen=True)
class Plan(Generic[Share]):
    """What every data-parallel rank gets, packed when it is asked for.

    So the driver need not hold the packed arrays of all ranks at once: it packs one rank's, sends them off
    and forgets them.
    """

    share: Callable[[int], Share]
    """Of a data-parallel rank."""
    passes: Passes


def plan_update(sequences: Sequence[TrainSequence], config: Config, num_ranks: int) -> Plan[RankUpdate]:
    """The optimizer steps of one rollout.

    Sequences without anything to learn from are not computed; they count in the divisor of a token mean.

    Args:
        num_ranks: data-parallel ranks.

    Raises:
        ValueError: a sequence whose arrays do not fit its response, or with --use-tis one without the
            rollout's log-probs.
    """
    loss = config.loss
    _check(sequences)
    parts = split_minibatches(sequences, loss.num_steps_per_rollout)
    live = [[s for s in part if _is_trained_on(s)] for part in parts]
    if loss.use_tis:
        _check_rollout_logprobs(s for part in live for s in part)
    # the first mini-batch's own forward gives its old log-probs, unless a weight depends on them
    needs_old = [loss.use_tis or number > 0 for number in range(len(live))]
    passes = Passes(
        [s.num_tokens for part, needed in zip(live, needs_old, strict=True) if needed for s in part],
        [s.num_tokens for part in live for s in part],
    )
    minibatches = [
        _planned(of_loss, part, needed, config, num_ranks)
        for part, of_loss, needed in zip(parts, live, needs_old, strict=True)
    ]
    return Plan(lambda rank: RankUpdate([minibatch(rank) for minibatch in minibatches]), passes)


def plan_value_update(sequences: Sequence[TrainSequence], config: Config, num_ranks: int) -> Plan[RankUpdate]:
    """The critic's optimizer steps of one rollout: it learns from all sequences, whatever their advantage.

    Raises:
        ValueError: a sequence whose arrays do not fit its response, or without returns and old values.
    """
    _check(sequences)
    for number, s in enumerate(sequences):
        if s.returns is None or s.values is None:
            raise ValueError(
                f"the critic needs returns and old values with every sequence; {number} has none"
            )
    parts = [part for part in split_minibatches(sequences, config.loss.num_steps_per_rollout) if part]
    minibatches = [_planned(part, part, False, config, num_ranks) for part in parts]
    passes = Passes(updates=[s.num_tokens for part in parts for s in part])
    return Plan(lambda rank: RankUpdate([minibatch(rank) for minibatch in minibatches]), passes)


def plan_forward(sequences: Sequence[TrainSequence], config: Config, num_ranks: int) -> Plan[RankForward]:
    """A pass for log-probs or values of every response token.

    Raises:
        ValueError: a sequence whose arrays do not fit its response.
    """
    _check(sequences)
    share = _dealt(sequences, config, num_ranks)
    return Plan(lambda rank: RankForward(share(rank)), Passes(forward=[s.num_tokens for s in sequences]))


def plan_measure(
    sequences: Sequence[TrainSequence], plain: Sequence[TrainSequence], config: Config, num_ranks: int
) -> Plan[RankMeasure]:
    """A measurement of the gradient's noise over at most --gradient-meter-blocks blocks of prompts.

    Args:
        sequences: a whole step's; weights as they are trained with.
        plain: the same responses with plain advantages and no corrections.
    """
    _check([*sequences, *plain])
    if config.loss.use_tis:
        _check_rollout_logprobs(s for s in sequences if _is_trained_on(s))
    own = _blocks(sequences, config, num_ranks)
    other = None if _train_alike(sequences, plain) else _blocks(plain, config, num_ranks)
    length = weighted_mean_length(sequences)

    def share(rank: int) -> RankMeasure:
        return RankMeasure(own(rank), length, None if other is None else other(rank))

    return Plan(share, Passes())


def update_metrics(sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """What an update over `sequences` trains on, in numbers; tokens count with their prompts."""
    trained = [s for s in sequences if _is_trained_on(s)]
    tokens = [len(s.prompt_token_ids) + s.num_trained_tokens for s in trained]
    return {
        "sequences_trained": len(trained),
        "sequences_without_advantage": len(sequences) - len(trained),
        "tokens_trained": sum(tokens),
        "tokens_trained_corrections": sum(
            count for s, count in zip(trained, tokens, strict=True) if s.kind == "correction"
        ),
    }


def merge_parts(parts: Iterable[Sequence[tuple[int, Any]]], count: int) -> list[Any]:
    """What the ranks found of `count` planned sequences, in order.

    Raises:
        ValueError: nothing was found of some of them.
    """
    found = {index: value for part in parts for index, value in part}
    if missing := [index for index in range(count) if index not in found]:
        raise ValueError(
            f"no rank reported on {len(missing)} of {count} sequences; the first is {missing[0]}"
        )
    return [found[index] for index in range(count)]


def data_parallel_rank(rank: int, parallel: ParallelConfig, world_size: int) -> int:
    """Whose share rank `rank` of the trainers gets; Megatron counts tensor parallel ranks first and pipeline
    stages last."""
    inner = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    return rank // inner % (world_size // inner // parallel.pipeline_model_parallel_size)


def split_minibatches(sequences: Sequence[TrainSequence], count: int) -> list[list[TrainSequence]]:
    """Cut a step's sequences into `count` mini-batches of whole groups, as equal as may be.

    Weights are relative to the step; a mini-batch with a share of the groups gets them scaled up by the
    inverse of that share, so that each update is an average over its own prompts.
    """
    parts = _cut_groups(sequences, count)
    total = sum(len(groups) for groups in parts)
    minibatches = []
    for chosen in parts:
        scale = total / max(1, len(chosen))
        minibatches.append([replace(s, weight=s.weight * scale) for s in sequences if s.group in chosen])
    return minibatches


def _cut_groups(sequences: Sequence[TrainSequence], count: int) -> list[set[int]]:
    groups = sorted({sequence.group for sequence in sequences})
    cuts = [round(i * len(groups) / count) for i in range(count + 1)]
    return [set(groups[first:last]) for first, last in pairwise(cuts)]


def weighted_mean_length(sequences: Sequence[TrainSequence]) -> float:
    """Σ weight x trained tokens / Σ weight: the divisor of a token mean over `sequences`.

    It is over a whole mini-batch, sequences of advantage 0 included, so that the loss does not depend on how
    it is cut into micro-batches. 1 where nothing has weight.
    """
    weight = sum(s.weight for s in sequences)
    tokens = sum(s.weight * s.num_trained_tokens for s in sequences)
    return tokens / weight if weight > 0 and tokens > 0 else 1.0


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
            seat = rank if (turn // num_ranks) % 2 == 0 else num_ranks - 1 - rank
            if turn + seat >= len(by_length):
                continue
            index = by_length[turn + seat]
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


def pack(sequences: Sequence[TrainSequence], members: Sequence[int]) -> MicroBatch:
    """`sequences[i] for i in members`, laid end to end."""
    chosen = [sequences[i] for i in members]
    weighted = any(s.token_weights is not None for s in chosen)
    differing = any(s.token_advantages is not None for s in chosen)
    return MicroBatch(
        tokens_T=_joined(
            [ids for s in chosen for ids in (s.prompt_token_ids, s.response_token_ids)], np.int32
        ),
        prompt_lengths_S=np.array([len(s.prompt_token_ids) for s in chosen], np.int64),
        response_lengths_S=np.array([len(s.response_token_ids) for s in chosen], np.int64),
        loss_mask_R=_joined([s.loss_mask for s in chosen], np.bool_),
        weights_S=np.array([s.weight for s in chosen], np.float64),
        advantages_S=np.array([s.advantage for s in chosen], np.float32),
        temperature_S=np.array([s.temperature for s in chosen], np.float32),
        rollout_logprobs_R=_of_all([s.rollout_logprobs for s in chosen]),
        token_weights_R=(
            _joined([_or_all(s.token_weights, 1.0, s) for s in chosen], np.float64) if weighted else None
        ),
        token_advantages_R=(
            _joined([_or_all(s.token_advantages, s.advantage, s) for s in chosen], np.float32)
            if differing
            else None
        ),
        returns_R=_of_all([s.returns for s in chosen]),
        values_R=_of_all([s.values for s in chosen]),
        members_S=np.array(members, np.int64),
    )


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """float64 becomes float32 here, rounded once."""
    return np.concatenate([np.empty(0, dtype), *parts], dtype=dtype, casting="same_kind")


def _of_all(parts: Sequence[npt.NDArray[Any] | None]) -> Floats | None:
    found = [part for part in parts if part is not None]
    return _joined(found, np.float32) if parts and len(found) == len(parts) else None


def _or_all(values: Weights | None, value: float, sequence: TrainSequence) -> Weights:
    return np.full(len(sequence.response_token_ids), value) if values is None else values


def _is_trained_on(sequence: TrainSequence) -> bool:
    return sequence.has_advantage and bool(sequence.loss_mask.any())


def _dealt(
    sequences: Sequence[TrainSequence], config: Config, num_ranks: int
) -> Callable[[int], list[MicroBatch]]:
    """The packed micro-batches of a rank."""
    if not sequences:
        return lambda rank: []
    lengths = [s.num_tokens for s in sequences]
    plan = plan_micro_batches(lengths, num_ranks, config.model.max_tokens_per_gpu)
    return lambda rank: [pack(sequences, members) for members in plan[rank]]


def _planned(
    chosen: Sequence[TrainSequence],
    whole: Sequence[TrainSequence],
    needs_old_logprobs: bool,
    config: Config,
    num_ranks: int,
) -> Callable[[int], MiniBatch]:
    """A rank's part of the mini-batch `whole`, of which `chosen` are computed."""
    share = _dealt(chosen, config, num_ranks)
    length, tokens = weighted_mean_length(whole), sum(s.num_trained_tokens for s in chosen)
    return lambda rank: MiniBatch(share(rank), needs_old_logprobs, length, tokens)


def _blocks(
    sequences: Sequence[TrainSequence], config: Config, num_ranks: int
) -> Callable[[int], list[Block]]:
    """A rank's part of each block of whole prompts."""
    count = min(config.run.gradient_meter_blocks, len({s.group for s in sequences}))
    if count < 2:
        return lambda rank: []
    parts = [
        (
            len(groups),
            _dealt([s for s in sequences if s.group in groups and _is_trained_on(s)], config, num_ranks),
        )
        for groups in _cut_groups(sequences, count)
    ]
    return lambda rank: [Block(prompts, share(rank)) for prompts, share in parts]


def _train_alike(sequences: Sequence[TrainSequence], others: Sequence[TrainSequence]) -> bool:
    """Whether both give the same gradient."""
    return len(sequences) == len(others) and all(
        (a.group, a.weight, a.advantage, a.temperature) == (b.group, b.weight, b.advantage, b.temperature)
        and all(
            np.array_equal(getattr(a, name), getattr(b, name))
            for name in (
                "prompt_token_ids",
                "response_token_ids",
                "loss_mask",
                "token_weights",
                "token_advantages",
            )
        )
        for a, b in zip(sequences, others, strict=True)
    )


PER_TOKEN = ("loss_mask", "rollout_logprobs", "token_weights", "token_advantages", "returns", "values")


def _check(sequences: Iterable[TrainSequence]) -> None:
    """Refuse what would shift all sequences behind it in a pack."""
    for number, s in enumerate(sequences):
        if not len(s.prompt_token_ids) or not len(s.response_token_ids):
            raise ValueError(
                f"sequence {number} has no {'response' if len(s.prompt_token_ids) else 'prompt'}"
            )
        for name in PER_TOKEN:
            values = getattr(s, name)
            if values is not None and len(values) != len(s.response_token_ids):
                raise ValueError(
                    f"sequence {number}: {name} has {len(values)} entries for "
                    f"{len(s.response_token_ids)} response tokens; it needs one for each"
                )


def _check_rollout_logprobs(sequences: Iterable[TrainSequence]) -> None:
    if any(s.rollout_logprobs is None for s in sequences):
        raise ValueError("--use-tis needs the rollout's log-probs with every sequence")
