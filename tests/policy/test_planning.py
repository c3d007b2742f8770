"""Every sequence travels once, to one rank, and is packed there; importance corrections of what is packed."""

import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ibpo.config import Config, ConfigError, LossConfig
from megatron_ibpo.loss import make_objective, policy_loss
from megatron_ibpo.policy import planning
from megatron_ibpo.policy.dealing import Sizes, cut_shares, deal
from megatron_ibpo.policy.group import data_parallel_rank
from megatron_ibpo.policy.importance_correction import Corrected, correct, correction_metrics, is_rejected
from megatron_ibpo.policy.packing import SINGLE_RANK, Context, lay_out, pack
from megatron_ibpo.policy.planning import MicroBatch, plan_forward, plan_measure, plan_update
from megatron_ibpo.run.settings import check_settings
from support.layouts import layout
from support.planned import cost
from support.train_sequences import packed as with_ratios
from support.train_sequences import sequence, sequences, with_holes
from support.trainers import config_for


def made(prompt=(7, 8, 9), response=(1, 2), **fields):
    return sequence(prompt, response, **{"advantage": 1.0, "weight": 0.5, "group": 0} | fields)


def laid_out(rows, multiple, context=SINGLE_RANK):
    arrays = pack(MicroBatch(tuple(range(len(rows))), tuple(rows)))
    return lay_out(arrays, multiple=multiple, device=torch.device("cpu"), context=context)


SOME_SEQUENCES = st.builds(sequences, st.integers(0, 25), st.integers(0, 2**32)).map(with_holes)


def test_two_sequences_shared_by_two_ranks_are_packed_by_hand():
    """Rows 5 4 | 7 8 9 1, each sequence padded to a multiple of four; chunks 0 3 and 1 2 of each."""
    second = made([5], [4, 3], advantage=-2.0, rollout_logprobs=[-3.5, -4.5])
    rows = [second, made(rollout_logprobs=[-1.5, -2.5])]
    both = [laid_out(rows, 1, Context(rank, 2, "both")) for rank in range(2)]
    assert [own.input_ids_1N.tolist() for own in both] == [[[5, 0, 7, 1]], [[4, 0, 8, 9]]]
    assert [own.position_ids_1N.tolist() for own in both] == [[[0, 3, 0, 3]], [[1, 2, 1, 2]]]
    assert [own.rows.targets_N.tolist() for own in both] == [[4, 0, 8, 2], [3, 0, 9, 1]]
    assert [own.rollout_logprobs_N.tolist() for own in both] == [[-3.5, 0, 0, -2.5], [-4.5, 0, 0, -1.5]]
    assert [own.rows.positions_N.tolist() for own in both] == [[0, 0, 0, 1], [1, 0, 0, 0]]
    for batch in both:
        assert batch.rows.response_mask_N.tolist() == [1, 0, 0, 1]
        assert batch.rows.cu_seqlens.tolist() == [0, 4, 8], "of whole sequences"
        assert (batch.rows.index.bounds, batch.rows.index.ends) == ((0, 4, 8), (1, 2))
        assert batch.rows.index.response_rows_R.tolist() == [0, 3]
        assert batch.rows.advantages.tolist() == [-2, 1]
        assert batch.places_R.tolist() == [0, 4, 7, 3], "on the first rank, on the second, there and back"
        assert (batch.rows.cp_group, batch.sequences.max_seqlen_q) == ("both", 4)
    narrow = laid_out(rows, 3, Context(1, 2, "both"))
    assert narrow.input_ids_1N.shape == (1, 6), "12 rows: a sequence of four pads both ranks to threes"


@given(SOME_SEQUENCES, st.booleans(), st.booleans(), st.integers(0, 99))
def test_rows_without_a_gradient_are_known_to_the_host(rows, by_token, is_penalised, seed):
    """As the loss itself finds them; some weights and advantages are 0. A penalty reaches every row."""
    draw = np.random.default_rng(seed)
    for row in rows:
        size = len(row.response_token_ids)
        row.weight *= int(draw.integers(3) > 0)
        row.token_weights = draw.integers(3, size=size).astype(np.float64)
        row.token_advantages = draw.integers(2, size=size).astype(np.float64) if by_token else None
    batch, objective = laid_out(rows, 1), make_objective("grpo", kl_coef=0.1 * is_penalised)
    found = batch.rows.gradient_places(kl_coef=objective.kl_coef)
    wanted = replace(batch.rows, index=None).gradient_places(kl_coef=objective.kl_coef)
    assert found.on_host.tolist() == found.on_device.tolist() == wanted.on_host.tolist()
    if is_penalised:
        assert len(found.on_host) == len(batch.loss_rows())


