from __future__ import annotations

from typing import Any

import torch

from megatron_ibpo.loss import packed_logprobs, resolve_variant
from support.loss_calls import loss_of_logits

LOSS_BOUND = 1e-6  # relative to the largest term in it (a log-prob for cispo and k1, about 1 for the others)
GRADIENT_BOUND = 2e-6  # of the gradient in fp32, relative, in the Euclidean norm
BF16_STEP = 2.0**-7  # GPUs round to nearest, half a step; the interpreter rounds towards zero
KINDS = ("gspo", "gspo-token", "gmpo", "cispo")  # they sum differently; test_traced_terms.py has all terms
LENGTHS = (4, 1, 6, 0, 2, 7)
ROWS = sum(LENGTHS)


def make_batch(device, *, lengths=LENGTHS, vocab=517, seed=0, shift=0.3) -> dict[str, Any]:
    """Random rows with a mask inside; old log-probs about `shift` off; rubbish where the mask is 0."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(lengths)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    targets = torch.randint(vocab, (rows,), generator=generator)
    mask = (torch.rand(rows, generator=generator) > 0.25).float()
    logprobs = packed_logprobs(logits.double(), targets)[0]
    batch = {
        "logits_NV": logits, "targets_N": targets,
        "old_logprobs_N": logprobs.float() + shift * torch.randn(rows, generator=generator),
        "response_mask_N": mask, "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "advantages": torch.linspace(-2, 1.5, len(lengths)).roll(2),
    }  # fmt: skip
    batch["advantages"][0] = 0.0
    batch["old_logprobs_N"][mask == 0] = torch.nan
    return {name: tensor.to(device) for name, tensor in batch.items()}


def options_for(variant: str) -> dict[str, Any]:
    constant = resolve_variant(variant)[0].aggregation == "constant"
    return {"variant": variant, "aggregation": 6.0 if constant else None}


def run(batch: dict[str, Any], dtype: torch.dtype = torch.float32, scale: float = 1.0, **options: Any):
    """(loss, gradient of scale · loss, stats) of the logits in that dtype."""
    logits = batch["logits_NV"].to(dtype).clone().requires_grad_()
    given = logits * 1 if options.get("inplace") else logits  # a leaf may not be written over
    loss, stats = loss_of_logits(**{**batch, "logits_NV": given}, **options)
    (loss * scale).backward()
    return loss.detach().double(), logits.grad.double(), stats


def reference(batch: dict[str, Any], scale: float = 1.0, **options: Any):
    return run({**batch}, torch.float64, scale, **{**options, "inplace": False}, backend="torch")


def compare(batch: dict[str, Any], size: float = 1.0, **options: Any) -> None:
    loss, gradient, stats = run(batch, scale=3.0, backend="triton", **options)
    expected_loss, expected, expected_stats = reference(batch, 3.0, **options)
    assert (loss - expected_loss).abs() <= LOSS_BOUND * max(size, 1.0, expected_loss.abs())
    assert (gradient - expected).norm() <= GRADIENT_BOUND * expected.norm()
    for name in ("logprobs_N", "entropy_N", "mean_log_ratio_S", "kl_N"):
        found, wanted = getattr(stats, name), getattr(expected_stats, name)
        if wanted is not None:
            torch.testing.assert_close(found.double(), wanted, atol=5e-6, rtol=1e-6)
    assert torch.equal(stats.clipped, expected_stats.clipped)


def check_variant(device: str, variant: str) -> None:
    """Compare with weights, temperatures and a padded vocabulary; ratios of e² pass all bounds."""
    batch = make_batch(device)
    batch["old_logprobs_N"][4:11] -= 2.0
    generator = torch.Generator().manual_seed(1)
    batch["logits_NV"] = torch.nn.functional.pad(batch["logits_NV"], (0, 11), value=9.0)
    batch["token_weights_N"] = torch.rand(ROWS, generator=generator).to(device)
    batch["sequence_weights_S"] = torch.rand(6, generator=generator).to(device)
    options = options_for(variant) | {"temperature": torch.linspace(0.8, 1.2, 6).to(device)}
    compare(batch, 10.0, **options, vocab_range=(0, 517))  # cispo's loss has log-probs
