"""The trainer: its loss, gradients and metrics are the same under every layout, and bad steps are not taken.

Gradients are read off the weights: with a huge Adam epsilon a first step moves each weight by
lr / epsilon times its gradient.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_ibpo.policy.loss_objective import aggregation
from megatron_ibpo.policy.packing import packed
from megatron_ibpo.policy.planning import MicroBatch, plan_update, weighted_mean_length
from support import planned
from support.layouts import layout
from support.ranks import run_ranks
from support.tiny_models import make_qwen3
from support.train_sequences import sequences, with_holes
from support.trainers import (
    COMPARED,
    EPSILON,
    LR,
    assert_close,
    close_trainer,
    config_for,
    gradients,
    one_update,
    open_trainer,
    weights_of,
)

pytestmark = pytest.mark.world

LAYOUTS = {
    "dense": {
        1: [layout()],
        2: [layout(tp=2), layout(pp=2), layout(cp=2), layout(distributed_optimizer=True)],
        4: [layout(tp=2, pp=2)],
    },
    "next": {
        1: [layout()],
        2: [layout(tp=2, ep=2), layout(tp=2, etp=2), layout(pp=2), layout(cp=2, ep=2)],
        4: [layout(tp=2, ep=4)],
    },
}
"""Model → ranks → layouts that together take apart what can be taken apart."""
MORE_LAYOUTS = {
    "dense": {
        1: [layout()],
        2: [layout(), layout(cp=2, distributed_optimizer=True)],
        4: [layout(tp=2), layout(cp=2), layout(cp=4), layout(tp=2, cp=2), layout(pp=2, cp=2)],
    },
    "next": {
        1: [layout()],
        2: [layout(tp=2), layout(ep=2), layout()],
        4: [
            layout(tp=2, ep=2),
            layout(pp=2, ep=2),
            layout(cp=4),
            layout(tp=2, cp=2, ep=4),
            layout(pp=2, cp=2),
        ],
    },
}
CORRECTED = (
    {"old_logprobs": "engine", "loss_variant": "grpo"},
    {"icepop": (0.9, 1.6), "sequence_rejection": (0.5, 1.3), "max_tokens": 60},
)
CORRECTED_LAYOUTS = {
    1: [layout()],
    2: [layout(distributed_optimizer=True), layout(cp=2), layout(pp=2)],
    4: [],
}
"""What is compared for off-policy losses: layouts that cut a batch or leave ranks without a loss."""
MORE_CORRECTED_LAYOUTS = {1: [layout()], 2: [], 4: [layout(tp=2, pp=2)]}


@pytest.mark.parametrize(
    ("layouts", "corrected_layouts"),
    [
        pytest.param(LAYOUTS, CORRECTED_LAYOUTS, id="each kind"),
        pytest.param(
            MORE_LAYOUTS,
            MORE_CORRECTED_LAYOUTS,
            id="more",
            marks=[pytest.mark.slow, pytest.mark.timeout(1500)],
        ),
    ],
)
def test_gradients_and_metrics_are_the_same_under_every_layout(checkpoints, layouts, corrected_layouts):
    """One process against TP2, EP2, PP2, CP2, DP2 and their products, with shares that are uneven at DP2;
    and the off-policy losses."""
    rows = sequences()
    found = {}
    for size in (1, 2, 4):
        cases = [(checkpoints[model], chosen, {}) for model in layouts for chosen in layouts[model][size]]
        cases += [(checkpoints["dense"], chosen, s) for s in CORRECTED for chosen in corrected_layouts[size]]
        per_rank = run_ranks(gradients, size, cases, rows, timeout=600)
        for number, (hf_dir, chosen, settings) in enumerate(cases):
            metrics = [per_rank[rank][number][1] for rank in range(size)]
            assert all(m == metrics[0] | {"seconds_old_logprobs": m["seconds_old_logprobs"]} for m in metrics)
            found[(hf_dir.name, repr(settings), size, repr(chosen))] = (per_rank[0][number][0], metrics[0])
    for (family, settings, size, chosen), (moved, metrics) in found.items():
        expected, expected_metrics = found[(family, settings, 1, repr(layout()))]
        assert_close(moved, expected, family, settings, size, chosen)
        for name in {*COMPARED} & expected_metrics.keys():
            assert metrics[name] == pytest.approx(expected_metrics[name], rel=2e-4, abs=1e-6), (chosen, name)
        assert metrics["sequences_without_advantage"] == sum(s.advantage == 0 for s in rows)
    for settings in CORRECTED[1:]:
        _, metrics = found[("dense", repr(settings), 1, repr(layout()))]
        assert 0 < metrics["importance_token_cut_fraction"] < 1
        assert 0 < metrics["importance_sequence_cut_fraction"] < 1


def updates_under_cuts(world, hf_dir, reference, rows, cuts):
    """Return, for each (tokens of the update, of passes without a gradient): log-probs, metrics and weights
    after an update of two mini-batches, held to a reference policy."""
    found = []
    for max_tokens, log_probs_tokens in cuts:
        config = config_for(
            layout(), max_tokens=max_tokens, log_probs_tokens=log_probs_tokens, num_steps_per_rollout=2,
            kl_coef=0.5, use_tis=True,
        )  # fmt: skip
        trainer, export, _ = open_trainer(world, hf_dir, config, reference)
        logprobs = planned.logprobs(trainer, rows)
        metrics = planned.update(trainer, rows)
        found.append((logprobs, metrics, weights_of(export)))
        close_trainer()
    return found


def test_neither_cut_changes_what_is_computed(checkpoints, tmp_path):
    """Micro-batches of one sequence up to all at once, of the update and of the passes ahead of it."""
    rows, reference = sequences(9), make_qwen3(tmp_path / "other", 6, std=0.1)
    cuts = [(10_000, None), (40, None), (40, 10_000), (10_000, 1), (60, 90)]
    before = load_file(checkpoints["dense"] / "model.safetensors")
    found = run_ranks(updates_under_cuts, 2, checkpoints["dense"], reference, rows, cuts)[0]
    logprobs, metrics, weights = found[0]
    moved = {name: weights[name] - before[name] for name in weights}
    for (own_logprobs, own_metrics, own), cut in zip(found[1:], cuts[1:], strict=True):
        for values, wanted in zip(own_logprobs, logprobs, strict=True):
            assert values == pytest.approx(wanted, abs=1e-5), cut
        for name in {*metrics} - {"seconds_old_logprobs"}:
            assert own_metrics[name] == pytest.approx(metrics[name], rel=2e-4, abs=1e-6), (cut, name)
        assert_close({name: own[name] - before[name] for name in own}, moved, cut)


@pytest.mark.parametrize(
    "models", [["dense", "tied"], pytest.param(["next"], marks=pytest.mark.slow)], ids=" and ".join
)
def test_the_fused_head_trains_as_the_logits_do(checkpoints, models):
    """Tied and untied, with vocabulary and sequences sharded, in pipelines; two mini-batches, of which the
    second needs old log-probs."""
    rows, two, fused = sequences(8), {"num_steps_per_rollout": 2}, {"fuse_lm_head": True}
    plain = [(checkpoints[name], layout(), two) for name in models]
    expected = run_ranks(gradients, 1, plain, rows)[0]
    cases = [(checkpoints[n], chosen, two | fused) for n in models for chosen in (layout(tp=2), layout(pp=2))]
    found = run_ranks(gradients, 2, cases, rows, timeout=240)[0]
    for number, (moved, metrics) in enumerate(found):
        wanted, wanted_metrics = expected[number // 2]
        assert_close(moved, wanted, cases[number])
        for name in ("loss", "grad_norm", "entropy", "ratio_mean", "clip_fraction", "logprob_diff_abs_mean"):
            assert metrics[name] == pytest.approx(wanted_metrics[name], rel=2e-4, abs=1e-6), cases[number]


def is_trained_on(row):
    return row.advantage != 0 and row.loss_mask.any()


def old_logprobs(row):
    """Near what the model says, so that some ratios are clipped and some are not; by position alone."""
    return (-4.2 + 0.05 * np.cos(np.arange(len(row.response_token_ids)))).astype(np.float32)


def masked_steps(world, hf_dir, cases):
    return [masked_step(world, hf_dir, *case) for case in cases]


def masked_step(world, hf_dir, rows, variant):
    """Loss, sum of ratios, tokens and gradient by name, of one step from given old log-probs."""
    config = config_for(layout(), loss_variant=variant)
    trainer, export, _ = open_trainer(world, hf_dir, config)
    before = weights_of(export)
    live = [row for row in rows if is_trained_on(row)]
    (part,) = planned.own_share(plan_update, live, config)  # one mini-batch
    shared = [
        replace(a, old_logprobs_R=np.concatenate([[], *(old_logprobs(live[i]) for i in a.members_S)]))
        for a in packed(part.cut.micro_batches)
    ]
    objective = trainer.objective(aggregation(config, weighted_mean_length(rows)))
    pieces = trainer.accumulate_gradients(shared, objective)
    trainer.scheduler.step(1)
    trainer.gradient_norm()
    trainer.optimizer.step()
    after = weights_of(export)
    close_trainer()
    # Adam's first step is LR · g / (|g| + EPSILON)
    steps = {name: before[name] - after[name] for name in before}
    moved = {name: EPSILON * step / (LR - step.abs()) for name, step in steps.items()}
    return [sum(piece[name] for piece in pieces) for name in ("loss", "ratio", "tokens")], moved


def masked_by_autograd(hf_dir, rows, variant):
    """The same from transformers: the whole sequence is read, the masked tokens are in no sum."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    weight = sum(row.weight for row in rows)
    mean_length = sum(row.weight * int(row.loss_mask.sum()) for row in rows) / weight
    loss, ratios, tokens = torch.zeros(()), 0.0, 0
    for row in rows:
        if not is_trained_on(row):
            continue
        ids = torch.tensor([row.prompt_token_ids.tolist() + row.response_token_ids.tolist()])
        logits = model(ids).logits[0, len(row.prompt_token_ids) - 1 : -1]
        logprobs = (logits / row.temperature).log_softmax(-1)
        new = logprobs.gather(1, ids[0, len(row.prompt_token_ids) :, None])[:, 0]
        mask = torch.tensor(row.loss_mask.tolist())
        gap = (new - torch.tensor(old_logprobs(row)))[mask]
        factors = np.ones(len(mask)) if row.token_weights is None else row.token_weights
        factors = torch.tensor(factors[row.loss_mask], dtype=torch.float32)
        gap = gap.detach() + factors * (gap - gap.detach())  # weights of tokens scale the gradient alone
        ratio = gap.mean().exp() if variant == "gspo" else gap.exp()
        surrogate = -torch.minimum(ratio * row.advantage, ratio.clamp(0.8, 1.2) * row.advantage)
        loss = loss + row.weight * (surrogate if variant == "gspo" else surrogate.sum() / mean_length)
        ratios += gap.mean().exp().item()
        tokens += len(gap)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [loss.item(), ratios, tokens], gradients


