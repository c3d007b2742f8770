"""Log-probs, entropies and gradients of rows that were sampled from a truncated vocabulary."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ibpo.basics.sampling_mask import sampling_mask
from megatron_ibpo.loss import VARIANTS, packed_logprobs
from megatron_ibpo.loss import logprobs as loss_logprobs
from support import linear_cases
from support.kernel_cases import check_set_layout
from support.linear_cases import FUSED, batch_of, fused, plain
from support.loss_calls import loss_of_logits
from support.sampling_set_cases import as_sets, brute_force, cut_off, draw_mask, draw_sets


def test_values_and_gradient_by_hand():
    """Logits log 1, log 2, log 3, log 4 over ids 1 and 3: p = 1/3 and 2/3. At temperature ½ they are squared:
    1/5 and 4/5. The last row is not restricted."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).double().log().repeat(3, 1).requires_grad_()
    sets = as_sets(sampling_mask([[1, 3], [3, 1], []]))
    temperature = torch.tensor([1.0, 0.5, 1.0])
    logprobs, entropy = packed_logprobs(
        logits, torch.tensor([3, 3, 3]), temperature_N=temperature, sampling_sets=sets
    )
    torch.testing.assert_close(logprobs.exp(), torch.tensor([2 / 3, 4 / 5, 4 / 10]).double())
    by_hand = [
        -sum(p * math.log(p) for p in own) for own in ([1 / 3, 2 / 3], [0.2, 0.8], [0.1, 0.2, 0.3, 0.4])
    ]
    torch.testing.assert_close(entropy, torch.tensor(by_hand).double())
    (logprobs * torch.tensor([3.0, 1.0, 10.0])).sum().backward()
    expected = [[0, -1, 0, 1], [0, -0.4, 0, 0.4], [-1, -2, -3, 6]]
    torch.testing.assert_close(logits.grad, torch.tensor(expected).double())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 40), st.integers(1, 50), st.integers(0, 999),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.booleans(),
    st.sampled_from([1, 64, 2**26]),
)  # fmt: skip
def test_rows_equal_brute_force(rows, vocab, largest, seed, dtype, inplace, chunk_bytes):
    """At any temperature, in any chunks, with padding columns that must not count and rows left out."""
    generator = torch.Generator().manual_seed(seed)
    exact = (torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 4).to(dtype).double()
    targets = torch.randint(vocab, (rows,), generator=generator)
    temperature = 0.3 + 2 * torch.rand(rows, generator=generator)
    is_response = torch.rand(rows, generator=generator) < 0.8
    mask = draw_mask(targets, vocab, seed=seed, largest=largest)
    padded = torch.nn.functional.pad(exact.to(dtype), (0, 3), value=99.0).requires_grad_()
    exact.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_logprobs, "CHUNK_BYTES", chunk_bytes)
        logprobs, entropy = packed_logprobs(
            padded * 1, targets, response_mask_N=is_response, temperature_N=temperature,
            sampling_sets=as_sets(mask), vocab_range=(0, vocab), inplace=inplace,
        )  # fmt: skip
        weights = torch.randn(rows, generator=generator)
        (logprobs * weights).sum().backward()
    wanted, wanted_entropy = brute_force(exact, targets, mask, temperature.double())
    (wanted * weights * is_response).sum().backward()
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-6, "atol": 2e-5}
    torch.testing.assert_close(logprobs.double(), wanted.detach() * is_response, **close)
    torch.testing.assert_close(entropy.double(), wanted_entropy.detach() * is_response, **close)
    assert not padded.grad[:, vocab:].any()
    rounded = {"rtol": 2**-7, "atol": 2e-5} if dtype == torch.bfloat16 else close
    torch.testing.assert_close(padded.grad[:, :vocab].double(), exact.grad, **rounded)
    assert not padded.grad[:, :vocab][cut_off(torch.ones_like(exact), mask).isinf()].any(), "exactly 0"


