"""The gradient meter: exact against autograd, the same under every layout, and no part of training."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ibpo.policy.gradient_meter import (
    as_sampled,
    compare_with_gspo,
    estimate_noise,
    measure_gradient,
)
from megatron_ibpo.policy.planning import plan_measure
from support import planned
from support.layouts import layout
from support.ranks import run_ranks
from support.train_sequences import sequence, sequences
from support.trainers import close_trainer, config_for, open_trainer, weights_of

EXACT = 1000
"""Blocks: more than there are prompts."""


def measured(world, cases, rows):
    """Return, for each (checkpoint, configuration, numbers of blocks): the noise by each number."""
    found = []
    for hf_dir, config, blocks in cases:
        trainer, _, _ = open_trainer(world, hf_dir, config)
        noise = []
        for count in blocks:
            asked = replace(config, run=replace(config.run, gradient_meter_blocks=count))
            share = planned.own_share(plan_measure, rows, asked, rows)
            objective = trainer.objective("sequence-mean")
            noise.append(measure_gradient(trainer, as_sampled(share.own), objective))
        close_trainer()
        found.append(noise)
    return found


def by_autograd(hf_dir, rows):
    """[P, parameters]: each prompt's gradient of GSPO at ratio 1, by transformers and plain autograd, scaled
    so that their mean is the step's gradient."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    prompts = sorted({row.group for row in rows})
    gradients = []
    for prompt in prompts:
        model.zero_grad()
        for row in rows:
            if row.group != prompt:
                continue
            ids = torch.tensor([[*row.prompt_token_ids.tolist(), *row.response_token_ids.tolist()]])
            logprobs = model(ids).logits[0].log_softmax(-1)
            first = len(row.prompt_token_ids) - 1
            target = torch.tensor(row.response_token_ids.tolist())
            chosen = logprobs[first:-1].gather(1, target[:, None])[:, 0]
            token_weights = np.ones(len(target)) if row.token_weights is None else row.token_weights
            weights = torch.tensor(token_weights.tolist(), dtype=torch.float32)
            log_ratio = (weights * (chosen - chosen.detach())).mean()
            (-row.weight * row.advantage * log_ratio.exp()).backward()
        flat = torch.cat([p.grad.flatten() if p.grad is not None else p.new_zeros(p.numel())
                          for p in model.parameters()])  # fmt: skip
        gradients.append(flat.double() * len(prompts))
    return torch.stack(gradients).numpy()


@pytest.mark.world
def test_it_measures_what_autograd_says_of_each_prompt(checkpoints):
    rows = sequences(11)
    gradients = by_autograd(checkpoints["dense"], rows)
    mean = gradients.mean(0)
    variance = ((gradients - mean) ** 2).sum() / (len(gradients) - 1)
    signal = mean @ mean - variance / len(gradients)
    halves = gradients.reshape(2, 2, -1).mean(1)  # four prompts
    dense, fused = checkpoints["dense"], config_for(layout(), fuse_lm_head=True)
    cases = [(dense, config_for(layout()), [EXACT, 2]), (dense, fused, [EXACT])]
    (exact, two), (same,) = run_ranks(measured, 1, cases, rows)[0]
    assert same.snr == pytest.approx(exact.snr, rel=1e-3)
    assert (exact.prompts, exact.blocks) == (4, 4)
    assert exact.variance == pytest.approx(variance, rel=1e-4)
    assert exact.signal == pytest.approx(signal, rel=1e-3)
    assert exact.snr == pytest.approx(signal / variance, rel=1e-3)
    assert two.blocks == 2
    assert two.signal == pytest.approx(halves[0] @ halves[1], rel=1e-3)
    assert two.variance == pytest.approx(((halves[0] - halves[1]) ** 2).sum() * 4 / 4, rel=1e-4)


@given(
    st.integers(2, 12).flatmap(
        lambda prompts: st.tuples(
            st.just(prompts), st.integers(2, prompts), st.integers(0, 2**32 - 1), st.floats(0.01, 100)
        )
    )
)
def test_each_prompt_by_itself_is_the_sample_covariance(case):
    prompts, blocks, seed, scale = case
    rng = np.random.default_rng(seed)
    gradients = scale * rng.normal(size=(prompts, 5))
    total = gradients.mean(0)
    cuts = np.round(np.linspace(0, prompts, blocks + 1)).astype(int)
    parts = [gradients[a:b].sum(0) / prompts for a, b in pairwise(cuts)]
    noise = estimate_noise(np.diff(cuts).tolist(), [float(g @ g) for g in parts], float(total @ total))
    means = np.stack([g * prompts / m for g, m in zip(parts, np.diff(cuts), strict=True)])
    between = (np.diff(cuts)[:, None] * (means - total) ** 2).sum() / (blocks - 1)
    assert noise.variance == pytest.approx(between, rel=1e-6)
    if blocks == prompts:
        assert noise.variance == pytest.approx(np.trace(np.cov(gradients.T)), rel=1e-6)
    assert noise.snr * noise.variance == pytest.approx(noise.signal, rel=1e-6)


