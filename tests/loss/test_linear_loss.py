"""The loss with the LM head fused in equals that of the logits, and both are the same under every layout."""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ibpo.loss import VARIANTS
from support.kernel_cases import BY_PLACE_NAME, check_layout
from support.linear_cases import FUSED, H, V, batch_of, fused, options_for, plain
from support.loss_calls import loss_of_head, loss_of_hidden

# GSPO's own clips are narrower than the ratios here, and leave no gradient
WIDE = {"params": {"eps_low": 0.5, "eps_high": 0.5}}


def agree(found, expected, **tolerances):
    """Loss and both gradients."""
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(ours, theirs, **tolerances)


@pytest.mark.parametrize(("kl_coef", "off_policy"), [(0.0, None), (0.05, None), (0.05, [0, 1, 0, 1, 1, 0])])
@pytest.mark.parametrize("variant", FUSED)
def test_it_equals_the_loss_of_the_logits(variant, kl_coef, off_policy):
    """Sequences inside a chunk, across two, and across many; all weights, temperatures and masks in play."""
    batch = batch_of((1, 5, 17, 2, 30, 3))
    options = options_for(variant) | {"kl_coef": kl_coef}
    if off_policy:
        batch |= {"off_policy_S": torch.tensor(off_policy).bool()}
        batch["advantages"][1] = 0.5
    expected = plain(batch, **options)
    for chunk in (1, 7, 1000):
        found = fused(batch, chunk=chunk, **options)
        agree(found, expected, rtol=1e-12, atol=1e-14)
        for name, theirs in vars(expected[3]).items():
            torch.testing.assert_close(getattr(found[3], name), theirs)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=6),
    st.integers(1, 30), st.integers(0, 3), st.integers(0, 99),
)  # fmt: skip
def test_no_cut_into_chunks_changes_anything(lengths, chunk, prompt, seed):
    """Empty and fully masked sequences among them."""
    batch = batch_of(lengths, seed, prompt)
    options = {"params": {"eps_low": 0.1, "eps_high": 0.1}, "kl_coef": 0.1, "kl": "k2"}
    agree(fused(batch, chunk=chunk, **options), plain(batch, **options), rtol=1e-11, atol=1e-13)


def test_a_sequence_may_be_longer_than_a_scaling_chunk():
    batch = batch_of((9000, 5, 300), vocab=3)
    expected = plain(batch, **WIDE)
    assert expected[2].abs().max() > 1e-3
    agree(fused(batch, chunk=4000, **WIDE), expected, rtol=1e-11, atol=1e-13)


def test_bf16_sums_its_weight_gradient_in_fp32():
    """Against fp64 the error is that of rounding logits, P and scaled rows to bf16 (2^-9 each), however many
    chunks there are."""
    batch = batch_of((40, 3, 25, 60), dtype=torch.float64)
    low = {name: batch[name].bfloat16() for name in ("hidden_NH", "weight_VH")}
    _, *exact, _ = plain(batch | {name: value.double() for name, value in low.items()}, **WIDE)
    for chunk in (2, 1000):
        _, *found, stats = fused(batch | low, chunk=chunk, **WIDE)
        assert stats.logprobs_N.dtype == torch.float32, chunk
        for ours, theirs in zip(found, exact, strict=True):
            assert (ours - theirs).norm() <= 2**-7 * theirs.norm(), chunk


def test_backward_scales_both_gradients_and_runs_once():
    batch = batch_of((4, 6))
    _, of_hidden, of_weight, _ = plain(batch, **WIDE)
    assert min(of_hidden.abs().max(), of_weight.abs().max()) > 1e-3
    hidden, weight = (batch[name].clone().requires_grad_() for name in ("hidden_NH", "weight_VH"))
    loss, _ = loss_of_hidden(**{**batch, "hidden_NH": hidden, "weight_VH": weight}, chunk=3, **WIDE)
    (loss * 1024).backward(retain_graph=True)
    torch.testing.assert_close(hidden.grad, of_hidden * 1024)
    torch.testing.assert_close(weight.grad, of_weight * 1024)
    with pytest.raises(RuntimeError, match="backward ran twice"):
        loss.backward()
    # none is computed where none is wanted
    hidden.grad = None
    loss_of_hidden(**{**batch, "hidden_NH": hidden}, chunk=3, **WIDE)[0].backward()
    torch.testing.assert_close(hidden.grad, of_hidden)
    torch.testing.assert_close(loss_of_hidden(**batch, chunk=3, **WIDE)[0], loss.detach())


