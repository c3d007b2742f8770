"""The reference loss: golden values by hand, formulas as published, off-policy sequences, edge rows."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ibpo.config import Config, LossConfig
from megatron_ibpo.loss import (
    VARIANTS,
    LossRows,
    choose_backend,
    make_objective,
    packed_logprobs,
    weighted_value,
)
from megatron_ibpo.loss import logprobs as logprobs_module
from megatron_ibpo.loss.objective import KL_ESTIMATORS
from megatron_ibpo.loss.segments import checked_rows, segment_loss
from megatron_ibpo.policy.importance_correction import correct
from megatron_ibpo.policy.packing import lay_out, pack
from megatron_ibpo.policy.planning import MicroBatch
from megatron_ibpo.run.settings import check_settings
from support.credit_cases import algorithm
from support.linear_cases import FUSED, batch_of, options_for, plain
from support.loss_calls import loss_of_head, loss_of_hidden, loss_of_logits
from support.paths import ROOT
from support.train_sequences import packed, sequence

WIDE = {"eps_low": 0.5, "eps_high": 0.5}
HALF = math.log(0.5)


def random_batch(seed=0, lengths=(3, 5, 4), prompt=2, vocab=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    rows = sum(lengths) + prompt * len(lengths)
    return {
        "logits_NV": torch.randn(rows, vocab, generator=generator, dtype=dtype),
        "targets_N": torch.randint(vocab, (rows,), generator=generator),
        "old_logprobs_N": torch.randn(rows, generator=generator, dtype=dtype) * 0.1 - 2.4,
        "response_mask_N": torch.cat([torch.tensor([0.0] * prompt + [1.0] * n) for n in lengths]),
        "cu_seqlens": torch.tensor([0, *[n + prompt for n in lengths]]).cumsum(0).int(),
        "advantages": torch.randn(len(lengths), generator=generator, dtype=dtype),
    }


def loss_and_gradient(batch, **options):
    logits = batch["logits_NV"].clone().requires_grad_()
    loss, stats = loss_of_logits(**{**batch, "logits_NV": logits}, **options)
    loss.backward()
    return loss.detach(), logits.grad, stats


@pytest.mark.parametrize("variant", ["gspo", "grpo"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_gradients_equal_finite_differences(variant, kl):
    """With a penalty and temperatures; the published formulas below have the gradients of all variants."""
    batch = random_batch(lengths=(2, 3, 1), prompt=1, vocab=5)
    now = packed_logprobs(batch["logits_NV"], batch["targets_N"])[0]
    batch |= {"old_logprobs_N": now + 0.03 * torch.linspace(-1, 1, 9), "ref_logprobs_N": now + 0.4}
    batch["temperature"] = torch.tensor([0.7, 1.0, 1.3], dtype=torch.float64)
    options = options_for(variant) | {"kl": kl, "kl_coef": 0.7}
    logits = batch.pop("logits_NV").requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss_of_logits(logits_NV=x, **batch, **options)[0], logits)


TWO_AND_ONE = {
    "targets_N": torch.tensor([0, 1, 0]), "response_mask_N": torch.ones(3),
    "cu_seqlens": torch.tensor([0, 2, 3], dtype=torch.int32),
}  # fmt: skip


def two_sequences(ratios, advantages, **options):
    """(loss, gradient of each log-prob, stats) of sequences of two and one tokens with the given ratios.

    Two words of equal logits: every log-prob is log ½, and its gradient is twice that of its logit."""
    logits = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    moved = {"old_logprobs_N": HALF - torch.tensor(ratios).double().log(), "logits_NV": logits}
    advantages = torch.tensor(advantages, dtype=torch.float64)
    loss, stats = loss_of_logits(**TWO_AND_ONE, **moved, advantages=advantages, **options)
    loss.backward()
    own = logits.grad.gather(1, torch.tensor([[0], [1], [0]])).squeeze(1)
    return loss.item(), (2 * own).tolist(), stats


CLIP = {"eps_low": 0.2, "eps_high": 0.25}
S = 1.35**0.5
OF_GSPO = (-S / 2, -S / 2, 0)
OF_GMPO = {"eps_low": -math.log(0.9), "eps_high": math.log(1.1)}
OF_SAPO = {"tau_pos": 1.0, "tau_neg": 2.0}
GOLDEN = {
    # ratios 1.5 and .9 of the first sequence (A = 2), .5 of the second (A = -1); values before weights
    # sequence ratios √1.35 = 1.1619 and .5, cut at .8 for A = -1
    "gspo": (CLIP, None, (-2 * S + 0.8) / 2, OF_GSPO),
    "gspo-token": (CLIP, None, (-2 * S + 0.8) / 2, OF_GSPO),
    # 1.5 cut at 1.25, .5 cut at .8
    "grpo": (CLIP, None, (-(1.25 + 0.9) + 0.8) / 2, (0, -0.9 / 2, 0)),
    "ppo-clip": (CLIP, None, (-2 * (1.25 + 0.9) + 0.8) / 3, (0, -2 * 0.9 / 3, 0)),
    "dapo": (CLIP, None, (-2 * (1.25 + 0.9) + 0.8) / 3, (0, -2 * 0.9 / 3, 0)),
    # a constant of 10 tokens for each sequence
    "dr-grpo": (CLIP, 10, (-2 * (1.25 + 0.9) + 0.8) / 20, (0, -2 * 0.9 / 20, 0)),
    # at most 1.5·|A| for A < 0, where the third ratio is 3
    "dual-clip": ({**CLIP, "bound": 1.5}, None, (-2 * (1.25 + 0.9) + 1.5) / 3, (0, -2 * 0.9 / 3, 0)),
    "gspo-dual-clip": ({**CLIP, "bound": 1.5}, None, (-2 * S + 1.5) / 2, OF_GSPO),
    # every log π is log ½; no gradient is lost
    "cispo": (CLIP, None, -HALF * (2 * (1.25 + 0.9) - 0.8) / 3, (-2 * 1.25 / 3, -2 * 0.9 / 3, 0.8 / 3)),
    "nll": ({}, None, -HALF * (2 * 2 - 1) / 3, (-2 / 3, -2 / 3, 1 / 3)),
    # log-ratios cut at ln 1.1 above for A > 0, at ln .9 below for A < 0: √(1.1·.9) and .9
    "gmpo": (OF_GMPO, None, (-2 * 0.99**0.5 + 0.9) / 2, (0, -(0.99**0.5) / 2, 0)),
    # gates: 4σ(½) = 2.48984 and 4σ(-.1) = 1.90008 at τ 1, 2σ(-1) = .53788 at τ 2; slopes 4σ(1-σ)r
    "sapo": (OF_SAPO, None, (-4.3899205 + 0.5378828) / 2, (-1.4100223 / 2, -0.8977540 / 2, 0.3932239 / 2)),
}


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_every_variant_by_hand(variant):
    params, aggregation, expected, gradient = GOLDEN[variant]
    options = {"variant": variant, "params": params, "aggregation": aggregation}
    last = 3.0 if "bound" in params else 0.5
    loss, found, stats = two_sequences((1.5, 0.9, last), (2.0, -1.0), **options)
    assert stats.mean_log_ratio_S.tolist() == pytest.approx([math.log(S), math.log(last)])
    assert stats.entropy_N.tolist() == pytest.approx([math.log(2)] * 3)
    assert variant != "gspo" or stats.clipped.tolist() == [False, True]
    assert loss == pytest.approx(expected, abs=1e-6)
    assert found == pytest.approx(gradient, abs=1e-6)


# Every variant against its formula as published: written from the papers, over padded rectangles [B, T] of
# log-probs, and without anything of megatron_ibpo.loss
LENGTHS = (3, 7, 1, 5, 4, 6) * 3
LONGEST = 9.0  # tokens that a response may have, for Dr. GRPO
TOKEN = {"eps_low": 0.2, "eps_high": 0.28}
SEQUENCE = {"eps_low": 0.04, "eps_high": 0.06}


def clipped(r, a, p):
    """PPO, arXiv 1707.06347, eq. 7: min(rA, clip(r, 1 - ε, 1 + ε)A)."""
    return torch.min(r * a, r.clamp(1 - p["eps_low"], 1 + p["eps_high"]) * a)


def dual(r, a, p):
    """Dual-clip PPO, arXiv 1912.09729, eq. 5: max(min(rA, clip(r)A), cA) for A < 0."""
    return torch.where(a < 0, torch.max(clipped(r, a, p), p["bound"] * a), clipped(r, a, p))


def by_sequence(x_BT, mask_BT):
    """GRPO, arXiv 2402.03300, eq. 3: 1/G Σ_i 1/|o_i| Σ_t."""
    return ((x_BT * mask_BT).sum(1) / mask_BT.sum(1)).mean()


def by_token(x_BT, mask_BT):
    """DAPO, arXiv 2503.14476, eq. 8: 1/Σ|o_i| Σ_i Σ_t."""
    return (x_BT * mask_BT).sum() / mask_BT.sum()


def sapo(logp, r, s, a, mask, p):
    """SAPO, arXiv 2511.20347, eq. 5 and 6: f(r) = σ(τ(r - 1)) 4/τ, with a τ for each sign of A."""
    tau = torch.where(a > 0, p["tau_pos"], torch.full_like(a, p["tau_neg"]))
    return by_sequence(4 / tau / (1 + (-tau * (r - 1)).exp()) * a, mask)


def gmpo(logp, r, s, a, mask, p):
    """GMPO, arXiv 2507.20673, eq. 4: the geometric mean of min(r^sgn, clip(r)^sgn)^sgn times A, clipped
    between e^-ε_low and e^ε_high."""
    bounded = r.clamp(math.exp(-p["eps_low"]), math.exp(p["eps_high"]))
    kept = torch.min(r ** a.sign(), bounded ** a.sign()) ** a.sign()
    return (a[:, 0] * (torch.where(mask > 0, kept, 1.0).prod(1) ** (1 / mask.sum(1)))).mean()


def dapo(logp, r, s, a, mask, p):
    return by_token(clipped(r, a, p), mask)


def gspo_token(logp, r, s, a, mask, p):
    """GSPO, arXiv 2507.18071, eq. 13 and 14: s_it = sg[s_i] π_t/sg[π_t]."""
    return by_sequence(clipped(s.detach() * (logp - logp.detach()).exp(), a, p), mask)


# variant → parameters, and the objective of log-probs and ratios [B, T], sequences' ratios and advantages
# [B, 1], the mask [B, T] and the parameters
OBJECTIVES = {
    "gspo": (SEQUENCE, lambda logp, r, s, a, mask, p: clipped(s, a, p).mean()),
    "gspo-token": (SEQUENCE, gspo_token),
    "gspo-dual-clip": (SEQUENCE | {"bound": 1.1}, lambda logp, r, s, a, mask, p: dual(s, a, p).mean()),
    "grpo": (TOKEN, lambda logp, r, s, a, mask, p: by_sequence(clipped(r, a, p), mask)),
    "ppo-clip": (TOKEN, dapo),
    "dual-clip": (TOKEN | {"bound": 1.3}, lambda logp, r, s, a, mask, p: by_token(dual(r, a, p), mask)),
    "dapo": (TOKEN, dapo),
    # arXiv 2503.20783: the sum over tokens over a constant, and no std (credit's business)
    "dr-grpo": (TOKEN, lambda logp, r, s, a, mask, p: (clipped(r, a, p) * mask).sum(1).mean() / LONGEST),
    # MiniMax-M1, arXiv 2506.13585, eq. 4 and 5: sg(clip(r)) A log π, over all tokens
    "cispo": (
        {"eps_low": 1.0, "eps_high": 0.28},
        lambda logp, r, s, a, mask, p: by_token(r.clamp(max=1 + p["eps_high"]).detach() * a * logp, mask),
    ),
    "sapo": ({"tau_pos": 1.0, "tau_neg": 1.05}, sapo),
    "gmpo": ({"eps_low": 0.2, "eps_high": 0.25}, gmpo),
    # the mean log-prob of all tokens, here weighted by A
    "nll": ({}, lambda logp, r, s, a, mask, p: by_token(a * logp, mask)),
}


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_values_and_gradients_match_the_publications(variant):
    """Responses without prompts; ratios mostly between e^-.7 and e^.7, advantages of both signs."""

    def padded(values_N):
        return torch.nn.utils.rnn.pad_sequence(values_N.split(LENGTHS), batch_first=True)

    params, objective = OBJECTIVES[variant]
    generator = torch.Generator().manual_seed(0)
    rows, vocab = sum(LENGTHS), 13
    logits = torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (rows,), generator=generator)
    now = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    old = now + 0.35 * torch.randn(rows, generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)

    ours = logits.clone().requires_grad_()
    loss, stats = loss_of_logits(
        logits_NV=ours, targets_N=targets, old_logprobs_N=old, response_mask_N=torch.ones(rows),
        cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0).int(), advantages=advantages, variant=variant,
        params=params, aggregation=LONGEST if variant == "dr-grpo" else None,
    )  # fmt: skip
    loss.backward()
    assert ours.grad.abs().max() > 1e-3
    assert stats.clipped.unique().tolist() == ([False] if variant in ("sapo", "nll") else [False, True])

    theirs = logits.clone().requires_grad_()
    logp = padded(theirs.log_softmax(-1).gather(1, targets[:, None]).squeeze(1))
    mask, log_r = padded(torch.ones(rows, dtype=torch.float64)), logp - padded(old)
    # GSPO, arXiv 2507.18071, eq. 7: log s_i = 1/|y_i| Σ_t log(π/π_old)
    s = ((log_r * mask).sum(1) / mask.sum(1)).exp()[:, None]
    expected = -objective(logp, log_r.exp(), s, advantages[:, None], mask, params)
    expected.backward()
    assert abs(loss.item() - expected.item()) < 1e-14
    assert (ours.grad - theirs.grad).abs().max() < 1e-14


def test_advantages_of_tokens_give_gspo_token_its_own_clips():
    """s = √1.35 is cut at 1.1 where the token's advantage is positive, and nowhere else."""
    options = {"variant": "gspo-token", "params": {"eps_low": 0.2, "eps_high": 0.1}}
    loss, gradient, stats = two_sequences((1.5, 0.9, 1.0), (1.0, -2.0, 0.0), **options)
    assert loss == pytest.approx((-1.1 + 2 * S) / 2 / 2)
    assert gradient == pytest.approx([0, 2 * S / 2 / 2, 0])
    assert stats.clipped.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("kl", "each", "slope"),
    [("k1", -HALF, 1.0), ("k2", HALF**2 / 2, -HALF), ("k3", 0.5 - 1 - HALF, 1 - 0.5)],
)
def test_the_penalty_by_hand(kl, each, slope):
    """log π - log π_ref = ln 2 everywhere; no advantage, and weights of tokens do not scale it. Without a
    coefficient it is measured and has no gradient."""
    penalty = {"kl": kl, "ref_logprobs_N": torch.full((3,), math.log(0.25), dtype=torch.float64)}
    weights = torch.tensor([0.0, 1.0, 5.0])
    for coefficient in (0.3, 0.0):
        penalty["kl_coef"] = coefficient
        loss, gradient, stats = two_sequences((1.0,) * 3, (0.0,) * 2, token_weights_N=weights, **penalty)
        assert loss == pytest.approx(coefficient * each)
        assert gradient == pytest.approx([coefficient * slope / 4] * 2 + [coefficient * slope / 2])
        assert stats.kl_N.tolist() == pytest.approx([each] * 3), coefficient


