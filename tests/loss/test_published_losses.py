"""Every loss variant against its formula as published, in float64.

The formulas are written from the papers, over padded rectangles [B, T] of log-probs, and share nothing with
`megatron_ibpo.loss`.
"""

import math

import pytest
import torch

from megatron_ibpo.loss import VARIANTS
from support.loss_calls import loss_of_logits

LENGTHS = (3, 7, 1, 5, 4, 6) * 3
LONGEST = 9.0
"""Tokens that a response may have, for Dr. GRPO."""


def clipped(r, a, p):
    """PPO, arXiv 1707.06347, eq. 7: min(rA, clip(r, 1 - ε, 1 + ε)A)."""
    return torch.min(r * a, r.clamp(1 - p["eps_low"], 1 + p["eps_high"]) * a)


def dual(r, a, p):
    """Dual-clip PPO, arXiv 1912.09729, eq. 5: max(min(rA, clip(r)A), cA) for A < 0."""
    return torch.where(a < 0, torch.max(clipped(r, a, p), p["bound"] * a), clipped(r, a, p))


def mean_of_sequences(x_BT, mask_BT):
    """GRPO, arXiv 2402.03300, eq. 3: 1/G Σ_i 1/|o_i| Σ_t."""
    return ((x_BT * mask_BT).sum(1) / mask_BT.sum(1)).mean()


def mean_of_tokens(x_BT, mask_BT):
    """DAPO, arXiv 2503.14476, eq. 8: 1/Σ|o_i| Σ_i Σ_t."""
    return (x_BT * mask_BT).sum() / mask_BT.sum()


def sequence_log_ratio(log_r_BT, mask_BT):
    """GSPO, arXiv 2507.18071, eq. 7: log s_i = 1/|y_i| Σ_t log(π/π_old), [B, 1]."""
    return ((log_r_BT * mask_BT).sum(1) / mask_BT.sum(1))[:, None]


# log-probs and old ones [B, T], advantages [B, 1], mask [B, T], parameters → loss


def gspo(logp, old, a, mask, p):
    return -clipped(sequence_log_ratio(logp - old, mask).exp(), a, p).mean()


def gspo_token(logp, old, a, mask, p):
    """Eq. 13 and 14: s_it = sg[s_i] π_t/sg[π_t]."""
    s_BT = sequence_log_ratio(logp - old, mask).exp().detach() * (logp - logp.detach()).exp()
    return -mean_of_sequences(clipped(s_BT, a, p), mask)


def gspo_dual_clip(logp, old, a, mask, p):
    """The same with s_i for r."""
    return -dual(sequence_log_ratio(logp - old, mask).exp(), a, p).mean()


def grpo(logp, old, a, mask, p):
    return -mean_of_sequences(clipped((logp - old).exp(), a, p), mask)


def dapo(logp, old, a, mask, p):
    return -mean_of_tokens(clipped((logp - old).exp(), a, p), mask)


def dual_clip(logp, old, a, mask, p):
    return -mean_of_tokens(dual((logp - old).exp(), a, p), mask)


def dr_grpo(logp, old, a, mask, p):
    """Dr. GRPO, arXiv 2503.20783: the sum over tokens over a constant, and no std (credit's business)."""
    return -(clipped((logp - old).exp(), a, p) * mask).sum(1).mean() / LONGEST


def cispo(logp, old, a, mask, p):
    """MiniMax-M1, arXiv 2506.13585, eq. 4 and 5: sg(clip(r)) A log π, over all tokens."""
    weight = (logp - old).exp().clamp(1 - p["eps_low"], 1 + p["eps_high"]).detach()
    return -mean_of_tokens(weight * a * logp, mask)


def nll(logp, old, a, mask, p):
    """Supervised fine-tuning: the mean cross-entropy of all tokens, here weighted by A."""
    return -mean_of_tokens(a * logp, mask)


def sapo(logp, old, a, mask, p):
    """SAPO, arXiv 2511.20347, eq. 5 and 6: f(r) = σ(τ(r - 1)) 4/τ, with a τ for each sign of A."""
    tau = torch.where(a > 0, p["tau_pos"], torch.full_like(a, p["tau_neg"]))
    gate = 4 / tau / (1 + (-tau * ((logp - old).exp() - 1)).exp())
    return -mean_of_sequences(gate * a, mask)


def gmpo(logp, old, a, mask, p):
    """GMPO, arXiv 2507.20673, eq. 4: the geometric mean of min(r^sgn, clip(r)^sgn)^sgn times A, clipped
    between e^-ε_low and e^ε_high."""
    sign, r = a.sign(), (logp - old).exp()
    bounded = r.clamp(math.exp(-p["eps_low"]), math.exp(p["eps_high"]))
    kept = torch.min(r**sign, bounded**sign) ** sign
    return -(a[:, 0] * (torch.where(mask > 0, kept, 1.0).prod(1) ** (1 / mask.sum(1)))).mean()


TOKEN = {"eps_low": 0.2, "eps_high": 0.28}
SEQUENCE = {"eps_low": 0.04, "eps_high": 0.06}
FORMULAS = {
    "gspo": (gspo, SEQUENCE),
    "gspo-token": (gspo_token, SEQUENCE),
    "gspo-dual-clip": (gspo_dual_clip, SEQUENCE | {"bound": 1.1}),
    "grpo": (grpo, TOKEN),
    "ppo-clip": (dapo, TOKEN),
    "dual-clip": (dual_clip, TOKEN | {"bound": 1.3}),
    "dapo": (dapo, TOKEN),
    "dr-grpo": (dr_grpo, TOKEN),
    "cispo": (cispo, {"eps_low": 1.0, "eps_high": 0.28}),
    "sapo": (sapo, {"tau_pos": 1.0, "tau_neg": 1.05}),
    "gmpo": (gmpo, {"eps_low": 0.2, "eps_high": 0.25}),
    "nll": (nll, {}),
}


def padded(values_N):
    return torch.nn.utils.rnn.pad_sequence(values_N.split(LENGTHS), batch_first=True)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_values_and_gradients_agree_with_what_is_published(variant):
    """Responses without prompts; ratios mostly between e^-.7 and e^.7, advantages of both signs."""
    formula, params = FORMULAS[variant]
    generator = torch.Generator().manual_seed(0)
    rows, vocab = sum(LENGTHS), 13
    logits = torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (rows,), generator=generator)
    now = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    old = now + 0.35 * torch.randn(rows, generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)

    ours = logits.clone().requires_grad_()
    loss, stats = loss_of_logits(
        logits_NV=ours,
        targets_N=targets,
        old_logprobs_N=old,
        response_mask_N=torch.ones(rows),
        cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0).int(),
        advantages=advantages,
        variant=variant,
        params=params,
        aggregation=LONGEST if variant == "dr-grpo" else None,
    )
    loss.backward()
    assert ours.grad.abs().max() > 1e-3
    if variant not in ("sapo", "nll"):  # which clip nothing
        assert stats.clipped.any()
        assert not stats.clipped.all()

    theirs = logits.clone().requires_grad_()
    logp_N = theirs.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    mask_BT = padded(torch.ones(rows, dtype=torch.float64))
    expected = formula(padded(logp_N), padded(old), advantages[:, None], mask_BT, params)
    expected.backward()
    assert abs(loss.item() - expected.item()) < 1e-14
    assert (ours.grad - theirs.grad).abs().max() < 1e-14
