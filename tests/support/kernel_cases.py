"""Checks what must hold of the Triton kernels, as functions of the device: on CPUs under Triton's interpreter
(`tests/interpreted`), on GPUs as they are (`tests/gpu`).

Everything goes through the entry points of `megatron_ibpo.loss`; the torch reference in fp64 is the measure.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ibpo.loss import LossRows, make_objective, packed_logprobs, resolve_variant
from megatron_ibpo.loss.segments import segment_loss
from support.loss_calls import loss_of_logits

LOSS_BOUND = 1e-6
"""Of the loss, relative to the largest term in it (a log-prob for cispo and k1, about 1 for the others)."""
GRADIENT_BOUND = 2e-6
"""Of the gradient in fp32, relative, in the Euclidean norm."""
BF16_STEP = 2.0**-7
"""Two neighbours in bf16 differ by at most this share. A written gradient is within half a step of the exact
one on GPUs (round to nearest) and within one under the interpreter (which rounds towards zero)."""

LENGTHS = (4, 1, 6, 0, 2, 7)
ROWS = sum(LENGTHS)


def make_batch(
    device: str, *, lengths: tuple[int, ...] = LENGTHS, vocab: int = 517, seed: int = 0, shift: float = 0.3
) -> dict[str, Any]:
    """Random rows with a mask inside; old log-probs about `shift` off; rubbish where the mask is 0."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(lengths)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    targets = torch.randint(vocab, (rows,), generator=generator)
    mask = (torch.rand(rows, generator=generator) > 0.25).float()
    logprobs = packed_logprobs(logits.double(), targets)[0]
    batch = {
        "logits_NV": logits,
        "targets_N": targets,
        "old_logprobs_N": logprobs.float() + shift * torch.randn(rows, generator=generator),
        "response_mask_N": mask,
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "advantages": torch.linspace(-2, 1.5, len(lengths)).roll(2),
    }
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
    """Loss, gradient and statistics of the kernels in fp32 against the reference in fp64."""
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
    """With weights of tokens and sequences, a temperature for each sequence and a padded vocabulary. Ratios
    of about e² in the second and third sequence pass the bounds of dual-clip and CISPO, either sign."""
    batch = make_batch(device)
    batch["old_logprobs_N"][4:11] -= 2.0
    generator = torch.Generator().manual_seed(1)
    batch["logits_NV"] = torch.nn.functional.pad(batch["logits_NV"], (0, 11), value=9.0)
    compare(
        batch,
        size=10.0,  # log-probs, in cispo's loss
        **options_for(variant),
        token_weights_N=torch.rand(ROWS, generator=generator).to(device),
        sequence_weights_S=torch.rand(6, generator=generator).to(device),
        temperature=torch.linspace(0.8, 1.2, 6).to(device),
        vocab_range=(0, 517),
    )


def check_penalty(device: str, variant: str, kl: str) -> None:
    batch = make_batch(device)
    ref = torch.where(batch["response_mask_N"] > 0, batch["old_logprobs_N"] - 0.2, torch.nan)
    compare(batch, 10.0, **options_for(variant), ref_logprobs_N=ref, kl=kl, kl_coef=0.5)


def check_aggregation(device: str, variant: str, aggregation: str | float) -> None:
    compare(make_batch(device), 10.0, variant=variant, aggregation=aggregation)


def check_own_old_logprobs(device: str, variant: str) -> None:
    compare({**make_batch(device), "old_logprobs_N": None}, 10.0, **options_for(variant))


def check_token_advantages(device: str, variant: str) -> None:
    batch = make_batch(device)
    batch["advantages"] = torch.linspace(-1, 1, ROWS).to(device).round(decimals=1)
    compare(batch, 10.0, **options_for(variant))


