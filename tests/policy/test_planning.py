"""The driver's half of packing: every sequence travels once, to one rank, and is packed there."""

import pickle
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ibpo.models import forward_flops, read_hf_config
from megatron_ibpo.policy.packing import Context, lay_out, pack
from megatron_ibpo.policy.planning import (
    MicroBatch,
    cut_shares,
    data_parallel_rank,
    deal,
    merge_parts,
    plan_forward,
    plan_measure,
    plan_update,
    plan_value_update,
    split_minibatches,
    update_metrics,
    weighted_mean_length,
)
from support.layouts import layout
from support.paths import ROOT
from support.planned import cost
from support.train_sequences import sequence, sequences
from support.trainers import config_for

CPU = torch.device("cpu")
EXAMPLES = ROOT / "examples/models"


def made(prompt=(7, 8, 9), response=(1, 2), **fields):
    return sequence(prompt, response, **{"advantage": 1.0, "weight": 0.5, "group": 0} | fields)


def packed(rows):
    return pack(MicroBatch(tuple(range(len(rows))), tuple(rows)))


@st.composite
def some_sequences(draw, max_size=25):
    """Draw sequences of every kind that credit makes: with and without masks, weights, advantages of tokens,
    a critic."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = []
    for _ in range(draw(st.integers(0, max_size))):
        length = int(rng.integers(1, 30))
        mask = rng.random(length) < rng.choice([0.0, 0.6, 1.0])
        fields = {
            "loss_mask": mask.tolist(),
            "kind": rng.choice(["response", "correction"]),
            "temperature": float(rng.choice([0.7, 1.0])),
            "rollout_logprobs": rng.normal(size=length).tolist(),
        }
        for name in ("token_weights", "token_advantages"):
            if rng.random() < 0.3:
                fields[name] = rng.choice([0.0, 0.1, 1.0], length).tolist()
        row = sequence(
            rng.integers(2, 64, rng.integers(1, 9)).tolist(),
            rng.integers(2, 64, length).tolist(),
            advantage=float(rng.choice([-1.3, 0.0, 0.7])),
            weight=float(rng.random()),
            group=int(rng.integers(5)),
            **fields,
        )
        rows.append(replace(row, rollout_logprobs=None) if rng.random() < 0.1 else row)
    return rows


# ---------------------------------------------------------------------------------------------- the packing


def test_two_sequences_packed_by_hand():
    first = made(rollout_logprobs=[-1.5, -2.5])
    second = made([5], [4, 3], advantage=-2.0, rollout_logprobs=[-3.5, -4.5], temperature=0.75)
    arrays = replace(packed([second, first]), old_logprobs_R=np.array([-3.0, -4.0, -1.0, -2.0], np.float32))
    batch = lay_out(arrays, multiple=4, device=CPU)
    assert batch.input_ids_1N.tolist() == [[5, 4, 7, 8, 9, 1, 0, 0]]
    assert batch.position_ids_1N.tolist() == [[0, 1, 0, 1, 2, 3, 0, 1]]
    assert batch.rows.targets_N.tolist() == [4, 3, 8, 9, 1, 2, 0, 0]
    assert batch.rows.response_mask_N.tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    assert batch.rows.old_logprobs_N.tolist() == [-3, -4, 0, 0, -1, -2, 0, 0]
    assert batch.rollout_logprobs_N.tolist() == [-3.5, -4.5, 0, 0, -1.5, -2.5, 0, 0]
    assert batch.rows.cu_seqlens.tolist() == [0, 2, 6, 8]
    assert batch.max_seqlen == 4
    assert batch.rows.advantages.tolist() == [-2, 1, 0]
    assert batch.rows.sequence_weights_S.tolist() == [0.5, 0.5, 0]
    assert batch.rows.temperature.tolist() == [0.75, 1, 1]
    assert (batch.num_sequences, batch.rows.advantages.dtype) == (2, torch.float32)
    assert batch.rows.token_weights_N is None


def test_two_sequences_packed_by_hand_for_two_ranks_that_share_them():
    """Rows 5 4 | 7 8 9 1 as above, each sequence padded to a multiple of four; chunks 0 3 and 1 2 of each."""
    first = made(rollout_logprobs=[-1.5, -2.5])
    second = made([5], [4, 3], advantage=-2.0, rollout_logprobs=[-3.5, -4.5])
    arrays = packed([second, first])
    early, late = (
        lay_out(arrays, multiple=1, device=CPU, context=Context(rank, 2, "both")) for rank in range(2)
    )
    assert [b.input_ids_1N.tolist() for b in (early, late)] == [[[5, 0, 7, 1]], [[4, 0, 8, 9]]]
    assert [b.position_ids_1N.tolist() for b in (early, late)] == [[[0, 3, 0, 3]], [[1, 2, 1, 2]]]
    assert [b.rows.targets_N.tolist() for b in (early, late)] == [[4, 0, 8, 2], [3, 0, 9, 1]]
    assert [b.rows.response_mask_N.tolist() for b in (early, late)] == [[1, 0, 0, 1], [1, 0, 0, 1]]
    assert [b.rollout_logprobs_N.tolist() for b in (early, late)] == [[-3.5, 0, 0, -2.5], [-4.5, 0, 0, -1.5]]
    assert [b.rows.positions_N.tolist() for b in (early, late)] == [[0, 0, 0, 1], [1, 0, 0, 0]]
    for batch in (early, late):
        assert batch.rows.cu_seqlens.tolist() == [0, 4, 8], "of whole sequences"
        assert batch.rows.index.bounds == (0, 4, 8)
        assert batch.rows.index.response_rows_R.tolist() == [0, 3]
        assert batch.rows.index.ends == (1, 2)
        assert batch.rows.advantages.tolist() == [-2, 1]
        assert batch.places_R.tolist() == [0, 4, 7, 3], "on the first rank, on the second, there and back"
        assert batch.rows.cp_group == "both"
        assert batch.max_seqlen == 4
    narrow = lay_out(arrays, multiple=3, device=CPU, context=Context(1, 2, "both"))
    assert narrow.input_ids_1N.shape == (1, 6), "12 rows: a sequence of four pads both ranks to threes"


def test_ranks_that_share_sequences_share_the_budget_of_a_micro_batch():
    """Two sequences of 5 tokens, 8 when padded: together on two ranks of 8 each, one by one on ranks of 7."""
    rows = [made([5], [4, 3, 2, 2], advantage=1.0) for _ in range(2)]
    for budget, batches in ((8, 1), (7, 2)):
        config = config_for(layout(cp=2), max_tokens=budget)
        (share,) = plan_forward(rows, config, 1, cost).shares
        assert [len(batch.members) for batch in share] == [2 // batches] * batches


def test_what_a_loss_mask_leaves_out_is_no_row_of_the_loss():
    """Two tokens of a tool between two of the policy's own: context, as the prompt is."""
    row = made([7], [1, 60, 61, 2], loss_mask=[True, False, False, True], rollout_logprobs=[-1.0, 0, 0, -2.0])
    batch = lay_out(packed([row]), multiple=1, device=CPU)
    assert batch.input_ids_1N.tolist() == [[7, 1, 60, 61]]
    assert batch.rows.targets_N.tolist() == [1, 60, 61, 2]
    assert batch.rows.response_mask_N.tolist() == [1, 0, 0, 1]
    assert weighted_mean_length([row]) == 2
    assert update_metrics([row])["tokens_trained"] == 1 + 2