def test_megatrons_main_grad_gets_the_weights_gradient_and_autograd_zeros():
    """tests/policy/test_trainer.py trains with it under Megatron's DDP, tied and untied."""
    batch = batch_of((4, 6))
    weight = batch["weight_VH"].clone().requires_grad_()
    weight.main_grad = torch.zeros(V, H)
    for _ in range(2):
        loss, _ = loss_of_hidden(**{**batch, "weight_VH": weight}, chunk=3, into_main_grad=True, **WIDE)
        (loss * 64).backward()
    expected = plain(batch, **WIDE)[2] * 128
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=1e-5, atol=1e-5)
    assert not weight.grad.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": "gspo-token"}, "cannot be fused with the LM head"),
        ({"into_main_grad": True}, "needs weight_VH.main_grad"),
        ({"chunk": 0}, "chunk is 0"),
        ({"weight_VH": torch.zeros(V, H + 1, dtype=torch.float64)}, "do not share H"),
        ({"weight_VH": torch.zeros(V, H)}, "must agree"),
        ({"targets_N": torch.zeros(3, dtype=torch.int64)}, "targets_N has shape"),
        ({"cu_seqlens": torch.tensor([0, 6, 20])}, "a sequence cannot be cut across micro-batches"),
    ],
)
def test_bad_input_to_the_fused_head_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        loss_of_hidden(**{**batch_of((4, 6)), **change})


@pytest.mark.world(4)
@pytest.mark.parametrize(("tp", "cp"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_every_variant_equals_one_process(world, tp, cp):
    """(2, 2) has both; (4, 1) knows no context-parallel group."""
    check_layout(world, "torch", tp, cp, (*VARIANTS, BY_PLACE_NAME))
    off_policy = {"off_policy_S": torch.tensor([False, True, False, True])}
    check_layout(world, "torch", tp, cp, ("gspo", "gspo-token", "grpo"), **off_policy)


@pytest.mark.world(2)
def test_a_sequence_indivisible_by_context_parallel_ranks_is_refused(world):
    batch = batch_of((5, 13)) | {"cu_seqlens": torch.tensor([0, 7, 44])}
    with pytest.raises(ValueError, match="a sequence of 7 rows does not divide among the 2 ranks"):
        fused(batch, cp_group=torch.distributed.group.WORLD)


@pytest.mark.world(2)
def test_vocabulary_shards_equal_one_process(world):
    batch, options = batch_of((5, 17, 2, 30)), {"params": {"eps_low": 0.1, "eps_high": 0.1}}
    size = V // world.size + 1
    start, stop = world.rank * size, min((world.rank + 1) * size, V)
    shard = torch.zeros(size, H, dtype=torch.float64)  # the last rank's has padding
    shard[: stop - start] = batch["weight_VH"][start:stop]
    layout = {"vocab_range": (start, stop), "tp_group": torch.distributed.group.WORLD}
    expected_loss, expected_hidden, expected_weight, _ = fused(batch, **options)
    expected = expected_loss, expected_hidden, expected_weight[start:stop]
    for loss_of in (partial(loss_of_hidden, chunk=7), loss_of_head):
        loss, hidden, weight, _ = fused({**batch, "weight_VH": shard}, loss_of, **layout, **options)
        torch.distributed.all_reduce(hidden)
        agree((loss, hidden, weight[: stop - start]), expected)


@pytest.mark.world(2)
def test_context_shards_equal_one_process(world):
    """They do so where either rank's last chunk has no row in the loss, too. Each rank takes an end and a
    middle piece of every sequence, as Megatron deals them."""
    for variant, padded in [("gspo", []), ("gspo", [54, 55, 62, 63]), ("dapo", []), ("gmpo", [])]:
        kl_coef = 0.1 * (variant != "gmpo")  # without a penalty tokens of weight 0 have no gradient
        batch, options = batch_of((6, 18, 2, 30)), options_for(variant) | {"kl_coef": kl_coef}
        batch["token_weights_N"][::3] = 0
        batch["response_mask_N"][padded] = 0
        pieces, all_rows = [], len(batch["targets_N"])
        for start, stop in itertools.pairwise(batch["cu_seqlens"].tolist()):
            chunks = torch.arange(start, stop).chunk(2 * world.size)
            pieces += [chunks[world.rank], chunks[2 * world.size - 1 - world.rank]]
        rows = torch.cat(pieces)
        own = {k: v[rows] for k, v in batch.items() if k != "weight_VH" and len(v) == all_rows}
        expected_loss, expected_hidden, *expected, expected_stats = fused(batch, **options)
        for loss_of in (partial(loss_of_hidden, chunk=5), loss_of_head):
            group = torch.distributed.group.WORLD
            loss, hidden, weight, stats = fused(batch | own, loss_of, cp_group=group, **options)
            torch.distributed.all_reduce(weight)
            agree((loss, hidden, weight), (expected_loss, expected_hidden[rows], *expected), msg=variant)
            torch.testing.assert_close(stats.mean_log_ratio_S, expected_stats.mean_log_ratio_S, msg=variant)
