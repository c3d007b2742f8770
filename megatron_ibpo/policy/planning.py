"""The driver's half of packing: it assigns the computation to ranks. Needs no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np

from megatron_ibpo.basics.records import TrainSequence, repeated_prefixes
from megatron_ibpo.config import Config, LossConfig
from megatron_ibpo.models.layout import context_chunks
from megatron_ibpo.policy.dealing import Cost, Sizes, cut_shares, deal, siblings_first
from megatron_ibpo.policy.overrides import read_overrides
from megatron_ibpo.policy.sampling_masks import check_mask

Share = TypeVar("Share")


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that go through the model together. May be empty. Their arrays are serialized once, on the
    way to the rank that lays them end to end, so that the driver holds no second copy."""

    members: tuple[int, ...]
    """Index of each sequence in the planned list."""
    sequences: tuple[TrainSequence, ...]
    siblings: tuple[int, ...] = ()
    """Sizes of the families that the first sequences form, one after the other: a family's sequences have the
    same prompt, which goes through the model once. All other sequences are whole."""


@dataclass(frozen=True)
class Cut:
    """One rank's sequences, cut into micro-batches twice. Every rank has the same number of each kind, some
    of them empty; there are none if no rank has a sequence."""

    micro_batches: list[MicroBatch]
    """Micro-batches for a forward and a backward pass, of up to --max-tokens-per-gpu tokens."""
    forward_batches: list[MicroBatch]
    """The same sequences for a pass without a gradient, of up to --log-probs-max-tokens-per-gpu. This sends
    no more data: pickling writes shared records once."""


@dataclass(frozen=True)
class MiniBatch:
    """One rank's part of one optimizer step, with what it must know of the other ranks' parts."""

    cut: Cut
    needs_old_logprobs: bool
    """True if old log-probs come from a forward pass before the first step; otherwise the engine gave them,
    or the mini-batch's own forward pass does."""
    mean_length: float
    """`weighted_mean_length` of the whole mini-batch, including sequences without a gradient."""
    trained_tokens: int
    """Tokens in the loss, on all ranks."""


RankUpdate = list[MiniBatch]
"""One rank's part of the optimizer steps of one epoch over a rollout; every epoch has the same."""
RankForward = list[MicroBatch]
"""One rank's part of a forward pass. Every rank has the same number; none if there is no sequence."""


@dataclass(frozen=True)
class Block:
    """One rank's part of the sequences of a block of prompts."""

    prompts: int
    """Number of prompts, including those without any gradient."""
    cut: Cut
    """Cut of the sequences that have a gradient."""


@dataclass(frozen=True)
class RankMeasure:
    """One rank's part of a measurement of the gradient's noise."""

    trained: list[Block]
    """Blocks of the step's training data; empty for fewer than two prompts, which give no estimate."""
    mean_length: float
    """`weighted_mean_length` of `trained`."""
    plain: list[Block] | None
    """The same responses with plain advantages; None: the same as `trained`."""


@dataclass(frozen=True)
class Passes:
    """Sequences that go through the model, by their lengths in tokens."""

    forward: list[int] = field(default_factory=list)
    """Lengths in forward passes alone, for log-probs or values."""
    updates: list[int] = field(default_factory=list)
    """Lengths in forward and backward passes of optimizer steps."""
    repeated_forward: list[int] = field(default_factory=list)
    repeated_updates: list[int] = field(default_factory=list)
    """Length of the prefix that each sequence in `updates` shares with another one of the same pass."""
    left_out: list[int] = field(default_factory=list)
    """Lengths of the sequences that are in no update because they have no gradient."""

    @classmethod
    def from_sequences(
        cls, forward: Sequence[Sequence[TrainSequence]], updates: Sequence[Sequence[TrainSequence]]
    ) -> "Passes":
        """Return the passes of these sequences, in lists of those that are computed with the same weights."""
        return cls(*map(_lengths, (forward, updates)), *map(_repeated, (forward, updates)))


@dataclass(frozen=True)
class Plan(Generic[Share]):
    """The shares of all data-parallel ranks."""

    shares: list[Share]
    """Share of each data-parallel rank."""
    passes: Passes