def test_what_is_given_by_token_lies_on_the_response_rows():
    """A sequence without weights has ones there; one without advantages of tokens repeats its own."""
    by_token = made(token_weights=[0.25, 0.75], token_advantages=[0.5, -0.5], rollout_logprobs=[-1.5, -2.5])
    batch = lay_out(packed([by_token, made(advantage=-2.0)]), multiple=9, device=CPU)
    assert batch.rows.token_weights_N.tolist() == [0, 0, 0.25, 0.75, 0, 0, 1, 1, 0]
    assert batch.rows.advantages.tolist() == [0, 0, 0.5, -0.5, 0, 0, -2, -2, 0]
    assert batch.rollout_logprobs_N is None, "one has none"
    assert batch.rows.old_logprobs_N is None


def test_an_empty_share_is_one_padding_sequence_of_weight_zero():
    batch = lay_out(packed([]), multiple=2, device=CPU)
    assert batch.input_ids_1N.shape == (1, 2)
    assert batch.rows.cu_seqlens.tolist() == [0, 2]
    assert batch.rows.sequence_weights_S.tolist() == [0]
    assert not batch.rows.response_mask_N.any()


# ------------------------------------------------------------------------------------------------- the plan


LENGTHS = st.lists(st.integers(2, 300), max_size=60)
RANKS = st.integers(1, 5)


def plan_micro_batches(lengths, ranks, max_tokens, cost):
    """[rank][micro-batch][index]"""
    return cut_shares(deal(lengths, ranks, cost), lengths, max_tokens, cost)


def planned_costs(plan, lengths):
    """[rank][micro-batch]"""
    return [[sum(cost(lengths[i]) for i in batch) for batch in batches] for batches in plan]