def check_finite_differences(device: str, variant: str) -> None:
    """Along a random direction; the clips are wide, so that no difference crosses a kink."""
    batch = make_batch(device, lengths=(3, 6), vocab=31, shift=0.05)
    params = {name: 0.6 for name in resolve_variant(variant)[1] if name.startswith("eps")}
    if variant == "cispo":  # its clip is detached: differences see the gradient only where the ratio is 1
        batch["old_logprobs_N"] = None
    options = {**options_for(variant), "params": params, "backend": "triton"}
    direction = torch.randn(9, 31, generator=torch.Generator().manual_seed(2)).to(device)
    step = 1e-2

    def loss(offset: float) -> float:
        moved = {**batch, "logits_NV": batch["logits_NV"] + offset * direction}
        return loss_of_logits(**moved, **options)[0].item()

    _, gradient, _ = run(batch, **options)
    slope = (gradient * direction).sum().item()
    assert abs((loss(step) - loss(-step)) / (2 * step) - slope) <= 2e-3 * abs(slope) + 1e-4


def check_bf16(device: str, variant: str) -> None:
    """The loss has fp32's error, since only the logits are bf16; the gradient is rounded when written."""
    batch = make_batch(device)
    batch["logits_NV"] = batch["logits_NV"].bfloat16()
    loss, gradient, _ = run(batch, torch.bfloat16, backend="triton", **options_for(variant))
    expected_loss, expected, _ = reference(batch, **options_for(variant))
    assert (loss - expected_loss).abs() <= 10 * LOSS_BOUND
    step = BF16_STEP / 2 if device == "cuda" else BF16_STEP
    slack = GRADIENT_BOUND * expected.abs().max()
    assert ((gradient - expected).abs() <= step * expected.abs() + slack).all()


def check_wide_rows(device: str) -> None:
    """More than one block of columns, with a tail; the largest logit in each of them, and at its ends."""
    batch = make_batch(device, lengths=(4, 2), vocab=2 * 4096 + 37)
    for row, column in enumerate((5, 4096 + 7, 8192 + 36, 8191, 4096, 0)):
        batch["logits_NV"][row, column] = 25.0
    batch["response_mask_N"][:] = 1
    batch["old_logprobs_N"] = None
    compare(batch, 30.0)


def check_rows_with_a_late_peak(device: str) -> None:
    """Logits so far above the first block and the target that the row is read twice."""
    batch = make_batch(device, lengths=(4, 2), vocab=2 * 4096 + 37)
    for row, (column, height) in enumerate([(8200, 60.0), (4100, 200.0), (8228, 900.0), (5000, 1e4)]):
        batch["logits_NV"][row, column] = height
    batch["response_mask_N"][:] = 1
    batch["old_logprobs_N"] = None
    found, entropy = packed_logprobs(batch["logits_NV"], batch["targets_N"], backend="triton")
    exact, exact_entropy = packed_logprobs(batch["logits_NV"].double(), batch["targets_N"], backend="torch")
    largest = batch["logits_NV"].abs().amax(1).double()
    assert ((found - exact).abs() <= 2e-6 + largest * 2**-23).all()
    assert ((entropy - exact_entropy).abs() <= 5e-6 + largest * 2**-23).all()
    _, gradient, _ = run(batch, backend="triton")
    _, expected, _ = reference(batch)
    assert (gradient - expected).norm() <= GRADIENT_BOUND * expected.norm()


def check_rows_of_large_logits(device: str, offset: float) -> None:
    """All logits far from 0: the error is the rounding of the logits' own size, and nothing overflows."""
    batch = make_batch(device)
    batch["logits_NV"] += offset
    loss, gradient, stats = run(batch, backend="triton")
    expected_loss, expected, expected_stats = reference(batch)
    rounding = abs(offset) * 2.0**-23
    mask = batch["response_mask_N"] > 0
    assert ((stats.logprobs_N - expected_stats.logprobs_N).abs()[mask] <= 5e-6 + rounding).all()
    assert (loss - expected_loss).abs() <= LOSS_BOUND + 4 * rounding
    assert (gradient - expected).norm() <= (GRADIENT_BOUND + 2 * rounding) * expected.norm()