def test_tokens_outside_the_loss_mask_are_no_rows_of_loss():
    """Two tokens of a tool between two of the policy's own: context, as the prompt is."""
    row = made([7], [1, 60, 61, 2], loss_mask=[True, False, False, True], rollout_logprobs=[-1.0, 0, 0, -2.0])
    batch = laid_out([row], 1)
    assert batch.input_ids_1N.tolist() == [[7, 1, 60, 61]]
    assert batch.rows.targets_N.tolist() == [1, 60, 61, 2]
    assert batch.rows.response_mask_N.tolist() == [1, 0, 0, 1]
    assert planning.weighted_mean_length([row]) == 2
    told = {"sequences_trained": 2, "sequences_without_advantage": 1}
    told |= {"tokens_trained": 1 + 2 + 3 + 2, "tokens_trained_corrections": 3 + 2}
    rows = [row, made(advantage=0.0), made(kind="correction")]
    assert planning.update_metrics(rows, config_for(layout())) == told
    penalised = planning.update_metrics(rows, config_for(layout(), kl_coef=0.1))
    assert penalised == told | {"sequences_trained": 3, "tokens_trained": 8 + 3 + 2}


def test_per_token_inputs_lie_on_the_response_rows():
    """Without weights there are ones; an empty share has one padding sequence of weight 0."""
    by_token = made(token_weights=[0.25, 0.75], token_advantages=[0.5, -0.5], rollout_logprobs=[-1.5, -2.5])
    batch = laid_out([by_token, made(advantage=-2.0)], 9)
    assert batch.rows.token_weights_N.tolist() == [0, 0, 0.25, 0.75, 0, 0, 1, 1, 0]
    assert batch.rows.advantages.tolist() == [0, 0, 0.5, -0.5, 0, 0, -2, -2, 0]
    assert batch.rollout_logprobs_N is None, "one has none"
    padding = laid_out([], 2)
    assert padding.input_ids_1N.shape == (1, 2)
    assert (padding.rows.cu_seqlens.tolist(), padding.rows.sequence_weights_S.tolist()) == ([0, 2], [0])
    assert not padding.rows.response_mask_N.any()


@given(st.lists(st.integers(2, 300), max_size=60), st.integers(1, 5), st.integers(50, 400), st.integers(1, 5))
def test_every_sequence_is_planned_once_on_balanced_ranks(lengths, ranks, max_tokens, multiple):
    """Micro-batches of nothing fill up to what an interleaved schedule takes."""
    sizes = Sizes.of_whole(lengths)
    shares = deal(sizes, ranks, cost)
    plan = cut_shares(shares, sizes, max_tokens, cost)
    assert sorted(i for batches in plan for batch in batches for i in batch) == list(range(len(lengths)))
    filled = cut_shares(shares, sizes, max_tokens, cost, multiple)
    most = -(-len(plan[0]) // multiple) * multiple
    assert filled == [[*batches, *[[]] * (most - len(plan[0]))] for batches in plan]
    for batches in plan:
        assert all(len(batch) <= 1 or sum(lengths[i] for i in batch) <= max_tokens for batch in batches)
    costs = [[sum(cost(lengths[i]) for i in batch) for batch in batches] for batches in plan]
    assert costs == [sorted(own, reverse=True) for own in costs]
    loads = [sum(own) for own in costs]
    fullest = loads.index(max(loads))
    shortest = min((cost(lengths[i]) for i in shares[fullest]), default=0)
    assert loads[fullest] - shortest <= min(loads) * (1 + 1e-12)


def test_context_ranks_share_the_budget_of_a_micro_batch():
    """Two sequences of 5 tokens, 8 when padded: together on two ranks of 8 each, one by one on ranks of 7."""
    for budget, members in ((8, [2]), (7, [1, 1])):
        config = config_for(layout(cp=2), max_tokens=budget)
        (share,) = plan_forward([made([5], [4, 3, 2, 2])] * 2, config, 1, cost).shares
        assert [len(batch.members) for batch in share] == members


@given(st.lists(st.integers(0, 9), min_size=1, max_size=50), st.integers(1, 4))
def test_minibatches_hold_whole_groups_and_average_over_their_own(groups, count):
    minibatches = planning.split_minibatches([made(group=g, weight=1.0) for g in groups], count)
    assert len(minibatches) == count
    homes = [{s.group for s in part} for part in minibatches]
    assert sum(len(home) for home in homes) == len(set(groups))
    assert sorted(s.group for part in minibatches for s in part) == sorted(groups)
    for part, home in zip(minibatches, homes, strict=True):
        assert {s.weight for s in part} <= {len(set(groups)) / max(1, len(home))}


OLD = {"recompute": {}, "corrected": {"sequence_rejection": (0.5, 2.0)}, "engine": {"old_logprobs": "engine"}}
BUDGETS = st.none() | st.integers(30, 400)


SIZES = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 2))