@given(lengths=LENGTHS, ranks=RANKS, max_tokens=st.integers(50, 400))
def test_every_sequence_is_planned_once_and_every_rank_has_as_many_micro_batches(lengths, ranks, max_tokens):
    plan = plan_micro_batches(lengths, ranks, max_tokens, cost)
    assert len(plan) == ranks
    assert len({len(batches) for batches in plan}) == 1
    assert sorted(i for batches in plan for batch in batches for i in batch) == list(range(len(lengths)))
    for batches in plan:
        for batch in batches:
            assert len(batch) <= 1 or sum(lengths[i] for i in batch) <= max_tokens


@given(lengths=LENGTHS, ranks=RANKS, max_tokens=st.integers(50, 400))
def test_no_rank_could_be_relieved_and_like_micro_batches_come_together(lengths, ranks, max_tokens):
    """Without its shortest sequence the fullest rank has no more than any other."""
    plan = plan_micro_batches(lengths, ranks, max_tokens, cost)
    loads = [sum(costs) for costs in planned_costs(plan, lengths)]
    fullest = max(range(ranks), key=lambda rank: loads[rank])
    own = [cost(lengths[i]) for batch in plan[fullest] for i in batch]
    assert loads[fullest] - min(own, default=0) <= min(loads) * (1 + 1e-12)
    assert all(costs == sorted(costs, reverse=True) for costs in planned_costs(plan, lengths))


def test_one_long_sequence_weighs_as_much_as_many_short_ones():
    """By tokens, 400 are four times 100; with attention (100 + 100²/100 = 200, 400 + 400²/100 = 2,000) they
    are ten times as much."""
    assert deal([100] * 20 + [400, 400], 4, cost) == [[20], [21], [*range(0, 20, 2)], [*range(1, 20, 2)]]
    assert [len(share) for share in deal([100] * 8 + [400, 400], 4, float)] == [1, 1, 4, 4]


def test_a_sequence_goes_into_the_first_micro_batch_with_room():
    lengths = [60, 50, 40, 30, 20, 110]
    (batches,) = plan_micro_batches(lengths, 1, 100, cost)
    assert batches == [[5], [0, 2], [1, 3, 4]]  # 110 alone; 60 + 40; 50 + 30 + 20; the costliest first


def test_a_long_tail_is_shared_out_evenly():
    """512 responses, 3,000 tokens in the median and up to 32,768, on 8 ranks of a 32B model: no rank has 1 %
    more to compute than the mean, and ranks that wait in every micro-batch lose less than 5 %."""
    shape = read_hf_config(EXAMPLES / "qwen3_32b")
    lengths = np.random.default_rng(0).lognormal(np.log(3000), 1.0, 512).clip(100, 32768).astype(int).tolist()
    plan = plan_micro_batches(lengths, 8, 32768, partial(forward_flops, shape))
    costs = np.array(
        [[sum(forward_flops(shape, lengths[i]) for i in b) for b in batches] for batches in plan]
    )
    mean = costs.sum() / 8
    assert costs.sum(1).max() < 1.01 * mean
    assert costs.max(0).sum() < 1.05 * mean


@settings(deadline=None)
@given(some_sequences(), RANKS, st.integers(30, 120), st.integers(30, 400))
def test_passes_without_a_gradient_have_a_budget_of_their_own(rows, ranks, update_tokens, forward_tokens):
    config = config_for(layout(), max_tokens=update_tokens, log_probs_tokens=forward_tokens)
    for part in plan_update(rows, config, ranks, cost).shares:
        cut = part[0].cut
        for batches, most in ((cut.micro_batches, update_tokens), (cut.forward_batches, forward_tokens)):
            tokens = [[s.num_tokens for s in batch.sequences] for batch in batches]
            assert all(sum(own) <= most or len(own) == 1 for own in tokens)
        held = [
            sorted(i for b in batches for i in b.members)
            for batches in (cut.micro_batches, cut.forward_batches)
        ]
        assert held[0] == held[1]
    forward = plan_forward(rows, config, ranks, cost).shares
    assert len({len(share) for share in forward}) == 1
    assert all(
        sum(s.num_tokens for s in b.sequences) <= forward_tokens or len(b.members) == 1
        for share in forward
        for b in share
    )


def test_without_a_budget_of_their_own_they_are_cut_as_the_update_is():
    config = config_for(layout(), max_tokens=60)
    for part in plan_update(sequences(9), config, 2, cost).shares:
        assert part[0].cut.forward_batches == part[0].cut.micro_batches