def plan_update(
    sequences: Sequence[TrainSequence], config: Config, num_ranks: int, cost: Cost
) -> Plan[RankUpdate]:
    """Plan the optimizer steps of one rollout: the mini-batches of an epoch, and the passes of all epochs,
    over `num_ranks` data-parallel ranks. Sequences without a gradient are not computed; they count in the
    divisor of a token mean. Raises ValueError for arrays that do not fit their response, and for rollout
    log-probs that the loss needs and lacks."""
    loss = config.loss
    _check(sequences)
    parts = split_minibatches(sequences, loss.num_steps_per_rollout)
    unread = _unread(config)
    live = [[_without(s, *unread) for s in part if has_gradient(s, config)] for part in parts]
    _check_rollout_logprobs((s for part in live for s in part), loss)
    # the first mini-batch's own forward pass gives its old log-probs, unless a weight or a later epoch
    # depends on them
    read_again = bool(loss.corrections) or loss.num_epochs_per_rollout > 1
    needs_old = [
        loss.old_logprobs == "recompute" and (read_again or number > 0) for number in range(len(live))
    ]
    # old log-probs are all of the weights before the first step
    old = [s for part, needed in zip(live, needs_old, strict=True) if needed for s in part]
    passes = Passes.from_sequences([old], live * loss.num_epochs_per_rollout)
    without = [s for part in parts for s in part if not has_gradient(s, config)]
    passes = replace(passes, left_out=_lengths([without] * loss.num_epochs_per_rollout))
    minibatches = [
        _minibatch(of_loss, part, needed, config, num_ranks, cost)
        for part, of_loss, needed in zip(parts, live, needs_old, strict=True)
    ]
    return Plan(_rank_updates(minibatches, num_ranks), passes)


def plan_value_update(
    sequences: Sequence[TrainSequence], config: Config, num_ranks: int, cost: Cost
) -> Plan[RankUpdate]:
    """Plan the critic's optimizer steps of one rollout, as `plan_update` does for the policy; it learns from
    all sequences, which must have returns and old values."""
    _check(sequences)
    for number, s in enumerate(sequences):
        if s.returns is None or s.values is None:
            raise ValueError(
                f"the critic needs returns and old values with every sequence; {number} has none"
            )
    bare = [_without(s, *OF_POLICY, "sampling_mask") for s in sequences]
    parts = split_minibatches(bare, config.loss.num_steps_per_rollout)
    minibatches = [_minibatch(part, part, False, config, num_ranks, cost) for part in parts if part]
    passes = Passes.from_sequences([], parts * config.loss.num_epochs_per_rollout)
    return Plan(_rank_updates(minibatches, num_ranks), passes)


def plan_forward(
    sequences: Sequence[TrainSequence], config: Config, num_ranks: int, cost: Cost
) -> Plan[RankForward]:
    """Plan a pass for log-probs or values of every response token."""
    _check(sequences)
    bare = [_without(s, *OF_POLICY, "returns", "values") for s in sequences]
    shares = [cut.forward_batches for cut in _cuts(bare, config, num_ranks, cost)]
    return Plan(shares, Passes.from_sequences([sequences], []))


def _lengths(parts: Sequence[Sequence[TrainSequence]]) -> list[int]:
    return [s.num_tokens for part in parts for s in part]


def _repeated(parts: Sequence[Sequence[TrainSequence]]) -> list[int]:
    token_ids = [[np.concatenate([s.prompt_token_ids, s.response_token_ids]) for s in part] for part in parts]
    return [repeated for part in token_ids for repeated in repeated_prefixes(part)]


def plan_measure(
    sequences: Sequence[TrainSequence],
    plain: Sequence[TrainSequence],
    config: Config,
    num_ranks: int,
    cost: Cost,
) -> Plan[RankMeasure]:
    """Plan a measurement of the gradient's noise over at most --gradient-meter-blocks blocks of a whole
    step's prompts. `plain` are the same responses with plain advantages, uncorrected."""
    _check([*sequences, *plain])
    trained = [s for s in sequences if has_gradient(s, config)]
    _check_rollout_logprobs(trained, config.loss)
    length = weighted_mean_length(sequences)
    trained_blocks = _blocks(sequences, trained, config, num_ranks, cost)
    if _train_alike(sequences, plain):
        return Plan([RankMeasure(blocks, length, None) for blocks in trained_blocks], Passes())
    in_gspo = [s for s in plain if _has_advantage(s)]
    pairs = zip(trained_blocks, _blocks(plain, in_gspo, config, num_ranks, cost), strict=True)
    return Plan([RankMeasure(blocks, length, plain_blocks) for blocks, plain_blocks in pairs], Passes())