@pytest.mark.parametrize("sizes", [[1] * 7, [3, 4], [2, 2, 3]])
def test_any_blocks_estimate_variance_and_signal_without_bias(sizes):
    """This is tested over many draws of seven gradients with mean (1, 0, 0) and covariance of trace 6.75."""
    rng = np.random.default_rng(0)
    spread = np.array([2.0, 0.5, math.sqrt(2.5)])
    gradients = np.array([1.0, 0.0, 0.0]) + rng.normal(size=(20_000, 7, 3)) * spread
    parts = np.add.reduceat(gradients, np.cumsum([0, *sizes[:-1]]), axis=1) / 7
    norms, totals = (parts**2).sum(-1), (gradients.mean(1) ** 2).sum(-1)
    noise = [
        estimate_noise(sizes, own, total) for own, total in zip(norms.tolist(), totals.tolist(), strict=True)
    ]
    draws = [(own.variance, own.signal) for own in noise]
    variance, signal = np.mean(draws, axis=0)
    error = np.std(draws, axis=0) / math.sqrt(len(draws))
    assert abs(variance - (spread**2).sum()) < 4 * error[0]
    assert abs(signal - 1.0) < 4 * error[1]


@pytest.mark.world
@pytest.mark.slow
def test_every_layout_measures_the_same(checkpoints):
    """Each parameter counts once: TP shares matrices and repeats norms, EP spreads experts."""
    rows = sequences()
    dense, hybrid = checkpoints["dense"], checkpoints["next"]
    layouts = {
        1: [(dense, layout()), (hybrid, layout())],
        2: [
            (dense, layout(tp=2)),
            (dense, layout(pp=2)),
            (dense, layout()),
            (dense, layout(distributed_optimizer=True)),
            (hybrid, layout(tp=2, ep=2)),
            (hybrid, layout(ep=2)),
            (hybrid, layout(distributed_optimizer=True)),
        ],
    }
    expected = {}
    for size, cases in layouts.items():
        asked = [(hf_dir, config_for(chosen), [EXACT, 2]) for hf_dir, chosen in cases]
        per_rank = run_ranks(measured, size, asked, rows, timeout=240)
        assert all(found == per_rank[0] for found in per_rank)
        for (hf_dir, chosen), found in zip(cases, per_rank[0], strict=True):
            for noise, wanted in zip(found, expected.setdefault(hf_dir, found), strict=True):
                assert noise.variance == pytest.approx(wanted.variance, rel=2e-4), chosen
                assert noise.signal == pytest.approx(wanted.signal, rel=2e-3), chosen


def compare(trainer, rows, plain):
    config = replace(trainer.config, run=replace(trainer.config.run, gradient_meter_blocks=EXACT))
    return compare_with_gspo(trainer, planned.own_share(plan_measure, rows, config, plain))


def trained(world, hf_dir, rows, plain):
    """Weights and losses of two updates, each after a measurement and without, and the first measurement."""
    config = config_for(layout(), lr=1e-3, eps_adam=1e-8, num_steps_per_rollout=2)
    found, told = [], []
    for measures in (True, False):
        trainer, export, _ = open_trainer(world, hf_dir, config)
        losses = []
        for _ in range(2):
            if measures:
                told.append(compare(trainer, rows, plain))
            losses.append(planned.update(trainer, rows)["loss"])
        found.append((weights_of(export), losses))
        close_trainer()
    return *found, told[0]


@pytest.mark.world
@pytest.mark.parametrize("family", ["dense", pytest.param("next", marks=pytest.mark.slow)])
def test_training_does_not_notice_it(checkpoints, family):
    rows = sequences(8)
    plain = [row for row in rows if row.kind == "response"]
    (with_it, losses), (without, losses_without), told = run_ranks(
        trained, 1, checkpoints[family], rows, plain
    )[0]
    assert all(torch.equal(with_it[name], without[name]) for name in without)
    assert losses == losses_without
    assert next(iter(told)) == "gradient_snr"  # the scale-free figure comes first
    assert {"gspo_gradient_snr", "gradient_variance", "gspo_gradient_variance"} <= told.keys()
    assert told["gspo_gradient_variance"] != told["gradient_variance"]


def compared_with_itself(world, hf_dir, rows, settings):
    found = []
    for loss in settings:
        trainer, _, _ = open_trainer(world, hf_dir, config_for(layout(), **loss))
        found.append(compare(trainer, rows, rows))
        close_trainer()
    return found


@pytest.mark.world
def test_gspo_is_as_noisy_as_itself_and_importance_weights_and_clips_are_counted(checkpoints):
    rows = [row for row in sequences(8) if row.kind == "response"]
    settings = [{}, {"use_tis": True, "tis_clip": 1.5}, {"old_logprobs": "engine"}]
    found, *others = run_ranks(compared_with_itself, 1, checkpoints["dense"], rows, settings)[0]
    assert found["gspo_gradient_snr"] == found["gradient_snr"]
    for weighted in others:
        assert weighted["gspo_gradient_snr"] == found["gspo_gradient_snr"]
        assert weighted["gradient_snr"] != found["gradient_snr"]


def test_one_prompt_says_nothing():
    rows = [sequence([1], [2], advantage=1.0, weight=1.0, group=0)]
    share = plan_measure(rows, rows, config_for(layout()), 1, planned.cost).shares[0]
    assert share.own == []


def test_prompts_that_all_pull_alike_have_no_spread():
    noise = estimate_noise([1, 1], [0.25, 0.25], 1.0)  # g₁ = g₂
    assert noise.variance == 0
    assert noise.snr is None
    assert noise.signal == 1.0
    assert "gradient_snr" not in noise.metrics()
