"""The trainer computes the same under every layout, interleaved pipelines too, and what autograd computes."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_ibpo.models import read_hf_config
from megatron_ibpo.plan.memory import rank_memory
from megatron_ibpo.plan.parameter_count import take_census
from megatron_ibpo.policy import forward_backward, parallel
from megatron_ibpo.policy.overrides import check_overrides, read_overrides
from megatron_ibpo.policy.packing import packed
from megatron_ibpo.policy.planning import MicroBatch, empty_micro_batches, plan_update
from megatron_ibpo.policy.trainer import _Totals
from support import planned, trainers
from support.critics import critic_config, open_critic, rows_with_returns
from support.layouts import layout
from support.ranks import run_ranks
from support.train_sequences import sequences, with_holes
from support.trainers import COMPARED, EPSILON, LR, assert_close, close_trainer, config_for, open_trainer

pytestmark = pytest.mark.world

CORRECTIONS = {"icepop": (0.9, 1.6), "sequence_rejection": (0.5, 1.3)}
LOSSES = {
    "engine": {"old_logprobs": "engine", "loss_variant": "grpo"},
    "corrected": {**CORRECTIONS, "max_tokens": 60},
}
"""Off-policy losses of the dense model, under layouts that cut a batch or leave ranks without a loss."""
SHARDED = layout(distributed_optimizer=True)
FOUR = {"cp": 4}, {"tp": 2, "ep": 2}, {"pp": 2, "ep": 2}, {"pp": 2, "cp": 2}, {"tp": 2, "cp": 2, "ep": 4}
EACH_KIND = {
    2: {
        "dense": [layout(tp=2), layout(pp=2), layout(cp=2), SHARDED],
        "next": [layout(tp=2, ep=2), layout(tp=2, etp=2), layout(pp=2), layout(cp=2, ep=2)],
        "engine": [layout(cp=2)], "corrected": [SHARDED, layout(pp=2)],
    },
}  # fmt: skip
MORE = {
    2: {
        "dense": [layout(), layout(cp=2, distributed_optimizer=True)],
        "next": [layout(tp=2), layout(ep=2), layout()],
        "engine": [SHARDED, layout(pp=2)], "corrected": [layout(cp=2)],
    },
    4: {
        "dense": [layout(tp=2), layout(cp=2), layout(cp=4), layout(tp=2, cp=2), layout(pp=2, cp=2),
                  layout(tp=2, pp=2)],
        "next": [layout(**own) for own in (*FOUR, {"tp": 2, "ep": 4})],
        "engine": [layout(tp=2, pp=2)], "corrected": [layout(tp=2, pp=2)],
    },
}  # fmt: skip


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("layouts", [EACH_KIND, pytest.param(MORE, marks=pytest.mark.slow)])
def test_gradients_and_metrics_are_the_same_under_every_layout(checkpoints, layouts):
    """By ranks, and model or loss. Shares are uneven at DP2."""
    rows, found = sequences(), {}
    alone = {1: {name: [layout()] for name in ("dense", "next", *LOSSES)}}
    for size, by_name in (alone | layouts).items():
        cases = [(name, own) for name, several in by_name.items() for own in several]
        given = [(checkpoints[n if n == "next" else "dense"], own, LOSSES.get(n, {})) for n, own in cases]
        per_rank = run_ranks(trainers.gradients, size, given, rows, timeout=600)
        for number, case in enumerate(cases):
            (moved, metrics), *others = (own[number] for own in per_rank)
            for _, own in others:
                assert own == metrics | {"seconds_old_logprobs": own["seconds_old_logprobs"]}, case
            expected, expected_metrics = found.setdefault(case[0], (moved, metrics))  # of one process
            assert_close(moved, expected, size, case)
            for name in {*COMPARED} & expected_metrics.keys():
                wanted = pytest.approx(expected_metrics[name], rel=2e-4, abs=1e-6)
                assert metrics[name] == wanted, (case, name)
            assert metrics["sequences_without_advantage"] == sum(row.advantage == 0 for row in rows), (
                number,
                case,
            )
    for name in ("importance_token_cut_fraction", "importance_sequence_cut_fraction"):
        assert 0 < found["corrected"][1][name] < 1


@pytest.mark.world(2)
def test_the_fused_head_trains_as_the_logits_do(world, checkpoints):
    """With vocabulary and sequences sharded, in pipelines; the second mini-batch needs old log-probs."""
    for name in ("dense", "tied"):
        chosen = (layout(), {}), *((own, {"fuse_lm_head": True}) for own in (layout(tp=2), layout(pp=2)))
        cases = [(checkpoints[name], own, {"num_steps_per_rollout": 2, **how}) for own, how in chosen]
        (expected, wanted), *found = trainers.gradients(world, cases, sequences(8))
        for moved, metrics in found:
            assert_close(moved, expected, name)
            for own in COMPARED[:6]:
                assert metrics[own] == pytest.approx(wanted[own], rel=2e-4, abs=1e-6), (name, own)


def test_loss_ratios_and_gradients_match_autograd_without_masked_tokens(checkpoints):
    """Of transformers, at the temperature of each sample, against two data-parallel ranks. Masked tokens are
    read and in no sum. Ratios to the engine's log-probs reach the clip in the first mini-batch."""
    from transformers import AutoModelForCausalLM

    rows = []
    for number, row in enumerate(with_holes(sequences(9))):
        # near what the model says, so that some ratios are clipped and some are not
        engine = (-4.2 + 0.05 * np.cos(np.arange(len(row.response_token_ids)))).astype(np.float32)
        rows.append(replace(row, temperature=(0.7, 1, 1.3)[number % 3], rollout_logprobs=engine))
    mean_length = sum(row.weight * row.loss_mask.sum() for row in rows) / sum(row.weight for row in rows)
    variants, hf_dir = ("gspo", "dapo"), checkpoints["dense"]
    settings = {"old_logprobs": "engine", "max_tokens": 60}  # several micro-batches
    cases = [(hf_dir, layout(), settings | {"loss_variant": own}) for own in variants]
    by_rank = run_ranks(trainers.gradients, 2, cases, rows)
    for number, variant in enumerate(variants):
        model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
        loss, gaps = torch.zeros(()), []
        for row in (row for row in rows if row.advantage and row.loss_mask.any()):
            ids, mask = torch.tensor([[*row.prompt_token_ids, *row.response_token_ids]]), row.loss_mask
            prompt = len(row.prompt_token_ids)
            logprobs = (model(ids).logits[0, prompt - 1 : -1] / row.temperature).log_softmax(-1)
            gap = (logprobs.gather(1, ids[0, prompt:, None])[:, 0] - torch.tensor(row.rollout_logprobs))[mask]
            gaps.append(gap.detach())
            factors = np.ones(len(mask)) if row.token_weights is None else row.token_weights
            factors = torch.tensor(factors[mask], dtype=torch.float32)
            gap = gap.detach() + factors * (gap - gap.detach())  # weights of tokens scale the gradient alone
            ratio = gap.mean().exp() if variant == "gspo" else gap.exp()
            surrogate = -torch.minimum(ratio * row.advantage, ratio.clamp(0.8, 1.2) * row.advantage)
            loss = loss + row.weight * (surrogate if variant == "gspo" else surrogate.sum() / mean_length)
        loss.backward()
        wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        sums = {
            "loss": loss.item(),
            "ratio_mean": np.mean([gap.mean().exp() for gap in gaps]),
            "logprob_diff_mean": torch.cat(gaps).mean().item(),
            "logprob_diff_abs_mean": torch.cat(gaps).abs().mean().item(),
        }
        for moved, metrics in (own[number] for own in by_rank):
            assert {name: metrics[name] for name in sums} == pytest.approx(sums, rel=2e-5), variant
            assert 0 < metrics["clip_fraction"] < 1, variant
            if moved:  # rank 0 has the weights; Adam's first step is LR · g / (|g| + EPSILON)
                exact = {name: own / (1 - own.abs() / EPSILON) for name, own in moved.items()}
                assert_close(exact, wanted, variant)