def test_both_cuts_of_a_rank_travel_as_one():
    config = config_for(layout(), log_probs_tokens=10**6)
    rows = [made(response=list(range(2, 60)) * 100, group=g) for g in range(4)]
    (share,) = plan_update(rows, config, 1, cost).shares
    sent = len(pickle.dumps(share, protocol=5))
    assert sent < 1.1 * len(pickle.dumps(share[0].cut.micro_batches, protocol=5))


@given(groups=st.lists(st.integers(0, 9), min_size=1, max_size=50), count=st.integers(1, 4))
def test_minibatches_hold_whole_groups_and_average_over_their_own(groups, count):
    rows = [made(group=g, weight=1.0) for g in groups]
    minibatches = split_minibatches(rows, count)
    assert len(minibatches) == count
    homes = [{s.group for s in part} for part in minibatches]
    assert sum(len(home) for home in homes) == len(set(groups))
    assert sorted(s.group for part in minibatches for s in part) == sorted(groups)
    for part, home in zip(minibatches, homes, strict=True):
        assert {s.weight for s in part} <= {len(set(groups)) / max(1, len(home))}


@settings(deadline=None)
@given(some_sequences(), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_an_update_sends_every_sequence_with_an_advantage_to_one_rank(rows, ranks, steps, corrected):
    rows = [replace(s, rollout_logprobs=np.zeros(len(s.loss_mask), np.float32)) for s in rows]
    bounds = (0.5, 2.0) if corrected else None
    config = config_for(layout(), max_tokens=60, num_steps_per_rollout=steps, sequence_rejection=bounds)
    plan = plan_update(rows, config, ranks, cost)
    shares = [plan.shares[rank] for rank in range(ranks)]
    live = [[s for s in p if s.has_advantage and s.loss_mask.any()] for p in split_minibatches(rows, steps)]
    for number, part in enumerate(live):
        own = [share[number] for share in shares]
        assert len({len(minibatch.cut.micro_batches) for minibatch in own}) == 1
        assert len({minibatch.mean_length for minibatch in own}) == 1
        assert {m.needs_old_logprobs for m in own} == {corrected or number > 0}
        assert {m.trained_tokens for m in own} == {sum(s.num_trained_tokens for s in part)}
        sent = [i for m in own for micro_batch in m.cut.micro_batches for i in micro_batch.members]
        assert sorted(sent) == list(range(len(part)))
    trained = [s.num_tokens for part in live for s in part]
    assert plan.passes.updates == trained
    assert plan.passes.forward == (
        trained if corrected else [s.num_tokens for part in live[1:] for s in part]
    )
    metrics = update_metrics(rows)
    assert metrics["sequences_trained"] + metrics["sequences_without_advantage"] == len(rows)
    assert metrics["sequences_trained"] == len(trained)


def test_the_engines_log_probs_save_the_forward_pass():
    rows = [made(group=g, rollout_logprobs=[-1.0, -2.0]) for g in range(4)]
    config = config_for(layout(), num_steps_per_rollout=2, old_logprobs="engine")
    plan = plan_update(rows, config, 1, cost)
    assert [part.needs_old_logprobs for part in plan.shares[0]] == [False, False]
    assert (plan.passes.forward, plan.passes.updates) == ([], [5, 5, 5, 5])


@given(some_sequences(max_size=12), st.integers(1, 3), st.randoms())
def test_the_order_of_arrival_changes_neither_lengths_nor_loads(rows, ranks, rng):
    """Which of two equally long sequences comes first may depend on it, and nothing else."""
    shuffled = rng.sample(rows, len(rows))
    config = config_for(layout(), max_tokens=60)
    plans = [plan_forward(given, config, ranks, cost) for given in (rows, shuffled)]
    first, second = (
        [[[s.num_tokens for s in m.sequences] for m in plan.shares[r]] for r in range(ranks)]
        for plan in plans
    )
    assert first == second


def test_a_token_mean_divides_by_the_weighted_length_of_the_whole_minibatch():
    """(1/2 · 4 + 1/4 · 2 + 1/4 · 1) / 1, one sequence without advantage, one with a hole in its mask."""
    rows = [
        made(response=[1, 2, 3, 4], weight=0.5),
        made(response=[1, 2], weight=0.25, advantage=0.0),
        made(response=[1, 2, 3], weight=0.25, loss_mask=[False, True, False]),
    ]
    assert weighted_mean_length(rows) == pytest.approx(2.75)
    assert weighted_mean_length([]) == 1.0
    plan = plan_update(rows, config_for(layout()), 2, cost)
    assert [plan.shares[rank][0].mean_length for rank in (0, 1)] == [2.75, 2.75]


def test_blocks_of_prompts_count_those_without_advantage():
    rows = [made(group=g, advantage=float(g > 1)) for g in (0, 1, 2, 3)]
    config = config_for(layout())
    config.run.gradient_meter_blocks = 2
    share = plan_measure(rows, rows[2:], config, 1, cost).shares[0]
    assert [(b.prompts, len(b.cut.micro_batches)) for b in share.own] == [(2, 0), (2, 1)]
    assert [(b.prompts, len(b.cut.micro_batches)) for b in share.plain] == [(1, 1), (1, 1)]
    assert plan_measure(rows, list(rows), config, 1, cost).shares[0].plain is None


def test_what_ranks_found_comes_back_in_order():
    assert merge_parts([[(2, "c")], [], [(0, "a"), (1, "b")]], 3) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="no rank reported on 1 of 2 sequences; the first is 0"):
        merge_parts([[(1, "b")]], 2)