def k3_and_slope(gaps):
    gaps = torch.tensor(gaps, dtype=torch.float64, requires_grad=True)
    values = KL_ESTIMATORS["k3"](gaps)
    return values.detach(), torch.autograd.grad(values.sum(), gaps)[0]


def test_k3_is_exact_up_to_five_nats_then_linear():
    """So the slope is bounded, falls nowhere to 0, and value and slope have no jump."""
    near = torch.linspace(-5, 60, 66).tolist()
    values, slopes = k3_and_slope(near)
    assert values.tolist() == pytest.approx([math.exp(-d) - 1 + d for d in near])
    assert slopes.tolist() == pytest.approx([1 - math.exp(-d) for d in near], abs=1e-15)
    values, slopes = k3_and_slope([-5 - 1e-9, -6.0, -60.0, -800.0, -1e4, -math.inf])
    steepest = math.exp(5) - 1
    assert slopes.tolist() == pytest.approx([-steepest] * 6)
    assert values.tolist()[:2] == pytest.approx([math.exp(5) - 6, math.exp(5) - 6 + steepest])
    assert values[-2] == pytest.approx(math.exp(5) - 6 + steepest * (1e4 - 5))
    assert values[-1] == math.inf, "and no NaN"


@pytest.mark.parametrize("loss_of", [loss_of_logits, loss_of_head, loss_of_hidden])
def test_a_token_far_from_its_reference_has_a_bounded_gradient(loss_of):
    """The gap of 60 nats of one token, in a group without advantage: a gradient of at most 147 of a tenth."""
    hidden = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    held = {"ref_logprobs_N": torch.tensor([60.0, HALF, HALF]).double(), "kl_coef": 0.1}
    of_head = {"hidden_NH": hidden, "weight_VH": torch.eye(2, dtype=torch.float64)}
    head = {"logits_NV": hidden} if loss_of is loss_of_logits else of_head
    loss, _ = loss_of(**TWO_AND_ONE, **head, **held, advantages=torch.zeros(2).double())
    loss.backward()
    assert 0.1 * 147 / 4 * 0.5 < hidden.grad.abs().max() <= 0.1 * 148 / 4 * 0.5
    assert hidden.grad[1:].abs().max() < 1e-9