def test_masked_tokens_are_in_no_loss_ratio_length_or_gradient(checkpoints):
    """The expected values are transformers' and autograd's, over two data-parallel ranks; dapo divides by the
    mean trained length."""
    holed = with_holes(sequences(9))
    assert not all(row.loss_mask.all() for row in holed)
    cases = [
        ([replace(row, temperature=temperature) for row in holed], variant)
        for variant, temperature in (("gspo", 1.0), ("dapo", 0.7))
    ]
    by_rank = run_ranks(masked_steps, 2, checkpoints["dense"], cases)
    for number, case in enumerate(cases):
        expected, gradients = masked_by_autograd(checkpoints["dense"], *case)
        for found, moved in (own[number] for own in by_rank):
            assert found == pytest.approx(expected, rel=1e-5), case[1]
            if moved:  # rank 0 has the weights
                assert_close(moved, gradients, case[1])


def rows_by_precision(world, rows):
    """Rows of a micro-batch of all sequences, for Megatron settings of one precision each."""
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.policy.forward_backward import _lay_out_all

    parallel.initialize(layout(tp=2), world, seed=0)
    packs, found = packed([MicroBatch(tuple(range(len(rows))), tuple(rows))]), []
    for fp8, fp4 in ((None, None), ("hybrid", None), (None, "e2m1")):
        (batch,) = _lay_out_all(packs, world.device, SimpleNamespace(fp8=fp8, fp4=fp4))
        found.append(batch.input_ids_1N.shape[1])
    parallel.destroy()
    return found