@given(SOME_SEQUENCES, SIZES, st.sampled_from([*OLD]), BUDGETS)
def test_an_update_sends_every_useful_sequence_to_one_rank(rows, sizes, old, own_tokens):
    """Once, however many epochs; each epoch costs the passes of an update again."""
    (ranks, steps, epochs), budgets = sizes, {"max_tokens": 60, "log_probs_tokens": own_tokens}
    counts = {"num_steps_per_rollout": steps, "num_epochs_per_rollout": epochs}
    config = config_for(layout(), **counts, **budgets, **OLD[old])

    def members(batches, most):
        assert all(sum(s.num_tokens for s in b.sequences) <= most or len(b.members) == 1 for b in batches)
        return sorted(i for batch in batches for i in batch.members)

    # its mean is 0, and it is trained on where its tokens differ
    rows = [*rows, made(advantage=0.0, token_advantages=[1.0, -1.0], rollout_logprobs=[-1.0, -1.0])]
    plan = plan_update(rows, config, ranks, cost)
    parts = planning.split_minibatches(rows, steps)
    live = [
        [s for s in p if s.loss_mask.any() and (s.advantage or s.token_advantages is not None)] for p in parts
    ]
    read_again = old == "corrected" or (old == "recompute" and epochs > 1)
    needs_old = [read_again or (old == "recompute" and number > 0) for number in range(steps)]
    for number, part in enumerate(live):
        own, sent = [share[number] for share in plan.shares], []
        assert (
            len({(len(m.cut.micro_batches), len(m.cut.forward_batches), m.mean_length) for m in own}) == 1
        ), number
        assert {m.needs_old_logprobs for m in own} == {needs_old[number]}
        assert {m.trained_tokens for m in own} == {sum(s.num_trained_tokens for s in part)}
        for cut in (m.cut for m in own):
            sent += members(cut.micro_batches, 60)
            assert members(cut.forward_batches, own_tokens or 60) == members(cut.micro_batches, 60)
            assert own_tokens or cut.forward_batches == cut.micro_batches
        assert sorted(sent) == list(range(len(part)))
    assert plan.passes.updates == [s.num_tokens for part in live for s in part] * epochs
    ahead = [part for part, needed in zip(live, needs_old, strict=True) if needed]
    assert plan.passes.forward == [s.num_tokens for part in ahead for s in part]
    forward = plan_forward(rows, config, ranks, cost).shares
    assert len({len(share) for share in forward}) == 1
    assert sorted(i for share in forward for i in members(share, own_tokens or 60)) == [*range(len(rows))]


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_only_sequences_with_a_gradient_are_computed(seed, kl_coef):
    """By autograd, with advantages and weights of which some are 0, and a reference that differs."""
    draw = np.random.default_rng(seed)
    rows = with_holes(sequences(25, seed))
    for row in rows:
        row.weight *= int(draw.integers(3) > 0)
        row.token_weights = None
    batch = laid_out(rows, 1)
    logits = torch.from_numpy(draw.normal(size=(len(batch.rows.targets_N), 64))).requires_grad_()
    held = replace(batch.rows, ref_logprobs_N=torch.full((len(logits),), -9.0))
    policy_loss(logits, held, make_objective("grpo", kl_coef=kl_coef))[0].backward()
    bounds = batch.rows.cu_seqlens.tolist()
    moved = [bool(logits.grad[first:last].any()) for first, last in pairwise(bounds)]
    config = config_for(layout(), kl_coef=kl_coef)
    computed = [planning.has_gradient(row, config) and row.weight != 0 for row in rows]
    assert moved[: len(rows)] == computed
    assert len({*computed}) == 2