@pytest.mark.parametrize("variant", ["gspo", "grpo"])
@pytest.mark.parametrize(
    ("aggregation", "share"),
    [("sequence-mean", (0.4 / 2, 0.6)), ("token-mean", (0.4 / 1.4, 0.6 / 1.4)), (5, (0.08, 0.12))],
)
def test_aggregation_by_hand(variant, aggregation, share):
    """Weights .4 and .6 of sequences of two and one tokens; the weighted mean length is 1.4."""
    options = {"sequence_weights_S": torch.tensor([0.4, 0.6], dtype=torch.float64), "variant": variant}
    loss, gradient, _ = two_sequences((1.0, 1.0, 1.0), (1.0, -2.0), aggregation=aggregation, **options)
    assert loss == pytest.approx(-2 * share[0] + 2 * share[1])
    assert gradient == pytest.approx([-share[0], -share[0], 2 * share[1]])


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_the_reported_loss_has_the_importance_weights_of_its_tokens(variant):
    """Weights of ½ and 1½ inside the first sequence, 2 in the second. Where tokens have terms of their own
    these are weighted, else the sequence's loss by the mean of its weights, here 1 and 2."""
    params, aggregation, *_ = GOLDEN[variant]
    advantages, ratios = torch.tensor([2.0, -1.0]).double(), torch.tensor([1.5, 0.9, 0.5]).double()
    rows = LossRows(**TWO_AND_ONE, advantages=advantages, old_logprobs_N=HALF - ratios.log())
    objective = make_objective(variant, params, aggregation=aggregation)

    def value(*weights):
        now = torch.full((3,), HALF, dtype=torch.float64)
        return weighted_value(now, rows, objective, torch.tensor(weights)).item()

    alone = value(1.0, 0.0, 0.0), value(0.0, 1.0, 0.0), value(0.0, 0.0, 1.0)
    options = {"variant": variant, "params": params, "aggregation": aggregation}
    assert value(1.0, 1.0, 1.0) == pytest.approx(two_sequences((1.5, 0.9, 0.5), (2.0, -1.0), **options)[0])
    assert value(0.5, 1.5, 2.0) == pytest.approx(0.5 * alone[0] + 1.5 * alone[1] + 2 * alone[2])
    if variant in (by_hand := {"gspo": [-S, -S, 0.8], "grpo": [-1.25, -0.9, 0.8]}):
        assert [a * 2 for a in alone] == pytest.approx(by_hand[variant])