def update_metrics(sequences: Sequence[TrainSequence], config: Config) -> dict[str, float]:
    """Return the sizes of an update over `sequences` as metrics; tokens are counted with their prompts."""
    trained = [s for s in sequences if has_gradient(s, config)]
    tokens = [len(s.prompt_token_ids) + s.num_trained_tokens for s in trained]
    return {
        "sequences_trained": len(trained),
        "sequences_without_advantage": sum(not _has_advantage(s) for s in sequences),
        "tokens_trained": sum(tokens),
        "tokens_trained_corrections": sum(
            count for s, count in zip(trained, tokens, strict=True) if s.kind == "correction"
        ),
    }


def merge_parts(parts: Iterable[Sequence[tuple[int, Any]]], count: int) -> list[Any]:
    """Merge the ranks' results for `count` planned sequences, in order; ValueError if one is missing."""
    results = {index: value for part in parts for index, value in part}
    if missing := [index for index in range(count) if index not in results]:
        raise ValueError(
            f"no rank reported on {len(missing)} of {count} sequences; the first is {missing[0]}"
        )
    return [results[index] for index in range(count)]


def split_minibatches(sequences: Sequence[TrainSequence], count: int) -> list[list[TrainSequence]]:
    """Cut a step's sequences into `count` mini-batches of whole groups, as equal as possible. Weights, which
    are relative to the step, are scaled up to an average over the mini-batch's own prompts."""
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
    """Return Σ weight x trained tokens / Σ weight of a whole mini-batch, the divisor of a token mean, which
    does not depend on micro-batches; 1 if nothing has weight."""
    weight = sum(s.weight for s in sequences)
    tokens = sum(s.weight * s.num_trained_tokens for s in sequences)
    return tokens / weight if weight > 0 and tokens > 0 else 1.0


def empty_micro_batches(shares: Sequence[RankUpdate]) -> int:
    """Return the number of an update's micro-batches, on all ranks, that hold nothing but padding."""
    cuts = [part.cut for share in shares for part in share]
    return sum(not batch.members for cut in cuts for batch in cut.micro_batches)


def has_gradient(sequence: TrainSequence, config: Config) -> bool:
    """Return whether the run's loss of a sequence has a gradient, by its advantage or a term that all pay."""
    if _has_advantage(sequence):
        return True
    pays_kl = config.loss.kl_coef > 0 and sequence.weight != 0
    return bool(sequence.loss_mask.any()) and (pays_kl or config.model.moe_aux_loss_coeff > 0)


def _has_advantage(sequence: TrainSequence) -> bool:
    return sequence.has_advantage and bool(sequence.loss_mask.any())


OF_POLICY = ("rollout_logprobs", "token_weights", "token_advantages", "routed_experts")


def _unread(config: Config) -> list[str]:
    """Return the names of the arrays that an update of the policy does not read."""
    return ["returns", "values", *([] if config.rollout.use_rollout_routing_replay else ["routed_experts"])]


def _without(sequence: TrainSequence, *names: str) -> TrainSequence:
    """Return the sequence without what the receiver does not read, so that less is sent."""
    dropped: dict[str, Any] = dict.fromkeys(names)
    return replace(sequence, **dropped)