@pytest.mark.parametrize(
    ("tp", "cp", "pp", "world"), [(1, 1, 1, 4), (2, 1, 1, 4), (1, 1, 2, 4), (2, 1, 2, 8), (2, 2, 2, 16)]
)
def test_ranks_are_counted_tensor_parallel_first_and_pipeline_last(tp, cp, pp, world):
    ranks = [data_parallel_rank(rank, layout(tp=tp, cp=cp, pp=pp), world) for rank in range(world)]
    size = world // (tp * cp * pp)
    assert ranks == [d for _ in range(pp) for d in range(size) for _ in range(tp * cp)]


def test_arrays_leave_a_process_without_being_copied_into_the_pickle():
    (share,) = plan_forward([made(response=list(range(2, 60)) * 100)], config_for(layout()), 1, cost).shares
    buffers = []
    head = pickle.dumps(share, protocol=5, buffer_callback=buffers.append)
    assert len(head) < 5000
    (found,) = pickle.loads(head, buffers=buffers)[0].sequences
    assert np.array_equal(found.response_token_ids, share[0].sequences[0].response_token_ids)


def test_a_rank_is_sent_only_what_it_reads():
    row = replace(
        made(token_weights=[1.0, 0.5], rollout_logprobs=[-1.0, -2.0]), returns=np.ones(2), values=np.ones(2)
    )

    def sent(share):
        (s,) = share[0].sequences
        per_token = ("rollout_logprobs", "token_weights", "returns", "values")
        return [name for name in per_token if getattr(s, name) is not None]

    policy, critic, forward = (
        plan([row], config_for(layout()), 1, cost).shares[0]
        for plan in (plan_update, plan_value_update, plan_forward)
    )
    assert sent(policy[0].cut.micro_batches) == ["rollout_logprobs", "token_weights"]
    assert sent(critic[0].cut.micro_batches) == ["returns", "values"]
    assert sent(forward) == []


def test_the_driver_needs_neither_torch_nor_megatron():
    code = (
        "import megatron_ibpo.policy.planning, sys; print('torch' in sys.modules, 'megatron' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# ---------------------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize("name", ["loss_mask", "rollout_logprobs", "token_weights", "returns"])
def test_arrays_that_do_not_fit_the_response_are_refused(name):
    wrong = replace(made(), **{name: np.ones(3)})
    with pytest.raises(ValueError, match=f"sequence 1: {name} has 3 entries for 2 response tokens"):
        plan_forward([made(), wrong], config_for(layout()), 1, cost)


def test_no_prompt_no_rollout_logprobs_no_returns():
    config = config_for(layout(), use_tis=True, sequence_rejection=(0.9, 1.1))
    with pytest.raises(ValueError, match="sequence 0 has no prompt"):
        plan_update([made(prompt=[])], config, 1, cost)
    with pytest.raises(ValueError, match="--use-tis and --sequence-rejection: 1 sequences have no log-probs"):
        plan_update([made()], config, 1, cost)
    with pytest.raises(ValueError, match="--old-logprobs engine: 1 sequences have no log-probs"):
        plan_update([made()], config_for(layout(), old_logprobs="engine"), 1, cost)
    with pytest.raises(ValueError, match="the critic needs returns and old values"):
        plan_value_update([made()], config, 1, cost)


def test_lengths_and_kinds_are_counted():
    rows = sequences(9)
    live = [s for s in rows if s.advantage]
    assert update_metrics(rows) == {
        "sequences_trained": len(live),
        "sequences_without_advantage": 9 - len(live),
        "tokens_trained": sum(s.num_tokens for s in live),
        "tokens_trained_corrections": sum(s.num_tokens for s in live if s.kind == "correction"),
    }