def test_chunks_in_place_gradients_padding_and_unit_weights_change_nothing(monkeypatch):
    batch = random_batch()
    loss, gradient, stats = loss_and_gradient(batch, params=WIDE)
    padding = torch.full((len(batch["logits_NV"]), 5), 50.0, dtype=torch.float64)
    padded = {**batch, "logits_NV": torch.cat([batch["logits_NV"], padding], 1)}
    found = [loss_and_gradient(batch, params=WIDE, token_weights_N=torch.ones(18))]
    monkeypatch.setattr(logprobs_module, "CHUNK_BYTES", 4 * 11 * 2)
    found += [loss_and_gradient(batch, params=WIDE, inplace=inplace) for inplace in (False, True)]
    found += [loss_and_gradient(padded, params=WIDE, vocab_range=(0, 11))]
    assert not found[-1][1][:, 11:].any()
    for same_loss, same_gradient, _ in found:
        assert torch.equal(loss, same_loss)
        assert torch.equal(gradient, same_gradient[:, :11])
    weights = torch.rand(18, dtype=torch.float64)  # scale the gradient and not the value
    same_loss, weighted, same = loss_and_gradient(batch, params=WIDE, token_weights_N=weights)
    assert torch.equal(loss, same_loss)
    assert torch.equal(stats.mean_log_ratio_S, same.mean_log_ratio_S)
    torch.testing.assert_close(weighted, gradient * weights[:, None])