def _cuts(sequences: Sequence[TrainSequence], config: Config, num_ranks: int, cost: Cost) -> list[Cut]:
    """Return the cut of each rank; without sequences there are no micro-batches."""
    if not sequences:
        return [Cut([], []) for _ in range(num_ranks)]
    ranks = config.parallel.context_parallel_size
    chunks = context_chunks(ranks)
    tokens = [-(-s.num_tokens // chunks) * chunks for s in sequences]
    sizes = _sizes_of_families(sequences) if config.shares_prompts else Sizes.of_whole(tokens)
    shares = deal(sizes, num_ranks, cost)
    multiple = read_overrides(config).micro_batch_multiple

    def micro_batch(indices: Sequence[int]) -> MicroBatch:
        members, siblings = siblings_first(indices, sizes)
        return MicroBatch(tuple(members), tuple(sequences[i] for i in members), siblings)

    def cut(max_tokens: int) -> list[list[MicroBatch]]:
        batches_by_rank = cut_shares(shares, sizes, max_tokens * ranks, cost, multiple)
        return [[micro_batch(indices) for indices in batches] for batches in batches_by_rank]

    pairs = zip(cut(config.model.max_tokens_per_gpu), cut(config.model.tokens_without_gradient), strict=True)
    return [Cut(micro_batches, forward_batches) for micro_batches, forward_batches in pairs]


def _sizes_of_families(sequences: Sequence[TrainSequence]) -> Sizes:
    """Return the sizes of sequences of which those with the same prompt are a family."""
    numbers: dict[bytes, int] = {}
    families = [numbers.setdefault(s.prompt_token_ids.tobytes(), len(numbers)) for s in sequences]
    return Sizes([s.num_tokens for s in sequences], families, [len(s.prompt_token_ids) for s in sequences])


def _minibatch(
    chosen: Sequence[TrainSequence],
    sequences: Sequence[TrainSequence],
    needs_old_logprobs: bool,
    config: Config,
    num_ranks: int,
    cost: Cost,
) -> list[MiniBatch]:
    """Return each rank's part of the mini-batch of `sequences`; only those in `chosen` are computed."""
    length, tokens = weighted_mean_length(sequences), sum(s.num_trained_tokens for s in chosen)
    cuts = _cuts(chosen, config, num_ranks, cost)
    return [MiniBatch(cut, needs_old_logprobs, length, tokens) for cut in cuts]


def _rank_updates(minibatches: Sequence[Sequence[MiniBatch]], num_ranks: int) -> list[RankUpdate]:
    return [[parts[rank] for parts in minibatches] for rank in range(num_ranks)]


def _blocks(
    sequences: Sequence[TrainSequence],
    trained: Sequence[TrainSequence],
    config: Config,
    num_ranks: int,
    cost: Cost,
) -> list[list[Block]]:
    """Return each rank's part of each block of whole prompts; only `trained` of `sequences` are computed."""
    count = min(config.run.gradient_meter_blocks, len({s.group for s in sequences}))
    blocks: list[list[Block]] = [[] for _ in range(num_ranks)]
    if count < 2:
        return blocks
    for groups in _cut_groups(sequences, count):
        live = [_without(s, *_unread(config)) for s in trained if s.group in groups]
        for rank_blocks, cut in zip(blocks, _cuts(live, config, num_ranks, cost), strict=True):
            rank_blocks.append(Block(len(groups), cut))
    return blocks


def _train_alike(sequences: Sequence[TrainSequence], plain: Sequence[TrainSequence]) -> bool:
    """Return whether both give the same gradient."""
    return len(sequences) == len(plain) and all(
        (a.group, a.weight, a.advantage, a.temperature) == (b.group, b.weight, b.advantage, b.temperature)
        and a.sampling_mask is b.sampling_mask
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
        for a, b in zip(sequences, plain, strict=True)
    )


PER_TOKEN = ("loss_mask", "rollout_logprobs", "token_weights", "token_advantages", "returns", "values")


def _check(sequences: Iterable[TrainSequence]) -> None:
    """Refuse arrays of wrong length, which would shift what follows, and masks of other responses."""
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
        check_mask(s, number)
        if s.routed_experts is not None and len(s.routed_experts) != s.num_tokens - 1:
            raise ValueError(
                f"sequence {number}: routed_experts has {len(s.routed_experts)} entries for {s.num_tokens} "
                "tokens; it needs one for each but the last"
            )


def _check_rollout_logprobs(sequences: Iterable[TrainSequence], loss: LossConfig) -> None:
    needing = [*loss.corrections, *(["--old-logprobs engine"] if loss.old_logprobs == "engine" else [])]
    if needing and (without := sum(s.rollout_logprobs is None for s in sequences)):
        raise ValueError(
            f"{' and '.join(needing)}: {without} sequences have no log-probs of the engine that sampled "
            "them; sample again, or drop the flag"
        )