def check_forbidden_tokens(device: str) -> None:
    """Logits of -inf are as if their columns were not there."""
    batch = make_batch(device)
    columns = torch.arange(517, device=device)
    kept = (columns % 3 != 0)[None] | (columns[None] == batch["targets_N"][:, None])
    floor = {**batch, "logits_NV": batch["logits_NV"].masked_fill(~kept, -1e6)}
    forbidden = {**batch, "logits_NV": batch["logits_NV"].masked_fill(~kept, -torch.inf)}
    expected_loss, expected, expected_stats = reference(floor)
    for backend in ("torch", "triton"):
        loss, gradient, stats = run(forbidden, backend=backend)
        assert (loss - expected_loss).abs() <= LOSS_BOUND
        assert (gradient - expected).norm() <= GRADIENT_BOUND * expected.norm()
        torch.testing.assert_close(stats.entropy_N, expected_stats.entropy_N.float(), atol=1e-5, rtol=1e-5)


def check_ratio_overflow(device: str, variant: str) -> None:
    """Ratios of e^10000 and e^-10000, each under every sign of the advantage, and an empty sequence."""
    batch = make_batch(device, lengths=(5, 0, 5, 5, 5, 5, 5), vocab=31)
    sequence_N = torch.repeat_interleave(torch.arange(7), batch["cu_seqlens"].cpu().diff()).to(device)
    offsets_S = torch.tensor([-1e4, 0.0, 1e4, -1e4, 1e4, -1e4, 1e4], device=device)
    batch["old_logprobs_N"] -= offsets_S[sequence_N]
    batch["advantages"] = torch.tensor([-1.0, 0.0, -1.0, 0.0, 0.0, 1.0, 1.0], device=device)
    loss, gradient, _ = run(batch, backend="triton", **options_for(variant))
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert not gradient[batch["advantages"][sequence_N] == 0].any()


def check_impossible_tokens(device: str, variant: str) -> None:
    """Tokens whose log-prob, or old log-prob, is -inf under every sign of the advantage: as the reference
    has it, so never a NaN."""
    from megatron_ibpo.kernels.segment_loss import triton_segment_loss

    for old, advantage in product((False, True), (-1.0, 0.0, 1.0)):
        found = []
        for loss_of, dtype in ((triton_segment_loss, torch.float32), (segment_loss, torch.float64)):
            now = torch.linspace(-2, -1, 6, dtype=dtype, device=device)
            before = torch.linspace(-1.9, -1.2, 6, dtype=dtype, device=device)
            (before if old else now)[3] = -torch.inf
            rows = LossRows(
                targets_N=torch.zeros(6, dtype=torch.int64, device=device),
                response_mask_N=torch.ones(6, device=device),
                cu_seqlens=torch.tensor([0, 2, 5, 6], dtype=torch.int32, device=device),
                advantages=torch.full((3,), advantage, dtype=dtype, device=device),
                old_logprobs_N=before,
                token_weights_N=torch.linspace(0, 2, 6, dtype=dtype, device=device),
            )
            objective = make_objective(variant, aggregation=options_for(variant)["aggregation"])
            now.requires_grad_()
            loss, mean_log_ratio_S, clipped, _ = loss_of(now, rows.checked(6, objective), objective)
            loss.backward()
            found.append((loss.detach().double(), now.grad.double(), mean_log_ratio_S.double(), clipped))
        for of_kernel, of_reference in zip(*found, strict=True):
            assert not of_reference.isnan().any()
            torch.testing.assert_close(of_kernel, of_reference, atol=2e-6, rtol=2e-6)


def check_overflow_without_advantage(device: str, variant: str) -> None:
    batch = make_batch(device, lengths=(2, 0, 3), vocab=31)
    batch["old_logprobs_N"] -= torch.tensor([1e4, 1e4, -1e4, -1e4, -1e4], device=device)
    batch["advantages"] = torch.zeros(3, device=device)
    loss, gradient, _ = run(batch, backend="triton", **options_for(variant))
    assert loss == 0
    assert not gradient.any()


def check_masked_rows(device: str) -> None:
    """A fully masked sequence, an empty one, one of a single token; and an empty batch of rows."""
    batch = make_batch(device)
    batch["response_mask_N"][: LENGTHS[0]] = 0
    compare(batch)
    _, gradient, stats = run(batch, backend="triton")
    assert not gradient[batch["response_mask_N"] == 0].any()
    assert not stats.logprobs_N[batch["response_mask_N"] == 0].any()
    batch["response_mask_N"][:] = 0
    loss, gradient, _ = run(batch, backend="triton")
    assert loss == 0
    assert not gradient.any()