@pytest.mark.world(2)
def test_in_low_precision_each_rank_has_whole_blocks_of_rows(world):
    parallel.initialize(layout(tp=2), world, seed=0)
    rows, found = sequences(3), []
    for fp8, fp4 in ((None, None), ("hybrid", None), (None, "e2m1")):
        packs = packed([MicroBatch(tuple(range(len(rows))), tuple(rows))])
        (batch,) = forward_backward._lay_out_all(packs, world.device, SimpleNamespace(fp8=fp8, fp4=fp4))
        found.append(batch.input_ids_1N.shape[1])
    tokens = sum(row.num_tokens - 1 for row in rows)
    assert found == [tokens + tokens % 2, *[-(-tokens // 256) * 256] * 2]


@pytest.mark.world(1)
def test_the_second_minibatch_is_off_policy(world, checkpoints):
    """Where old and new log-probs are of one policy every ratio is 1, at whatever temperature."""
    rows = [replace(row, temperature=(0.7, 1.0, 1.3)[k % 3]) for k, row in enumerate(sequences(8))]
    for lr in (1e-12, 1e-3):
        config = config_for(layout(), num_steps_per_rollout=2, lr=lr, eps_adam=1e-8, log_probs_tokens=60)
        trainer, _, _ = open_trainer(world, checkpoints["dense"], config)
        before, metrics = planned.logprobs(trainer, rows), planned.update(trainer, rows)
        after = planned.logprobs(trainer, rows)
        moved = max(np.abs(np.subtract(*own)).max() for own in zip(after, before, strict=True))
        close_trainer()
        assert metrics["updates_skipped"] == 0, lr
        assert metrics["tokens_trained"] == sum(row.num_tokens for row in rows if row.advantage), lr
        ratios = metrics["ratio_mean"], metrics["ratio_max"]
        assert (ratios == pytest.approx((1, 1), abs=1e-5)) == (moved < 1e-5) == (lr == 1e-12)


@pytest.mark.world(1)
def test_a_non_finite_step_is_skipped_and_the_next_taken(world, checkpoints):
    trainer, export, _ = open_trainer(world, checkpoints["dense"], config_for(layout()))
    rows, before = sequences(4), trainers.weights_of(export)
    for weight, skipped in ((math.nan, True), (0.1, False)):
        rows[0].weight, rows[0].advantage = weight, 1.0
        assert planned.update(trainer, rows)["updates_skipped"] == skipped
        after = trainers.weights_of(export)
        assert all(after[name].equal(own) for name, own in before.items()) == skipped


@pytest.mark.world(1)
def test_corrections_weight_gradients_and_the_loss_that_is_reported(world, checkpoints):
    """The step is that of rows which bring these weights along (tokens weigh their ratio between .9 and 1.6,
    sequences nothing outside .5 to 1.3), in a sequence-level loss as in a token-level one. The loss, at ratio
    1, is -A times the mean weight of the tokens; a mask has no part in it."""
    hf_dir, rows = checkpoints["dense"], [row for row in sequences(9) if row.advantage]
    trainer, _, _ = open_trainer(world, hf_dir, config_for(layout()))
    pairs = zip(planned.logprobs(trainer, rows), rows, strict=True)
    close_trainer()
    ratios = [np.exp(np.subtract(own, row.rollout_logprobs, dtype=float)) for own, row in pairs]
    tokens = [np.where((own < 0.9) | (own > 1.6), 0, own) for own in ratios]
    kept = [0.5 <= np.exp(np.log(own).mean()) <= 1.3 for own in ratios]
    masks = [1.0 if row.token_weights is None else row.token_weights for row in rows]
    by_hand = [
        replace(row, token_weights=own * mask, weight=row.weight * stays)
        for row, own, mask, stays in zip(rows, tokens, masks, kept, strict=True)
    ]
    loss = sum(-row.weight * row.advantage * own.mean() for row, own in zip(by_hand, tokens, strict=True))
    for variant in ("gspo", "grpo"):
        corrected = config_for(layout(), loss_variant=variant, **CORRECTIONS)
        before, weights, metrics = trainers.one_update(world, hf_dir, corrected, rows)
        plain = config_for(layout(), loss_variant=variant)
        _, wanted, plain = trainers.one_update(world, hf_dir, plain, by_hand)
        assert metrics["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5), variant
        scale = max((wanted[name] - before[name]).abs().max() for name in wanted)
        assert max((weights[name] - wanted[name]).abs().max() for name in wanted) <= 2e-4 * scale, variant
        assert metrics["loss"] == pytest.approx(loss, rel=1e-5), variant
        assert plain["loss"] != pytest.approx(loss, rel=1e-2), variant
        weighing = [own * stays for own, stays in zip(tokens, kept, strict=True)]
        shares = {
            "weight_mean": np.concatenate(weighing).mean(),
            "token_cut_fraction": (np.concatenate(tokens) == 0).mean(),
            "sequence_cut_fraction": np.mean([not own.any() for own in weighing]),
        }
        for name, own in shares.items():
            assert metrics[f"importance_{name}"] == pytest.approx(own, rel=1e-5), name


@pytest.mark.world(2)
def test_the_loss_keeps_the_policy_close_to_its_reference(world, checkpoints):
    """k3 = exp(ref - log π) - 1 - (ref - log π); its mean goes onto each sequence's loss."""
    rows = [row for row in with_holes([row for row in sequences(8) if row.advantage]) if row.loss_mask.any()]
    alone, _, _ = open_trainer(world, checkpoints["other"], config_for(layout(tp=2)))
    reference = planned.logprobs(alone, rows)
    close_trainer()
    config = config_for(layout(tp=2), kl_coef=0.5, kl_estimator="k3")
    trainer, _, _ = open_trainer(world, checkpoints["dense"], config, checkpoints["other"])
    policy, metrics = planned.logprobs(trainer, rows), planned.update(trainer, rows)
    loss, each = 0.0, []
    for row, own, other in zip(rows, policy, reference, strict=True):
        assert not np.array(own)[~row.loss_mask].any()
        gaps = np.subtract(other, own)[row.loss_mask]
        each.append(np.exp(gaps) - 1 - gaps)
        loss += row.weight * (-row.advantage + 0.5 * each[-1].mean())
    assert metrics["kl"] == pytest.approx(np.concatenate(each).mean(), rel=1e-4)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)


def interleaved(stages, chunks=2, config=None, **sizes):
    config = config or config_for(None)
    config.parallel = layout(pp=stages, **sizes)
    config.model.model_override = (f"virtual_pipeline_model_parallel_size={chunks}",) if chunks > 1 else ()
    return config


def updated(world, hf_dirs, stages, chunks, rows, sizes):
    """What one step, held to a reference policy, comes to for each model and its critic."""
    found = []
    for hf_dir in hf_dirs:
        config = interleaved(stages, chunks, config_for(None, max_tokens=60, kl_coef=0.5), **sizes)
        trainer, export, _ = open_trainer(world, hf_dir, config, reference=hf_dir)
        before, logprobs = trainers.weights_of(export), planned.logprobs(trainer, rows)
        metrics, after = planned.update(trainer, rows), trainers.weights_of(export)
        close_trainer()
        moved = {name: (before[name] - after[name]) * (EPSILON / LR) for name in before}
        config = interleaved(stages, chunks, critic_config(None, lr=0.01, max_tokens=40), **sizes)
        critic = open_critic(world, hf_dir, config)
        values, of_critic = planned.values(critic, rows), planned.update_values(critic, rows)
        close_trainer()
        found.append((logprobs + values, metrics | of_critic, before, moved))
    return found


GATHERED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "ep": 2}


@pytest.mark.parametrize(("names", "stages", "ranks", "sizes"), [
    (["deep"], 2, 2, {}),
    pytest.param(["next"], 2, 2, {}, marks=pytest.mark.slow),
    pytest.param(["next"], 2, 4, GATHERED, marks=pytest.mark.slow),
    pytest.param(["deep"], 4, 4, {}, marks=pytest.mark.slow),
])  # fmt: skip
def test_logprobs_loss_and_gradients_are_those_of_one_process(checkpoints, names, stages, ranks, sizes):
    hf_dirs, rows = [checkpoints[name] for name in names], rows_with_returns()
    expected = run_ranks(updated, 1, hf_dirs, 1, 1, rows, {})[0]
    found = run_ranks(updated, ranks, hf_dirs, stages, 2, rows, sizes, timeout=240)
    for number, (logprobs, metrics, before, moved) in enumerate(expected):
        own_logprobs, own_metrics, own_before, own_moved = found[0][number]
        assert all(own_before[name].equal(before[name]) for name in before)
        assert own_moved.keys() == moved.keys() == before.keys(), "every weight has a name"
        assert_close(own_moved, moved)
        for values, wanted in zip(own_logprobs, logprobs, strict=True):
            assert values == pytest.approx(wanted, abs=1e-5, rel=1e-5), f"{number=}"
        for name in {*metrics} - {"seconds_old_logprobs"}:
            assert own_metrics[name] == pytest.approx(metrics[name], rel=2e-4, abs=1e-6), name
            assert all(rank[number][1][name] == own_metrics[name] for rank in found)


def test_activation_memory_of_interleaved_stages_is_counted_by_hand(checkpoints):
    """Of two stages with two pieces each the first has seen 2 + 2 + 1 forward passes through a piece when its
    first backward pass begins, the last 2 + 1; without interleaving 2 and 1 through both."""

    def activations(chunks):
        shape, config = read_hf_config(checkpoints["deep"]), interleaved(2, chunks)
        census = take_census(shape, config, world_size=2)
        assert [part.layers for part in census.stages] == [4, 4]
        overrides = read_overrides(config)
        return [
            rank_memory(shape, config, overrides, part, census, 1000).activations for part in census.stages
        ]

    (first, last), pieces = activations(1), activations(2)
    assert first > last
    assert pieces == [first + (first - last) / 2, last + (first - last) / 2]


def test_micro_batches_of_nothing_are_counted():
    config = interleaved(2, config=config_for(None, max_tokens=1))
    shares = plan_update([row for row in sequences(9) if row.advantage][:5], config, 1, planned.cost).shares
    assert (len(shares[0][0].cut.micro_batches), empty_micro_batches(shares)) == (6, 1)
    read = read_overrides(config)
    assert (read.chunks, read.micro_batch_multiple) == (2, 2)
    config.model.model_override += ("microbatch_group_size_per_vp_stage=3",)
    assert read_overrides(config).micro_batch_multiple == 3, "groups may be larger than the pipeline"


def test_interleaving_settings_that_cannot_run_are_refused():
    for stages, settings, says in (
        (1, (), "needs --pipeline-model-parallel-size of at least 2"),
        (4, ("microbatch_group_size_per_vp_stage=3",), "must be at least --pipeline-model-parallel-size"),
        (2, ("overlap_p2p_comm=false",), "would mix up what they send"),
    ):
        config = interleaved(stages)
        config.model.model_override += settings
        with pytest.raises(ValueError, match=says):
            check_overrides(config)


def test_a_step_that_trains_on_nothing_has_no_entropy():
    totals = _Totals()
    totals.see({"updates_empty": 1.0})
    assert totals.metrics() == {"updates_empty": 1.0, "updates_skipped": 0.0, "loss": 0.0}
    totals.see({"tokens": 4.0, "entropy": 2.0, "clip_terms": 2.0, "clipped": 0.0})
    assert (totals.metrics()["entropy"], totals.metrics()["clip_fraction"]) == (0.5, 0.0)