def with_holes(batch):
    """(a batch of 4, 1 and 6 rows with a row inserted after four of them, masked and full of rubbish: what a
    tool wrote; which rows these are)"""
    order = torch.tensor([0, 1, 1, 2, 3, 3, 4, 5, 6, 7, 7, 8, 8, 9, 10])
    inserted = torch.cat([torch.tensor([False]), order.diff() == 0])
    spread = batch | {"cu_seqlens": torch.tensor([0, 6, 7, 15], dtype=torch.int32)}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and len(value) == 11:
            spread[name] = value[order]
            if name not in ("targets_N", "logits_NV"):
                spread[name][inserted] = 0.0 if name == "response_mask_N" else math.nan
    return spread, inserted


def loss_of_identity_head(batch):
    """(loss, gradient by hidden states whose LM head is the identity, stats)"""
    rest = dict(batch)
    hidden = rest.pop("logits_NV").clone().requires_grad_()
    loss, stats = loss_of_hidden(hidden_NH=hidden, weight_VH=torch.eye(11).double(), chunk=3, **rest)
    loss.backward()
    return loss.detach(), hidden.grad, stats


BOTH_HEADS: list[tuple[str, Any]] = [(variant, loss_and_gradient) for variant in sorted(VARIANTS)]
BOTH_HEADS += [(variant, loss_of_identity_head) for variant in FUSED]