def test_in_low_precision_each_rank_has_whole_blocks_of_rows():
    rows = sequences(3)
    tokens = sum(row.num_tokens - 1 for row in rows)
    plain, *low = run_ranks(rows_by_precision, 2, rows)[0]
    assert plain == tokens + tokens % 2
    assert low == [-(-tokens // 256) * 256] * 2


def masked_logprobs(world, hf_dir, rows):
    trainer, _, _ = open_trainer(world, hf_dir, config_for(layout()))
    found = planned.logprobs(trainer, rows), planned.logprobs(trainer, with_holes(rows))
    metrics = planned.update(trainer, with_holes(rows))
    close_trainer()
    return *found, metrics


def test_masked_tokens_have_log_prob_0_and_are_counted_out(checkpoints):
    rows = sequences(9)
    whole, holed, metrics = run_ranks(masked_logprobs, 1, checkpoints["dense"], rows)[0]
    masks = [row.loss_mask.tolist() for row in with_holes(rows)]
    for values, found, mask in zip(whole, holed, masks, strict=True):
        assert found == tuple(v if kept else 0.0 for v, kept in zip(values, mask, strict=True))
    trained = [(r, sum(m)) for r, m in zip(rows, masks, strict=True) if r.advantage and any(m)]
    assert metrics["tokens_trained"] == sum(len(r.prompt_token_ids) + kept for r, kept in trained)
    gaps = [
        v - r.rollout_logprobs[k]
        for r, own, mask in zip(rows, whole, masks, strict=True)
        if r.advantage
        for k, v in enumerate(own)
        if mask[k]
    ]
    assert metrics["logprob_diff_mean"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)


def two_minibatches(world, hf_dir, rows):
    config = config_for(layout(), num_steps_per_rollout=2, lr=1e-3, eps_adam=1e-8)
    trainer, _, _ = open_trainer(world, hf_dir, config)
    before = planned.logprobs(trainer, rows)
    metrics = planned.update(trainer, rows)
    after = planned.logprobs(trainer, rows)
    close_trainer()
    return before, metrics, after


def test_the_second_minibatch_is_off_policy(checkpoints):
    rows = sequences(8)
    before, metrics, after = run_ranks(two_minibatches, 1, checkpoints["dense"], rows)[0]
    assert metrics["ratio_max"] != 1.0  # the first mini-batch alone has ratio 1
    assert any(b != a for b, a in zip(before, after, strict=True))
    assert metrics["updates_skipped"] == 0
    assert metrics["tokens_trained"] == sum(r.num_tokens for r in rows if r.advantage != 0)


def poisoned(world, hf_dir, rows):
    trainer, export, _ = open_trainer(world, hf_dir, config_for(layout()))
    seen = [weights_of(export)]
    metrics = []
    for weight in (math.nan, 0.1):
        rows[0].weight, rows[0].advantage = weight, 1.0
        metrics.append(planned.update(trainer, rows))
        seen.append(weights_of(export))
    close_trainer()
    return metrics, [all(map(torch.equal, seen[0].values(), later.values())) for later in seen[1:]]


def test_a_step_that_is_not_finite_is_not_taken_and_the_next_one_is(checkpoints):
    metrics, unchanged = run_ranks(poisoned, 1, checkpoints["dense"], sequences(4))[0]
    assert [own["updates_skipped"] for own in metrics] == [1, 0]
    assert unchanged == [True, False]


CORRECTIONS = {"icepop": (0.9, 1.6), "sequence_rejection": (0.5, 1.3)}


def with_corrections(world, hf_dir, rows):
    """Old log-probs; by name the (weights before an update, those after it, its metrics)."""
    trainer, _, _ = open_trainer(world, hf_dir, config_for(layout()))
    old = planned.logprobs(trainer, rows)
    close_trainer()
    by_hand = weighted_by_hand(rows, old)
    cases = {
        "gspo": ({"loss_variant": "gspo", **CORRECTIONS}, rows),
        "gspo by hand": ({"loss_variant": "gspo"}, by_hand),
        "grpo": ({"loss_variant": "grpo", **CORRECTIONS}, rows),
        "grpo by hand": ({"loss_variant": "grpo"}, by_hand),
        "engine": ({"old_logprobs": "engine"}, rows),
        "recomputed": ({}, rows),
    }
    return old, {
        name: one_update(world, hf_dir, config_for(layout(), **loss), own)
        for name, (loss, own) in cases.items()
    }


@pytest.fixture(scope="module")
def corrected(checkpoints):
    """Rows and what `with_corrections` finds of them."""
    rows = [row for row in sequences(9) if row.advantage]
    return rows, *run_ranks(with_corrections, 1, checkpoints["dense"], rows)[0]


def weighted_by_hand(rows, old):
    """Tokens weigh their ratio between .9 and 1.6, sequences nothing outside .5 to 1.3."""
    made = []
    for row, own in zip(rows, old, strict=True):
        ratios = np.exp(np.subtract(own, row.rollout_logprobs, dtype=np.float64))
        tokens = np.where((ratios < 0.9) | (ratios > 1.6), 0, ratios)
        before = 1.0 if row.token_weights is None else row.token_weights
        kept = 0.5 <= np.exp(np.log(ratios).mean()) <= 1.3
        made.append(replace(row, token_weights=tokens * before, weight=row.weight * kept))
    return made


@pytest.mark.parametrize("variant", ["gspo", "grpo"])
def test_corrections_weight_gradients_and_the_loss_that_is_reported(corrected, variant):
    """The step is that of rows which bring these weights along, in a sequence-level loss as in a token-level
    one. The loss, at ratio 1, is -A times the mean weight of the tokens; a mask has no part in it."""
    rows, old, found = corrected
    before, weights, metrics = found[variant]
    _, wanted, wanted_metrics = found[f"{variant} by hand"]
    assert metrics["grad_norm"] == pytest.approx(wanted_metrics["grad_norm"], rel=1e-5)
    scale = max((wanted[name] - before[name]).abs().max() for name in wanted)
    for name in wanted:
        assert (weights[name] - wanted[name]).abs().max() <= 2e-4 * scale, name
    by_hand = weighted_by_hand([replace(row, token_weights=None) for row in rows], old)
    losses = [-row.weight * row.advantage * row.token_weights.mean() for row in by_hand]
    assert metrics["loss"] == pytest.approx(sum(losses), rel=1e-5)
    assert wanted_metrics["loss"] != pytest.approx(sum(losses), rel=1e-2)
    kept = [row.token_weights * (row.weight > 0) for row in by_hand]
    ratios = np.concatenate(kept)
    assert metrics["importance_weight_mean"] == pytest.approx(ratios.mean(), rel=1e-5)
    assert metrics["importance_sequence_cut_fraction"] == sum(not own.any() for own in kept) / len(rows)
    cut = np.concatenate([row.token_weights == 0 for row in by_hand])
    assert metrics["importance_token_cut_fraction"] == pytest.approx(cut.mean())


def test_ratios_to_the_engines_log_probs_reach_the_clip_in_the_first_mini_batch(corrected):
    rows, new, found = corrected
    metrics, recomputed = found["engine"][2], found["recomputed"][2]
    ratios = [
        math.exp(np.subtract(own, row.rollout_logprobs).mean()) for own, row in zip(new, rows, strict=True)
    ]
    losses = [
        -row.weight * min(ratio * row.advantage, min(max(ratio, 0.8), 1.2) * row.advantage)
        for ratio, row in zip(ratios, rows, strict=True)
    ]
    assert metrics["loss"] == pytest.approx(sum(losses), rel=1e-5)
    assert metrics["ratio_mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-5)
    assert 0 < metrics["clip_fraction"] < 1
    assert recomputed["ratio_mean"] == 1
    for name in ("logprob_diff_mean", "logprob_diff_abs_mean", "logprob_diff_k3"):
        assert metrics[name] == pytest.approx(recomputed[name], rel=1e-6)  # of the trainer, not of themselves


def held_to_another(world, hf_dir, reference_dir, rows):
    """Log-probs of both policies, and metrics of an update of the first held to the second."""
    reference = open_trainer(world, reference_dir, config_for(layout(tp=world.size)))[0]
    wanted = planned.logprobs(reference, rows)
    close_trainer()
    config = config_for(layout(tp=world.size), kl_coef=0.5, kl_estimator="k3")
    trainer, _, _ = open_trainer(world, hf_dir, config, reference_dir)
    before = planned.logprobs(trainer, rows)
    metrics = planned.update(trainer, rows)
    close_trainer()
    return before, wanted, metrics


def test_the_loss_keeps_the_policy_close_to_its_reference(checkpoints, tmp_path):
    """k3 = exp(ref - log π) - 1 - (ref - log π); its mean goes onto each sequence's loss."""
    rows = with_holes([row for row in sequences(8) if row.advantage])
    rows = [row for row in rows if row.loss_mask.any()]
    other = make_qwen3(tmp_path / "other", 6, std=0.1)
    before, wanted, metrics = run_ranks(held_to_another, 2, checkpoints["dense"], other, rows)[0]
    loss, tokens, total = 0.0, 0, 0.0
    for row, own, reference in zip(rows, before, wanted, strict=True):
        gaps = np.subtract(reference, own)[row.loss_mask]
        k3 = np.exp(gaps) - 1 - gaps
        loss += row.weight * (-row.advantage + 0.5 * k3.mean())
        total, tokens = total + k3.sum(), tokens + len(k3)
    assert metrics["kl"] == pytest.approx(total / tokens, rel=1e-4)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)


def at_temperatures(world, hf_dir, rows):
    """Log-probs, and the metrics of an update that changes next to nothing, with old log-probs of its own."""
    config = config_for(layout(), num_steps_per_rollout=2, lr=1e-12, eps_adam=1e-8)
    trainer, _, _ = open_trainer(world, hf_dir, config)
    found = planned.logprobs(trainer, rows), planned.update(trainer, rows)
    close_trainer()
    return found


def test_log_probs_old_and_new_are_those_at_the_temperature_of_each_sample(checkpoints):
    """They are compared with transformers'. Where old and new are of one policy every ratio is 1."""
    from transformers import AutoModelForCausalLM

    rows = [replace(row, temperature=(0.7, 1.0, 1.3)[k % 3]) for k, row in enumerate(sequences(9))]
    logprobs, metrics = run_ranks(at_temperatures, 1, checkpoints["dense"], rows)[0]
    model = AutoModelForCausalLM.from_pretrained(checkpoints["dense"], dtype=torch.float32)
    for row, found in zip(rows, logprobs, strict=True):
        ids = torch.tensor([row.prompt_token_ids.tolist() + row.response_token_ids.tolist()])
        with torch.no_grad():
            logits = model(ids).logits[0, len(row.prompt_token_ids) - 1 : -1] / row.temperature
        wanted = logits.log_softmax(-1).gather(1, ids[0, len(row.prompt_token_ids) :, None])[:, 0]
        assert found == pytest.approx(wanted.tolist(), abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
