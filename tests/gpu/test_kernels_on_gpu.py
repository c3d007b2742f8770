"""The whole suite of the kernels on a GPU, and what only a GPU can show: real bf16, sizes, memory."""

import os

import pytest
import torch

from megatron_ibpo.loss import VARIANTS, choose_backend, packed_logprobs
from support import linear_cases
from support.kernel_cases import *  # noqa: F403
from support.kernel_cases import make_batch, options_for, run
from support.linear_cases import batch_of, fused, plain
from support.loss_calls import loss_of_logits
from support.traced_cases import *  # noqa: F403

pytestmark = pytest.mark.kernel

MIB = 2**20
LOG_RATIOS = torch.tensor([-0.6, -0.1, 0.1, 0.6])  # further from all bounds than bf16 rounds a logit


@pytest.fixture(scope="session")
def device():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; tests/interpreted runs this suite under Triton's interpreter")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1 would run the kernels on the CPU")
    return "cuda"


def test_auto_chooses_the_triton_kernels_on_gpus(device):
    chosen = choose_backend("auto", torch.device(device), torch.bfloat16)
    assert chosen.name == "triton"


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_bf16_logits_of_a_real_vocabulary(device, variant):
    """The reference is fp64 on the same rounded logits; the written gradient is within half a step."""
    batch = make_batch(device, lengths=(700, 33, 0, 1291), vocab=151936)
    batch["logits_NV"] = batch["logits_NV"].bfloat16()
    options = options_for(variant)
    loss, gradient, stats = run(batch, torch.bfloat16, backend="triton", **options)
    exact = run(batch, torch.float64, backend="torch", **options)
    torch.testing.assert_close(stats.logprobs_N.double(), exact[2].logprobs_N, atol=1e-5, rtol=1e-6)
    assert abs(loss - exact[0]) <= 1e-5 * max(1.0, abs(exact[0]))
    slack = 2e-6 * exact[1].abs().max()
    assert ((gradient - exact[1]).abs() <= 2.0**-8 * exact[1].abs() + slack).all()


def test_more_rows_than_a_grid_has_in_its_second_dimension(device):
    batch = make_batch(device, lengths=(65_535, 2, 70_000), vocab=64)
    loss, gradient, _ = run(batch, backend="triton")
    expected_loss, expected, _ = run(batch, torch.float64, backend="torch")
    assert abs(loss - expected_loss) <= 1e-5
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()


def test_an_offset_beyond_32_bits_is_right(device):
    rows, vocab = 32_768, 151_936
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device=device)
    targets = torch.full((rows,), vocab - 1, device=device)
    logits[-1, -1] = 8.0
    logprobs, _ = packed_logprobs(logits, targets, backend="triton")
    flat = -torch.log(torch.tensor(float(vocab)))
    peak = 8.0 - torch.log(vocab - 1 + torch.tensor(8.0).exp())
    torch.testing.assert_close(logprobs[:-1].cpu(), flat.expand(rows - 1), atol=1e-5, rtol=0)
    torch.testing.assert_close(logprobs[-1].cpu(), peak, atol=1e-5, rtol=0)


def test_no_memory_of_the_logits_size_is_taken(device):
    """Forward and backward together, in place, take at most 64 MiB beside logits of 1 GiB."""
    rows, vocab = 8192, 65_536
    logits = torch.randn(rows, vocab, dtype=torch.bfloat16, device=device).requires_grad_()
    batch = make_batch(device, lengths=(rows,), vocab=8)
    batch["targets_N"] = torch.randint(vocab, (rows,), device=device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss, _ = loss_of_logits(**{**batch, "logits_NV": logits}, backend="triton", inplace=True)
    loss.backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 64 * MIB


def test_a_new_length_compiles_nothing(device):
    from megatron_ibpo.kernels import row_logprobs, row_statistics, segment_loss

    known = {**vars(row_statistics), **vars(row_logprobs), **vars(segment_loss)}
    kernels = [kernel for name, kernel in known.items() if name.endswith("_kernel")]

    def compiled():
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    for length in (512, 513):
        run(make_batch(device, lengths=(length, 3)), backend="triton")
    before = compiled()
    assert before > 0
    for length in (1, 100, 511, 1024, 4099):
        run(make_batch(device, lengths=(length, 16)), backend="triton")
    assert compiled() == before


@pytest.mark.parametrize("chunk", [64, 100_000])
@pytest.mark.parametrize("variant", linear_cases.FUSED)
def test_the_fused_head_in_bf16(device, variant, chunk):
    """Three roundings to bf16 (logits, softmax, scaled rows) against fp64, however many chunks there are."""
    batch = batch_of((200, 3, 0, 400), vocab=5003, device=device)
    for name in ("hidden_NH", "weight_VH"):
        batch[name] = batch[name].bfloat16().double()
    options = linear_cases.options_for(variant)
    own_N = plain(batch, backend="torch", **options)[3].logprobs_N
    batch["old_logprobs_N"] = own_N - LOG_RATIOS.to(own_N).repeat(len(own_N))[: len(own_N)]
    _, hidden_exact, weight_exact, _ = plain(batch, backend="torch", **options)
    low = {name: batch[name].bfloat16() for name in ("hidden_NH", "weight_VH")}
    _, hidden, weight, _ = fused({**batch, **low}, chunk=chunk, backend="triton", **options)
    # a row's ratio moves with its bf16 logits, and so, by at most their rounding, does its coefficient
    assert (hidden - hidden_exact).norm() <= 2**-7 * hidden_exact.norm()
    assert (weight - weight_exact).norm() <= 2**-7 * weight_exact.norm()