@pytest.mark.parametrize(("variant", "result"), BOTH_HEADS)
def test_masked_tokens_inside_a_response_count_for_nothing(variant, result):
    """Ratio, length, loss, KL and gradient: in multi-turn responses stand tokens that tools wrote."""
    batch = random_batch(lengths=(4, 1, 6), prompt=0) | options_for(variant)
    now = packed_logprobs(batch["logits_NV"], batch["targets_N"])[0]
    batch["token_weights_N"] = torch.linspace(0.1, 1, 11, dtype=torch.float64)
    batch |= {"ref_logprobs_N": now - 0.3, "kl_coef": 0.2, "old_logprobs_N": now - 0.05}
    if VARIANTS[variant].takes_token_advantages:
        batch["advantages"] = torch.linspace(-1, 1, 11, dtype=torch.float64)
    holed, is_hole = with_holes(batch)
    loss, gradient, stats = result(batch)
    holed_loss, holed_gradient, holed_stats = result(holed)
    torch.testing.assert_close(holed_loss, loss)
    torch.testing.assert_close(holed_gradient[~is_hole], gradient)
    assert not holed_gradient[is_hole].any()
    for name, value in vars(stats).items():
        found = getattr(holed_stats, name)
        if len(found) == len(is_hole):
            assert not found[is_hole].any(), (name, value)
            found = found[~is_hole]
        torch.testing.assert_close(found, value)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_extreme_ratios_give_no_nan(variant):
    for advantage, offset in product((-1.0, 0.0, 1.0), (-1e4, -900.0, 900.0, 1e4)):
        batch = random_batch(dtype=torch.float32)
        batch["old_logprobs_N"] = batch["old_logprobs_N"] - offset
        batch["advantages"] = torch.full((3,), advantage)
        loss, gradient, _ = loss_and_gradient(batch, **options_for(variant))
        assert loss.isfinite(), (advantage, offset)
        assert gradient.isfinite().all(), (advantage, offset)
        if advantage == 0:
            assert loss == 0, (advantage, offset)
            assert not gradient.any(), (advantage, offset)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_token_of_probability_0_gives_no_nan(variant):
    """Sequences of 2, 3 and 1 tokens at ratio 1, but for the fourth token, whose log-prob or old log-prob is
    -inf. Its sequence has ratio 0: s = exp(-inf) = 0, which for A < 0 is cut at 1 - .1. GSPO and its token
    form agree, as wherever advantages do not differ inside a sequence; no gradient comes of it."""
    rows: dict[str, Any] = {
        "targets_N": torch.zeros(6, dtype=torch.int64), "response_mask_N": torch.ones(6),
        "cu_seqlens": torch.tensor([0, 2, 5, 6], dtype=torch.int32),
    }  # fmt: skip
    own, weights_N = options_for(variant), torch.linspace(0, 2, 6, dtype=torch.float64)
    cases = product((-1.0, 0.0, 1.0), (None, weights_N), (False, True), (own, own | {"params": {}}))
    for advantage, weights, old, options in cases:
        now, before = torch.full((2, 6), -1.0, dtype=torch.float64)
        (before if old else now)[3] = -torch.inf
        rows |= {"old_logprobs_N": before, "token_weights_N": weights}
        rows["advantages"] = torch.full((3,), advantage, dtype=torch.float64)
        objective, now = make_objective(**options), now.clone().requires_grad_()
        loss, ratios, *_ = segment_loss(now, checked_rows(LossRows(**rows), 6, objective), objective)
        loss.backward()
        assert not loss.isnan(), (advantage, weights, old, options)
        assert now.grad.isfinite().all(), (advantage, weights, old, options)
        assert ratios.tolist() == [0, math.inf if old else -math.inf, 0]
        if variant in ("gspo", "gspo-token") and options is own and weights is None and not old and advantage:
            assert loss.item() == pytest.approx(-2 / 3 if advantage > 0 else (2 + 0.9) / 3)
            slope = -advantage / 6
            assert now.grad.tolist() == pytest.approx([slope, slope, 0, 0, 0, 2 * slope]), (
                advantage,
                weights,
                old,
                options,
            )


def two_tokens(advantage=2.0, **given):
    """(loss, slopes by the first logits, stats) of a sequence of two response tokens with the probabilities
    .1 and .4, of a vocabulary of two."""
    logits = torch.tensor([[0.1, 0.9], [0.4, 0.6]], dtype=torch.float64).log().requires_grad_()
    loss, stats = loss_of_logits(
        logits_NV=logits, targets_N=torch.zeros(2, dtype=torch.int64), response_mask_N=torch.ones(2),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32), sequence_weights_S=torch.tensor([0.5]).double(),
        off_policy_S=torch.tensor([True]), advantages=torch.tensor([advantage]).double(), **given,
    )  # fmt: skip
    loss.backward()
    return loss.item(), logits.grad[:, 0].tolist(), stats


