"""Rows that need no logits are in none of the LM head's products, and nothing else changes."""

from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_ibpo.loss import VARIANTS
from support.linear_cases import FUSED, H, V, batch_of, fused, options_for, plain
from support.loss_calls import loss_of_head, loss_of_hidden

LENGTHS = (1, 5, 17, 2, 30, 3)
OF_PRODUCT = 2 * H * V
IN_PLACE = {torch.ops.aten.addmm_: lambda _, a, b, out_shape=None, **__: 2 * a[0] * a[1] * b[1]}


def partly_weighted(lengths=LENGTHS):
    """Sequences some of whose tokens, and one of which, have weight 0; others have advantage 0."""
    batch = batch_of(lengths)
    batch["token_weights_N"][::3] = 0.0
    batch["sequence_weights_S"][-1] = 0.0
    return batch


def num_rows(batch):
    """Return the number of response rows, and of those with a gradient."""
    sequence_N = torch.repeat_interleave(torch.arange(len(batch["advantages"])), batch["cu_seqlens"].diff())
    is_response = batch["response_mask_N"].bool()
    weight_N = batch["token_weights_N"] * (batch["advantages"] * batch["sequence_weights_S"])[sequence_N]
    return int(is_response.sum()), int((is_response & (weight_N != 0)).sum())


@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_it_equals_the_loss_of_all_logits(variant, kl_coef):
    batch, options = partly_weighted(), options_for(variant) | {"kl_coef": kl_coef}
    expected = plain(batch, **options)
    chunked = [partial(loss_of_hidden, chunk=chunk) for chunk in (1, 7, 1000)] if variant in FUSED else []
    for loss_of in (loss_of_head, *chunked):
        found = fused(batch, loss_of, **options)
        for ours, theirs in zip(found[:3], expected[:3], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
        for name, theirs in vars(expected[3]).items():
            torch.testing.assert_close(getattr(found[3], name), theirs)


@pytest.mark.parametrize(
    ("loss_of", "kl_coefs"),
    [
        (loss_of_head, (0.0, 0.05)),
        (loss_of_hidden, (0.0, 0.05)),
        (partial(loss_of_hidden, chunk=4), (0.0,)),  # a penalty's rows are apart from an open sequence's
    ],
)
def test_products_are_of_the_rows_that_need_them(loss_of, kl_coefs):
    """One of each response row, two more of each row with a gradient. A penalty reaches all of them."""
    batch = partly_weighted()
    rows, with_gradient = num_rows(batch)
    assert 0 < with_gradient < rows / 2 < len(batch["targets_N"]) / 2
    for kl_coef in kl_coefs:
        penalised = batch if kl_coef else {**batch, "ref_logprobs_N": None}
        with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
            fused(penalised, loss_of, kl_coef=kl_coef)
        in_backward = rows if kl_coef else with_gradient
        assert counter.get_total_flops() == OF_PRODUCT * (rows + 2 * in_backward), kl_coef


@pytest.mark.parametrize("loss_of", [loss_of_head, loss_of_hidden])
def test_a_batch_without_any_gradient_has_metrics(loss_of):
    batch = batch_of((3, 4))
    batch["advantages"][:] = 0.0
    loss, hidden, weight, stats = fused(batch, loss_of)
    assert (loss, hidden.any(), weight.any()) == (0, False, False)
    expected = plain(batch)[3]
    torch.testing.assert_close(stats.logprobs_N, expected.logprobs_N)
    torch.testing.assert_close(stats.entropy_N, expected.entropy_N)