def test_a_full_or_empty_sampling_set_is_the_whole_vocabulary():
    """Without a restricted row every bit is that without sets."""
    batch = batch_of((5, 9), vocab=linear_cases.V)
    targets, rows = batch["targets_N"], len(batch["targets_N"])
    expected = plain(batch)
    none = plain(batch, sampling_sets=as_sets(sampling_mask([[]] * rows)))
    for ours, theirs in zip(none[:3], expected[:3], strict=True):
        assert torch.equal(ours, theirs)
    whole = plain(batch | {"sampling_sets": as_sets(sampling_mask([range(linear_cases.V)] * len(targets)))})
    for ours, theirs in zip(whole[:3], expected[:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("variant", FUSED)
def test_the_fused_head_equals_the_loss_of_the_logits(variant):
    """With a KL penalty, in chunks that cut sequences."""
    batch = batch_of((1, 5, 17, 2, 30, 3))
    batch["sampling_sets"] = draw_sets(batch["targets_N"], linear_cases.V)
    options = linear_cases.options_for(variant) | {"kl_coef": 0.05}
    expected = plain(batch, **options)
    for chunk in (1, 7, 1000):
        found = fused(batch, chunk=chunk, **options)
        for ours, theirs in zip(found[:3], expected[:3], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
        for name, theirs in vars(expected[3]).items():
            torch.testing.assert_close(getattr(found[3], name), theirs, msg=name)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_sampling_sets_equal_cut_off_logits_under_every_variant(variant):
    batch = batch_of((4, 1, 9, 6))
    mask = draw_mask(batch["targets_N"], linear_cases.V)
    options = linear_cases.options_for(variant)
    found = plain(batch | {"sampling_sets": as_sets(mask)}, **options)

    def loss_of(hidden_NH, weight_VH, **rest):
        return loss_of_logits(logits_NV=cut_off(hidden_NH @ weight_VH.t(), mask), **rest)

    expected = fused(batch, loss_of, **options)
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(found[3].entropy_N, expected[3].entropy_N, rtol=1e-9, atol=1e-9)


def test_sets_that_do_not_fit_are_named():
    logits, targets = torch.zeros(2, 5), torch.tensor([1, 2])
    for sets, says in (
        ([[1]], "has 1 sets for 2 rows"),
        ([[1], [2, 5]], "id 5, which is outside the vocabulary of 5 ids"),
        ([[1], [-1, 2]], "id -1, which is outside"),
        ([[1], [3]], "target id 2 is outside the vocabulary of the logits, or not in the sampling set"),
    ):
        with pytest.raises(ValueError, match=says):
            packed_logprobs(logits, targets, sampling_sets=as_sets(sampling_mask(sets)))
    batch = batch_of((4, 6)) | {"sampling_sets": as_sets(sampling_mask([[1]]))}
    for loss_of in (plain, fused):
        with pytest.raises(ValueError, match="has 1 sets for 14 rows"):
            loss_of(batch)


@pytest.mark.world(4)
@pytest.mark.parametrize(("tp", "cp"), [(2, 2), (4, 1)])
def test_shards_of_vocabulary_and_sequences_equal_one_process(world, tp, cp):
    """Sets whose ids are all on one rank are among them."""
    check_set_layout(world, "torch", tp, cp, ("gspo", "grpo", "gmpo"))


@pytest.mark.world(2)
def test_the_fused_head_under_vocabulary_shards_equals_one_process(world):
    vocab, size = linear_cases.V, linear_cases.V // world.size + 1
    start, stop = world.rank * size, min((world.rank + 1) * size, vocab)
    options = {"chunk": 7, "params": {"eps_low": 0.1, "eps_high": 0.1}}
    layout = {"vocab_range": (start, stop), "tp_group": dist.group.WORLD}
    for seed in range(5):
        batch = batch_of((5, 17, 2, 30), seed)
        batch["sampling_sets"] = draw_sets(batch["targets_N"], vocab, seed=seed)
        shard = torch.zeros(size, linear_cases.H, dtype=torch.float64)  # the last rank's has padding
        shard[: stop - start] = batch["weight_VH"][start:stop]
        loss, hidden, weight, _ = fused({**batch, "weight_VH": shard}, **layout, **options)
        dist.all_reduce(hidden)
        expected_loss, expected_hidden, expected_weight, _ = fused(batch, **options)
        pairs = (
            (loss, expected_loss),
            (hidden, expected_hidden),
            (weight[: stop - start], expected_weight[start:stop]),
        )
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, msg=f"seed {seed}")