@pytest.mark.parametrize("variant", ["gspo", "gspo-token", "grpo", "gmpo", "cispo"])
def test_the_shaped_surrogate_by_hand(variant):
    """Probabilities .1 and .4, A = 2, weight ½: f = .1/.2 and .4/.5, so the loss is -½·2·(.5 + .8)/2 = -.65.
    Its derivative by log p is -½·2/2·γp/(p + γ)² = -½·.25 and -½·.16, by the logit that times 1 - p."""
    loss, slopes, stats = two_tokens(variant=variant, aggregation="sequence-mean")
    assert loss == pytest.approx(-0.65)
    assert slopes == pytest.approx([-0.125 * 0.9, -0.08 * 0.6])
    assert not stats.clipped.any()


def test_token_weights_scale_the_surrogates_gradient_unclipped():
    loss, slopes, _ = two_tokens(token_weights_N=torch.tensor([0.5, 0.0]).double())
    assert (loss, slopes) == (pytest.approx(-0.65), pytest.approx([-0.0625 * 0.9, 0.0]))
    assert two_tokens(advantage=0.0)[:2] == (0.0, [0.0, 0.0])
    # old log-probs far off: the variant's ratio would be clipped, the shaped surrogate has none
    loss, slopes, _ = two_tokens(old_logprobs_N=torch.tensor([-9.0, -9.0]).double())
    assert (loss, slopes) == (pytest.approx(-0.65), pytest.approx([-0.1125, -0.048]))


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_mixed_sequences_have_the_sum_of_both_kinds_of_loss(variant):
    batch = batch_of((3, 6, 2, 4))
    batch["advantages"][1] = 0.7
    kinds, everything = torch.tensor([False, True, False, True]), torch.ones(4, dtype=torch.bool)

    def loss_of(chosen, off_policy):
        weights = torch.where(chosen, batch["sequence_weights_S"], 0.0)
        chosen_batch = batch | {"sequence_weights_S": weights}
        return plain(chosen_batch, off_policy_S=off_policy, variant=variant, aggregation=5.0)[0]

    mixed = loss_of(everything, kinds)
    torch.testing.assert_close(mixed, loss_of(~kinds, None) + loss_of(kinds, everything))


def test_the_engines_log_probs_are_of_the_long_prompt():
    """So importance corrections leave off-policy sequences alone, rows that are compared with the engine
    leave them out, and the engine's cannot be the old ones. Ratios 5 and 5 would be cut to 2."""
    arrays = replace(packed([5.0, 5.0], [5.0, 5.0]), off_policy_S=np.array([False, True]))
    corrected, found = correct(arrays, LossConfig(use_tis=True, tis_clip=2.0))
    assert corrected.token_weights_R.tolist() == [2.0, 2.0, 1.0, 1.0]
    assert [own.weight for own in found] == [4.0, 2.0]

    rows = [sequence([7, 8], [3, 4], advantage=1.0, weight=1.0, group=0, off_policy=n == 1) for n in range(2)]
    mixed, plainly = (
        lay_out(pack(MicroBatch((0, 1), tuple(own))), multiple=4, device=torch.device("cpu"))
        for own in (rows, [replace(row, off_policy=False) for row in rows])
    )
    assert mixed.rows.off_policy_S.tolist() == [False, True, False]  # the last is padding
    assert mixed.loss_rows().tolist() == [1, 2, 4, 5]
    assert mixed.compared_rows_R.tolist() == [1, 2]
    assert plainly.rows.off_policy_S is None

    joining = algorithm(ibpo_joint=False, ibpo_plain_prompt="successful")
    config = Config(algorithm=joining, loss=LossConfig(old_logprobs="engine"))
    config.model.hf_checkpoint, config.run.dry_run = Path(), True
    with pytest.raises(ValueError, match="use --old-logprobs recompute"):
        check_settings(config)


@pytest.mark.parametrize("value", [-1e4, -900.0, 900.0])
def test_rows_of_large_logits_keep_their_log_probs(value):
    got, entropy = packed_logprobs(torch.tensor([[value, value - 1.0, value - 2.0]]), torch.tensor([0]))
    assert got.item() == pytest.approx(-0.4076060, abs=1e-6 + abs(value) * 2**-23)
    assert entropy.item() == pytest.approx(0.8323955, abs=1e-5 + abs(value) * 2**-22)