@pytest.mark.parametrize("settings", [{"kl_coef": 0.1}, {"moe_aux_loss_coeff": 0.01}])
def test_penalties_train_groups_of_equal_rewards(settings):
    """A KL penalty, or one on the balance of routers; its tokens count either way."""
    rows = [made(advantage=0.0), made(token_advantages=[0.0, 0.0]), made(loss_mask=[False, False])]
    rows += [made(advantage=0.0, weight=0.0, group=1)]
    config = config_for(layout(), **{k: v for k, v in settings.items() if k == "kl_coef"})
    assert plan_update(rows, config_for(layout()), 1, cost).shares[0][0].cut.micro_batches == []
    config.model.moe_aux_loss_coeff = settings.get("moe_aux_loss_coeff", 0.0)
    part = plan_update(rows, config, 1, cost).shares[0][0]
    trained = 2 + ("moe_aux_loss_coeff" in settings)
    assert sum(len(batch.members) for batch in part.cut.micro_batches) == trained
    assert part.trained_tokens == 2 * trained
    config.run.gradient_meter_blocks = 2
    (share,) = plan_measure(rows, [made(), made(advantage=0.0, group=1)], config, 1, cost).shares
    assert sum(len(b.members) for block in share.trained for b in block.cut.micro_batches) == trained
    assert [len(block.cut.micro_batches) for block in share.plain] == [1, 0], "GSPO has no penalty"


def test_a_token_mean_divides_by_the_minibatchs_weighted_length():
    """(1/2 · 4 + 1/4 · 2 + 1/4 · 1) / 1, one sequence without advantage, one with a hole in its mask."""
    rows = [made(response=[1, 2, 3, 4]), made(weight=0.25, advantage=0.0)]
    rows.append(made(response=[1, 2, 3], weight=0.25, loss_mask=[False, True, False]))
    assert planning.weighted_mean_length([]) == 1.0
    plan = plan_update(rows, config_for(layout()), 2, cost)
    assert [share[0].mean_length for share in plan.shares] == [2.75, 2.75]


def test_blocks_of_prompts_count_those_without_advantage():
    """One prompt has no spread, and so no block."""
    rows = [made(group=group, advantage=float(group > 1)) for group in range(4)]
    config = config_for(layout())
    config.run.gradient_meter_blocks = 2
    share = plan_measure(rows, rows[2:], config, 1, cost).shares[0]
    assert [(b.prompts, len(b.cut.micro_batches)) for b in share.trained] == [(2, 0), (2, 1)]
    assert [(b.prompts, len(b.cut.micro_batches)) for b in share.plain] == [(1, 1), (1, 1)]
    assert plan_measure(rows, list(rows), config, 1, cost).shares[0].plain is None
    assert plan_measure(rows[3:], rows[3:], config, 1, cost).shares[0].trained == []


def test_results_of_ranks_are_merged_in_order():
    assert planning.merge_parts([[(2, "c")], [], [(0, "a"), (1, "b")]], 3) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="no rank reported on 1 of 2 sequences; the first is 0"):
        planning.merge_parts([[(1, "b")]], 2)


