"""The gradient meter: exact against autograd, the same under every layout, and no part of training."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ibpo.policy import gradient_meter as meter
from megatron_ibpo.policy.gradient_meter import compare_with_gspo, estimate_noise
from megatron_ibpo.policy.planning import plan_measure
from support import planned
from support.layouts import layout
from support.ranks import run_ranks
from support.train_sequences import sequences
from support.trainers import close_trainer, config_for, open_trainer, weights_of

EXACT = 1000  # blocks: more than there are prompts


def share_of(trainer, rows, plain, blocks=EXACT):
    config = replace(trainer.config, run=replace(trainer.config.run, gradient_meter_blocks=blocks))
    return planned.own_share(plan_measure, rows, config, plain)


def measured(world, cases, rows):
    """The noise by each prompt and by two blocks, for each (checkpoint, configuration)."""
    found = []
    for hf_dir, config in cases:
        trainer, _, _ = open_trainer(world, hf_dir, config)
        shares = [meter.as_sampled(share_of(trainer, rows, rows, blocks).trained) for blocks in (EXACT, 2)]
        objective = trainer.objective("sequence-mean")
        found.append([meter.measure_gradient(trainer, own, objective) for own in shares])
        close_trainer()
    return found


@pytest.mark.world
def test_the_gradient_meter_matches_autograd_per_prompt(checkpoints):
    """The gradient of GSPO at ratio 1, by transformers and autograd; its mean is scaled to the step's."""
    from transformers import AutoModelForCausalLM

    rows, dense = sequences(11), checkpoints["dense"]
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    by_prompt = []
    for prompt in sorted({row.group for row in rows}):
        model.zero_grad()
        for row in (own for own in rows if own.group == prompt):
            ids = torch.tensor([[*row.prompt_token_ids.tolist(), *row.response_token_ids.tolist()]])
            first = len(row.prompt_token_ids)
            logprobs = model(ids).logits[0, first - 1 : -1].log_softmax(-1)
            chosen = logprobs.gather(1, ids[0, first:, None])[:, 0]
            weights = torch.tensor(1.0 if row.token_weights is None else row.token_weights).float()
            log_ratio = (weights * (chosen - chosen.detach())).mean()
            (-row.weight * row.advantage * log_ratio.exp()).backward()
        parts = (torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())
        by_prompt.append(torch.cat([part.flatten().double() for part in parts]))
    gradients = 4 * torch.stack(by_prompt).numpy()  # four prompts
    mean, halves = gradients.mean(0), gradients.reshape(2, 2, -1).mean(1)
    variance = ((gradients - mean) ** 2).sum() / 3
    signal = mean @ mean - variance / 4
    configs = [config_for(layout(), fuse_lm_head=fused) for fused in (False, True)]
    (exact, two), (same, _) = run_ranks(measured, 1, [(dense, config) for config in configs], rows)[0]
    assert same.snr == pytest.approx(exact.snr, rel=1e-3)
    assert (exact.prompts, exact.blocks, two.blocks) == (4, 4, 2)
    assert exact.variance == pytest.approx(variance, rel=1e-4)
    assert (exact.signal, exact.snr) == pytest.approx((signal, signal / variance), rel=1e-3)
    assert two.signal == pytest.approx(halves[0] @ halves[1], rel=1e-3)
    assert two.variance == pytest.approx(((halves[0] - halves[1]) ** 2).sum() * 4 / 4, rel=1e-4)


@given(st.integers(2, 12), st.data(), st.integers(0, 2**32 - 1), st.floats(0.01, 100))
def test_each_prompt_by_itself_is_the_sample_covariance(prompts, data, seed, scale):
    blocks = data.draw(st.integers(2, prompts))
    gradients = scale * np.random.default_rng(seed).normal(size=(prompts, 5))
    total = gradients.mean(0)
    cuts = np.round(np.linspace(0, prompts, blocks + 1)).astype(int)
    sizes, parts = np.diff(cuts), [gradients[a:b].sum(0) / prompts for a, b in pairwise(cuts)]
    noise = estimate_noise(sizes.tolist(), [float(g @ g) for g in parts], float(total @ total))
    means = np.stack([g * prompts / size for g, size in zip(parts, sizes, strict=True)])
    between = (sizes[:, None] * (means - total) ** 2).sum() / (blocks - 1)
    assert noise.variance == pytest.approx(between, rel=1e-6)
    if blocks == prompts:
        assert noise.variance == pytest.approx(np.trace(np.cov(gradients.T)), rel=1e-6)
    signal = total @ total - between / prompts  # without what the spread adds to the mean's length
    assert noise.signal == pytest.approx(signal, rel=1e-6, abs=1e-6 * scale**2)
    assert noise.snr * noise.variance == pytest.approx(noise.signal, rel=1e-6)


@pytest.mark.world
@pytest.mark.slow
def test_every_layout_measures_the_same(checkpoints):
    """Each parameter counts once: TP shares matrices and repeats norms, EP spreads experts."""
    rows, expected, sharded = sequences(), {}, layout(distributed_optimizer=True)
    dense = [layout(tp=2), layout(pp=2), layout()]
    two = {"dense": dense, "next": [layout(tp=2, ep=2), layout(ep=2), sharded]}
    for size, by_model in ((1, {"dense": [layout()], "next": [layout()]}), (2, two)):
        cases = [(name, own) for name, several in by_model.items() for own in several]
        asked = [(checkpoints[name], config_for(own)) for name, own in cases]
        per_rank = run_ranks(measured, size, asked, rows, timeout=240)
        assert all(found == per_rank[0] for found in per_rank), (size, by_model)
        for (name, chosen), found in zip(cases, per_rank[0], strict=True):
            for noise, wanted in zip(found, expected.setdefault(name, found), strict=True):
                assert noise.variance == pytest.approx(wanted.variance, rel=2e-4), chosen
                assert noise.signal == pytest.approx(wanted.signal, rel=2e-3), chosen


@pytest.mark.world(1)
def test_training_does_not_notice_it(world, checkpoints):
    rows, found = sequences(8), []
    plain = [row for row in rows if row.kind == "response"]
    config = config_for(layout(), lr=1e-3, eps_adam=1e-8, num_steps_per_rollout=2)
    for measures in (True, False):
        trainer, export, _ = open_trainer(world, checkpoints["next"], config)
        losses = []
        for _ in range(2):
            if measures:
                told = compare_with_gspo(trainer, share_of(trainer, rows, plain))
            losses.append(planned.update(trainer, rows)["loss"])
        found.append((losses, weights_of(export)))
        close_trainer()
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert told["gspo_gradient_variance"] != told["gradient_variance"]


@pytest.mark.world(1)
def test_the_gspo_baseline_is_the_same_beside_any_loss(world, checkpoints):
    rows, found = [row for row in sequences(8) if row.kind == "response"], []
    for loss in ({}, {"use_tis": True, "tis_clip": 1.5}, {"old_logprobs": "engine"}):
        trainer, _, _ = open_trainer(world, checkpoints["dense"], config_for(layout(), **loss))
        found.append(compare_with_gspo(trainer, share_of(trainer, rows, rows)))
        close_trainer()
    itself = found[0]["gradient_snr"]
    assert [own["gspo_gradient_snr"] for own in found] == [itself] * 3
    assert itself not in [own["gradient_snr"] for own in found[1:]]


def test_prompts_that_all_pull_alike_have_no_spread():
    noise = estimate_noise([1, 1], [0.25, 0.25], 1.0)  # g₁ = g₂
    assert (noise.variance, noise.snr, noise.signal) == (0, None, 1.0)
    assert "gradient_snr" not in noise.metrics()