def test_empty_and_fully_masked_sequences_lose_nothing():
    batch = random_batch(lengths=(2, 3)) | {"advantages": torch.ones(3).double(), "old_logprobs_N": None}
    batch["cu_seqlens"] = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    batch["response_mask_N"][:4] = 0
    loss, gradient, _ = loss_and_gradient(batch, params=WIDE)
    assert loss.isfinite()
    assert not gradient[:6].any()
    assert gradient[6:].any()


def test_bf16_logits_get_fp32_statistics():
    batch = random_batch()
    logits, targets = batch["logits_NV"].bfloat16(), batch["targets_N"]
    logprobs, _ = packed_logprobs(logits, targets)
    exact = logits.double().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, exact.float(), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": "nope"}, "unknown loss variant"),
        ({"variant": "math:pi"}, "'math:pi' is a float, wanted a Variant"),
        ({"params": {"epsilon": 1.0}}, "no parameter epsilon"),
        ({"params": {"eps_high": math.nan}}, "eps_high of loss variant 'gspo' must be above 0, is nan"),
        ({"params": {"eps_low": 1.5}}, "eps_low of loss variant 'gspo' must be above 0 and at most 1, is 1"),
        ({"variant": "dual-clip", "params": {"bound": 1.0}}, "bound .* must be above 1, is 1.0"),
        ({"advantages": torch.ones(18)}, "advantages have shape"),  # gspo's are of sequences
        ({"cu_seqlens": torch.tensor([0, 5, 12, 17])}, "cu_seqlens must rise"),
        ({"cu_seqlens": torch.tensor([2, 5, 12, 18])}, "cannot be cut across micro-batches"),
        ({"variant": "dr-grpo"}, "give the number of tokens"),
        ({"aggregation": "mean"}, "unknown aggregation 'mean'"),
        ({"aggregation": 0}, "must be above 0"),
        ({"kl": "k4"}, "unknown KL estimator 'k4'"),
        ({"kl_coef": 0.1}, "needs ref_logprobs_N"),
        ({"old_logprobs_N": torch.zeros(3)}, "old_logprobs_N has shape"),
        ({"sequence_weights_S": torch.ones(2)}, "sequence_weights_S has shape"),
        ({"vocab_range": (0, 12)}, "does not fit 11 columns"),
        ({"targets_N": torch.full((18,), 11)}, "target id 11 is outside the vocabulary"),
        ({"backend": "cuda"}, "unknown loss backend"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        loss_of_logits(**{**random_batch(), **change})


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
from megatron_ibpo.loss import LossRows, choose_backend, make_objective, policy_loss
logits = torch.zeros(3, 2, requires_grad=True)
cu, ones = torch.tensor([0, 2, 3]), torch.ones(3)
rows = LossRows(torch.tensor([0, 1, 0]), ones, cu, torch.ones(2))
loss, _ = policy_loss(logits, rows, make_objective("gspo"))
loss.backward()
print(loss.item(), choose_backend("auto", torch.device("cpu"), torch.float32))
print(choose_backend("auto", torch.device("cuda"), torch.float32))
"""


def test_on_a_cpu_triton_is_neither_needed_nor_imported():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=120)
    expected = ["-1.0 torch (no CUDA device)", "torch (the package triton is not installed)"]
    assert done.stdout.splitlines() == expected, done.stderr


def test_the_loss_backend_is_chosen_by_availability(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cuda, bf16 = torch.device("cuda"), torch.bfloat16
    assert str(choose_backend("torch", cuda, bf16)) == "torch (as asked)"
    with pytest.raises(ValueError, match="--loss-backend triton: the kernels run on CUDA devices, not on"):
        choose_backend("triton", torch.device("cpu"), bf16)
    pytest.importorskip("triton")
    assert str(choose_backend("auto", cuda, bf16)) == "triton (CUDA device)"
    assert "not torch.float64" in choose_backend("auto", cuda, torch.float64).reason


def test_the_worked_example_trains_a_model_of_transformers():
    """As docs/python.md has it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Qwen3Config(vocab_size=50, num_key_value_heads=1, head_dim=16, **shape)
    model, names = transformers.Qwen3ForCausalLM(config), {}
    exec(re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)[-2], names)
    ids = torch.randint(50, (1, 12))
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    given = (ids, torch.tensor([0, 6, 12], dtype=torch.int32), mask, torch.tensor([1.0, -1.0]))
    seen = [names["train_step"](model, optimizer, *given)[1].detach() for _ in range(5)]
    good, bad = slice(2, 5), slice(7, 11)
    assert seen[-1][good].mean() > seen[0][good].mean() + 0.1
    assert seen[-1][bad].mean() < seen[0][bad].mean() - 0.1