def test_ranks_are_counted_tensor_parallel_first_and_pipeline_last():
    for tp, cp, pp, world in ((1, 1, 1, 4), (2, 1, 2, 8), (2, 2, 2, 16)):
        own = layout(tp=tp, cp=cp, pp=pp)
        once = [share for share in range(world // (tp * cp * pp)) for _ in range(tp * cp)]
        assert [data_parallel_rank(rank, own, world) for rank in range(world)] == once * pp


def test_a_rank_receives_only_the_fields_it_reads():
    names = ("token_weights", "rollout_logprobs", "returns", "values")
    row, config = made(**{name: [0.5, 1.0] for name in names}), config_for(layout())
    of_critic = planning.plan_value_update
    for plan, reads in ((plan_update, names[:2]), (of_critic, names[2:]), (plan_forward, ())):
        (part,) = plan([row], config, 1, cost).shares[0]
        (sent,) = (part if plan == plan_forward else part.cut.micro_batches[0]).sequences
        assert tuple(name for name in names if getattr(sent, name) is not None) == reads


def test_the_driver_needs_neither_torch_nor_megatron():
    code = "import megatron_ibpo.policy.planning, sys; sys.exit(bool({'torch', 'megatron'} & {*sys.modules}))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_sequence_without_required_fields_is_refused():
    config = config_for(layout(), use_tis=True, sequence_rejection=(0.9, 1.1))
    engine = config_for(layout(), old_logprobs="engine")
    for plan, fields, settings, says in (
        (plan_update, {"prompt": []}, config, "sequence 0 has no prompt"),
        (plan_update, {}, config, "--use-tis and --sequence-rejection: 1 sequences have no log-probs"),
        (plan_update, {}, engine, "--old-logprobs engine: 1 sequences have no log-probs"),
        (planning.plan_value_update, {}, config, "the critic needs returns and old values"),
        (plan_forward, {"loss_mask": [True] * 3}, config, "loss_mask has 3 entries for 2 response tokens"),
        (plan_forward, {"returns": [1.0] * 3}, config, "returns has 3 entries for 2 response tokens"),
    ):
        with pytest.raises(ValueError, match=says):
            plan([made(**fields)], settings, 1, cost)


def close(*values):
    return pytest.approx(list(values), rel=1e-6)


def test_a_rejected_sequence_weighs_nothing_and_stays():
    """By its geometric mean: √(2 · 1/2) = 1 and √(4 · 1) = 2. Tokens may be truncated as well."""
    assert is_rejected(np.log([4.0, 1.0] * 50), 0.5, 1.9)
    assert not is_rejected(np.log([4.0, 1.0] * 50), 0.5, 2.1)
    arrays = with_ratios([4.0, 1.0], [2.0, 0.5], [0.5], weights=[0.5, 0.25, 1.0])
    found, told = correct(arrays, LossConfig(sequence_rejection=(0.9, 1.1)))
    assert found.importance_weights_R is None
    assert found.weights_S.tolist() == [0.0, 0.25, 0.0]
    assert found.token_weights_R.tolist() == [1.0] * 5
    assert told == [Corrected(0, 2, 0, 0.0), Corrected(1, 2, 0, 2.0), Corrected(2, 1, 0, 0.0)]
    assert [*correction_metrics(told).values()] == [2.0 / 5, 0.0, 2 / 3], "shares of all"
    both, told = correct(arrays, LossConfig(sequence_rejection=(0.9, 1.1), use_tis=True, tis_clip=1.5))
    assert [own.tokens_cut for own in told] == [1, 1, 0]
    assert both.weights_S.tolist() == [0.0, 0.25, 0.0]
    assert both.token_weights_R.tolist() == close(1.5, 1.0, 1.5, 0.5, 0.5)


def test_masked_tokens_take_no_part_and_masks_multiply_into_weights():
    """The middle token is a tool's, for which an engine may report anything."""
    arrays = with_ratios([1.2, 1000.0, 0.8], masks=[[True, False, True]], token_weights=[[0.5, 1.0, 1.0]])
    arrays.rollout_logprobs_R[1] = math.nan
    found, (told,) = correct(arrays, LossConfig(icepop=(0.5, 5.0), sequence_rejection=(0.9, 1.1)))
    assert found.token_weights_R.tolist() == close(0.6, 1.0, 0.8)
    assert found.importance_weights_R.tolist() == close(1.2, 1.0, 0.8), "in the loss without the mask"
    assert found.weights_S.tolist() == [0.5]
    assert (told.tokens, told.tokens_cut, told.weight) == (2, 0, pytest.approx(2.0, rel=1e-6))


def test_extreme_ratios_are_cut_and_stay_finite():
    arrays = replace(with_ratios([1.0, 1.0]), old_logprobs_R=np.array([-1e4, 1e4], np.float32))
    for loss, cut in ((LossConfig(use_tis=True), 1), (LossConfig(icepop=(0.5, 5.0)), 2)):
        found, (told,) = correct(replace(arrays, rollout_logprobs_R=np.zeros(2, np.float32)), loss)
        assert np.isfinite(found.token_weights_R).all(), loss
        assert told.tokens_cut == cut
    empty = pack(MicroBatch((), ()))
    assert correct(empty, LossConfig(use_tis=True)) == (empty, [])
    assert correction_metrics([]) == {}


@given(st.lists(st.lists(st.floats(0.2, 5.0), min_size=1, max_size=6), min_size=2, max_size=6))
def test_how_sequences_are_cut_into_micro_batches_changes_nothing(ratios):
    loss = LossConfig(icepop=(0.5, 2.0), sequence_rejection=(0.8, 1.25))
    whole, told = correct(with_ratios(*ratios), loss)
    alone = [correct(with_ratios(own), loss) for own in ratios]
    assert np.concatenate([a.token_weights_R for a, _ in alone]).tolist() == whole.token_weights_R.tolist()
    assert [own._replace(member=i) for i, (_, (own,)) in enumerate(alone)] == told


def test_corrections_that_contradict_each_other_are_refused():
    for settings, says in (
        ({"use_tis": True, "icepop": (0.5, 5.0)}, "--use-tis and --icepop both weight tokens"),
        ({"use_tis": True, "old_logprobs": "engine"}, "--use-tis cannot be combined with --old-logprobs"),
        ({"icepop": (1.1, 2.0)}, "--icepop: must be two bounds LOW HIGH with 0 <= LOW < 1 < HIGH"),
        ({"sequence_rejection": (0.9, math.inf)}, "--sequence-rejection: must be a finite number"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_settings(Config(loss=LossConfig(**settings)))
