"""Packing: rows by hand, and properties of the plan that no sequence may escape."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ibpo.policy.packing import pack, plan_micro_batches, split_minibatches
from megatron_ibpo.records import TrainSequence


def sequence(prompt=(7, 8, 9), response=(1, 2), **fields):
    values = {"advantage": 1.0, "weight": 0.5, "group": 0, **fields}
    return TrainSequence(tuple(prompt), tuple(response), **values)


def test_two_sequences_packed_by_hand():
    first = sequence(old_logprobs=(-1.0, -2.0), rollout_logprobs=(-1.5, -2.5))
    second = sequence((5,), (4, 3), advantage=-2.0, old_logprobs=(-3.0, -4.0), rollout_logprobs=(-3.5, -4.5))
    batch = pack([first, second], [1, 0], multiple=4, own_old_logprobs=False, device=torch.device("cpu"))
    assert batch.input_ids_1N.tolist() == [[5, 4, 7, 8, 9, 1, 0, 0]]
    assert batch.position_ids_1N.tolist() == [[0, 1, 0, 1, 2, 3, 0, 1]]
    assert batch.targets_N.tolist() == [4, 3, 8, 9, 1, 2, 0, 0]
    assert batch.response_mask_N.tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    assert batch.old_logprobs_N.tolist() == [-3, -4, 0, 0, -1, -2, 0, 0]
    assert batch.rollout_logprobs_N.tolist() == [-3.5, -4.5, 0, 0, -1.5, -2.5, 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 2, 6, 8]
    assert batch.max_seqlen == 4
    assert batch.advantages.tolist() == [-2, 1, 0]
    assert batch.weights_S.tolist() == [0.5, 0.5, 0]
    assert batch.token_weights_N is None


def test_token_weights_lie_on_the_response_rows():
    weighted = sequence(token_weights=(0.25, 0.75))
    batch = pack(
        [weighted, sequence()], [0, 1], multiple=1, own_old_logprobs=True, device=torch.device("cpu")
    )
    assert batch.token_weights_N.tolist() == [0, 0, 0.25, 0.75, 0, 0, 1, 1]
    assert batch.old_logprobs_N is None


def test_an_empty_share_is_one_padding_sequence_of_weight_zero():
    batch = pack([sequence()], [], multiple=2, own_old_logprobs=False, device=torch.device("cpu"))
    assert batch.input_ids_1N.shape == (1, 2)
    assert batch.cu_seqlens.tolist() == [0, 2]
    assert batch.weights_S.tolist() == [0]
    assert not batch.response_mask_N.any()


@given(
    lengths=st.lists(st.integers(2, 300), max_size=60),
    ranks=st.integers(1, 5),
    max_tokens=st.integers(50, 400),
)
def test_every_sequence_is_planned_once_and_every_rank_has_as_many_micro_batches(lengths, ranks, max_tokens):
    plan = plan_micro_batches(lengths, ranks, max_tokens)
    assert len(plan) == ranks
    assert len({len(batches) for batches in plan}) == 1
    assert sorted(i for batches in plan for batch in batches for i in batch) == list(range(len(lengths)))
    for batches in plan:
        for batch in batches:
            assert len(batch) <= 1 or sum(lengths[i] for i in batch) <= max_tokens
    counts = [sum(len(batch) for batch in batches) for batches in plan]
    assert max(counts) - min(counts) <= 1


@given(groups=st.lists(st.integers(0, 9), min_size=1, max_size=50), count=st.integers(1, 4))
def test_minibatches_hold_whole_groups_and_average_over_their_own(groups, count):
    sequences = [sequence(group=g, weight=1.0) for g in groups]
    minibatches = split_minibatches(sequences, count)
    assert len(minibatches) == count
    homes = [{s.group for s in part} for part in minibatches]
    assert sum(len(home) for home in homes) == len(set(groups))
    assert sorted(s.group for part in minibatches for s in part) == sorted(groups)
    for part, home in zip(minibatches, homes, strict=True):
        assert {s.weight for s in part} <= {len(set(groups)) / max(1, len(home))}
