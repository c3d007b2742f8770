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


def padded(values_N):
    return torch.nn.utils.rnn.pad_sequence(values_N.split(LENGTHS), batch_first=True)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_values_and_gradients_agree_with_what_is_published(variant):
    """Responses without prompts; ratios mostly between e^-.7 and e^.7, advantages of both signs."""
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
