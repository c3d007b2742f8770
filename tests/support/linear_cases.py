from functools import partial
from typing import Any

import torch

from megatron_ibpo.loss import VARIANTS
from support.loss_calls import loss_of_hidden, loss_of_logits

V, H = 37, 8
FUSED = sorted(name for name, variant in VARIANTS.items() if not variant.sequence_ratio)


def batch_of(lengths, seed=0, prompt=2, dtype=torch.float64, vocab=V, device="cpu"):
    """Sequences of a prompt and a response each; old log-probs near the policy's, everything weighted."""
    kind: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    rows, normal = sum(lengths) + prompt * len(lengths), partial(torch.randn, **kind)
    hidden, weight = normal(rows, H), normal(vocab, H) * 0.5
    targets = torch.randint(vocab, (rows,), generator=kind["generator"])
    own = (hidden @ weight.t()).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    advantages = normal(len(lengths))
    advantages[1::3] = 0.0
    floats = {
        "hidden_NH": hidden, "weight_VH": weight, "old_logprobs_N": own + 0.2 * normal(rows),
        "ref_logprobs_N": own + 0.2 * normal(rows),
        "token_weights_N": torch.rand(rows, **kind), "sequence_weights_S": torch.rand(len(lengths), **kind),
        "temperature": 0.7 + torch.rand(len(lengths), **kind), "advantages": advantages,
    }  # fmt: skip
    batch = {name: value.to(dtype) for name, value in floats.items()} | {
        "targets_N": targets,
        "response_mask_N": torch.cat([torch.tensor([0.0] * prompt + [1.0] * n) for n in lengths]),
        "cu_seqlens": torch.tensor([0, *[n + prompt for n in lengths]]).cumsum(0).int(),
    }
    return {name: value.to(device) for name, value in batch.items()}


def fused(batch, loss_of=loss_of_hidden, **options):
    hidden, weight = (batch[name].clone().requires_grad_() for name in ("hidden_NH", "weight_VH"))
    loss, stats = loss_of(**{**batch, "hidden_NH": hidden, "weight_VH": weight}, **options)
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad, stats


def plain(batch, **options):
    def loss_of(hidden_NH, weight_VH, **rest):
        return loss_of_logits(logits_NV=hidden_NH @ weight_VH.t(), **rest)

    return fused(batch, loss_of, **options)


def options_for(variant):
    wide = {"eps_low": 0.1, "eps_high": 0.1} if variant.startswith("gspo") else {}
    constant = {"aggregation": 20.0} if VARIANTS[variant].aggregation == "constant" else {}
    return {"variant": variant, "params": wide, **constant}