def check_inplace(device: str) -> None:
    batch = make_batch(device)
    logits = batch["logits_NV"].clone().requires_grad_()
    given = logits * 1
    loss, _ = loss_of_logits(**{**batch, "logits_NV": given}, backend="triton", inplace=True)
    seen = []
    given.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    loss.backward(retain_graph=True)
    assert seen == [given.data_ptr()]
    plain = run(batch, backend="triton")[1]
    assert torch.equal(logits.grad.double(), plain)
    with pytest.raises(RuntimeError, match="backward ran twice"):
        loss.backward()


def check_padded_vocabulary(device: str) -> None:
    batch = make_batch(device)
    loss, gradient, _ = run(batch, backend="triton")
    padding = torch.full((ROWS, 67), 50.0, device=device)
    padded = {**batch, "logits_NV": torch.cat([batch["logits_NV"], padding], 1)}
    for inplace in (False, True):
        found = run(padded, backend="triton", vocab_range=(0, 517), inplace=inplace)
        assert found[0] == loss
        assert torch.equal(found[1][:, :517], gradient)
        assert not found[1][:, 517:].any()


def check_weights_of_one_change_nothing(device: str) -> None:
    batch = make_batch(device)
    loss, gradient, _ = run(batch, backend="triton")
    again = run(batch, backend="triton", token_weights_N=torch.ones(ROWS, device=device))
    assert loss == again[0]
    assert torch.equal(gradient, again[1])


def check_order_of_sequences(device: str) -> None:
    """Packing in another order gives every row the same bits."""
    lengths = (3, 9, 5)
    batch = make_batch(device, lengths=lengths)
    order = [2, 0, 1]
    starts = [0, 3, 12]
    rows = torch.cat([torch.arange(starts[i], starts[i] + lengths[i]) for i in order]).to(device)
    moved = {name: value[rows] for name, value in batch.items() if len(value) == 17}
    moved["advantages"] = batch["advantages"][order]
    moved["cu_seqlens"] = torch.tensor([0, *(lengths[i] for i in order)], device=device).cumsum(0).int()
    _, gradient, _ = run(batch, backend="triton")
    _, moved_gradient, _ = run(moved, backend="triton")
    assert torch.equal(gradient[rows], moved_gradient)


def train(device: str, backend: str, variant: str, steps: int = 4) -> tuple[list[float], Tensor]:
    """Losses and the weights of a linear model after a few steps off-policy."""
    generator = torch.Generator().manual_seed(3)
    batch = make_batch(device, lengths=(6, 9, 4), vocab=131)
    hidden = torch.randn(19, 16, generator=generator).to(device)
    weight = (torch.randn(131, 16, generator=generator) * 0.5).to(device).requires_grad_()
    batch["old_logprobs_N"] = packed_logprobs(hidden @ weight.detach().T, batch["targets_N"])[0]
    optimizer = torch.optim.SGD([weight], lr=0.5)
    losses = []
    for _ in range(steps):
        logits = {"logits_NV": hidden @ weight.T}
        options = {**options_for(variant), "backend": backend, "inplace": True}
        loss, _ = loss_of_logits(**{**batch, **logits}, **options)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weight.detach()


def check_training(device: str, variant: str) -> None:
    """A few steps with the kernels are the steps with the reference, and they go somewhere."""
    losses, weight = train(device, "triton", variant)
    expected_losses, expected = train(device, "torch", variant)
    assert losses[-1] < losses[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses), atol=5e-6, rtol=1e-5)
    torch.testing.assert_close(weight, expected, atol=1e-5, rtol=1e-5)


def check_targets_outside(device: str) -> None:
    """On CPUs an error that names the id; on GPUs the device asserts, which no test survives."""
    batch = make_batch(device)
    row = int(batch["response_mask_N"].nonzero()[0])
    batch["targets_N"][row] = 517
    with pytest.raises(ValueError, match="target id 517 is outside the vocabulary"):
        run(batch, backend="triton")
