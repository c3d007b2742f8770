"""Every loss variant against its formula as published, and as peers compute it, in float64.

The formulas are written from the papers, over padded rectangles [B, T] of log-probs as peers have them, and
share nothing with `megatron_ibpo.loss`. Peers add about 1e-8 to divisors against division by 0, and bound
log-ratios beyond 10; both are left out.
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


def of_sign(a, positive, negative):
    return torch.where(a > 0, torch.full_like(a, positive), torch.full_like(a, negative))


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
    tau = of_sign(a, p["tau_pos"], p["tau_neg"])
    gate = 4 / tau / (1 + (-tau * ((logp - old).exp() - 1)).exp())
    return -mean_of_sequences(gate * a, mask)


def gmpo(logp, old, a, mask, p):
    """GMPO, arXiv 2507.20673, eq. 4: the geometric mean of min(r^sgn, clip(r)^sgn)^sgn times A, clipped
    between e^-ε_low and e^ε_high."""
    sign, r = a.sign(), (logp - old).exp()
    bounded = r.clamp(math.exp(-p["eps_low"]), math.exp(p["eps_high"]))
    kept = torch.min(r**sign, bounded**sign) ** sign
    return -(a[:, 0] * (torch.where(mask > 0, kept, 1.0).prod(1) ** (1 / mask.sum(1)))).mean()


# --------------------------------------------------------------------------------------- as peers compute it


def largest_of_two(log_r, a, p):
    """verl, slime: the larger of two losses."""
    r = log_r.exp()
    return torch.maximum(-a * r, -a * r.clamp(1 - p["eps_low"], 1 + p["eps_high"]))


def verl_gspo(logp, old, a, mask, p):
    """The sequence's ratio as a value, the token's gradient; a mean over tokens, then over sequences."""
    mean = sequence_log_ratio(logp - old, mask).detach()
    return mean_of_sequences(largest_of_two(logp - logp.detach() + mean, a, p), mask)


def verl_dual_clip(logp, old, a, mask, p):
    losses = largest_of_two(logp - old, a, p)
    return mean_of_tokens(torch.where(a < 0, torch.minimum(losses, -a * p["bound"]), losses), mask)


def verl_gmpo(logp, old, a, mask, p):
    sign, log_r = a.sign(), logp - old
    kept = sign * torch.minimum(sign * log_r, sign * log_r.clamp(-p["eps_low"], p["eps_high"]))
    return (-a * sequence_log_ratio(kept, mask).exp()).mean()


def slime_gspo(logp, old, a, mask, p):
    """Every token has the sequence's log-ratio, gradient and all; a mean over samples of means."""
    log_r = sequence_log_ratio(logp - old, mask).expand_as(logp)
    return mean_of_sequences(largest_of_two(log_r, a, p), mask)


def slime_grpo(logp, old, a, mask, p):
    return mean_of_sequences(largest_of_two(logp - old, a, p), mask)


def of_all_tokens(logp, old, a, mask, p):
    """verl and slime with a mean over tokens."""
    return mean_of_tokens(largest_of_two(logp - old, a, p), mask)


def trl(level, loss_type):
    """TRL's GRPO trainer and Liger's fused GRPO loss: importance sampling by token or by sequence, and what
    divides."""

    def loss(logp, old, a, mask, p):
        log_r = logp - old
        if level == "sequence":
            log_r = sequence_log_ratio(log_r, mask).expand_as(log_r)
        first = log_r.exp()
        if loss_type == "cispo":
            each = -first.clamp(max=1 + p["eps_high"]).detach() * a * logp
        elif loss_type == "sapo":
            tau = of_sign(a, p["tau_pos"], p["tau_neg"])
            each = -a * torch.sigmoid(tau * (first - 1)) * 4 / tau
        else:
            each = -torch.min(first * a, first.clamp(1 - p["eps_low"], 1 + p["eps_high"]) * a)
        if loss_type in ("grpo", "sapo"):
            return ((each * mask).sum(-1) / mask.sum(-1)).mean()
        if loss_type == "dr_grpo":
            return (each * mask).sum() / (len(each) * LONGEST)
        return (each * mask).sum() / mask.sum()  # bnpo, dapo and cispo of one process

    return loss


TOKEN = {"eps_low": 0.2, "eps_high": 0.28}
SEQUENCE = {"eps_low": 0.04, "eps_high": 0.06}
FORMULAS = {
    "gspo": (
        SEQUENCE,
        {"paper": gspo, "verl": verl_gspo, "slime": slime_gspo, "TRL": trl("sequence", "grpo")},
    ),
    "gspo-token": (SEQUENCE, {"paper": gspo_token, "verl": verl_gspo}),
    "gspo-dual-clip": (SEQUENCE | {"bound": 1.1}, {"paper": gspo_dual_clip}),
    "grpo": (TOKEN, {"paper": grpo, "slime": slime_grpo, "TRL": trl("token", "grpo")}),
    "ppo-clip": (TOKEN, {"paper": dapo, "verl": of_all_tokens}),
    "dual-clip": (TOKEN | {"bound": 1.3}, {"paper": dual_clip, "verl": verl_dual_clip}),
    "dapo": (TOKEN, {"paper": dapo, "verl, slime": of_all_tokens, "TRL": trl("token", "dapo")}),
    "dr-grpo": (TOKEN, {"paper": dr_grpo, "TRL": trl("token", "dr_grpo")}),
    "cispo": ({"eps_low": 1.0, "eps_high": 0.28}, {"paper": cispo, "TRL": trl("token", "cispo")}),
    "sapo": ({"tau_pos": 1.0, "tau_neg": 1.05}, {"paper": sapo, "TRL": trl("token", "sapo")}),
    "gmpo": ({"eps_low": 0.2, "eps_high": 0.25}, {"paper": gmpo, "verl": verl_gmpo}),
    "nll": ({}, {"paper": nll}),
}


def padded(values_N):
    return torch.nn.utils.rnn.pad_sequence(values_N.split(LENGTHS), batch_first=True)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_values_and_gradients_agree_with_what_is_published(variant):
    """Responses without prompts; ratios mostly between e^-.7 and e^.7, advantages of both signs."""
    params, formulas = FORMULAS[variant]
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

    mask_BT = padded(torch.ones(rows, dtype=torch.float64))
    for source, formula in formulas.items():
        theirs = logits.clone().requires_grad_()
        logp_N = theirs.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
        expected = formula(padded(logp_N), padded(old), advantages[:, None], mask_BT, params)
        expected.backward()
        assert abs(loss.item() - expected.item()) < 1e-14, source
        assert (ours.grad - theirs.grad).abs().max() < 1e-14, source
