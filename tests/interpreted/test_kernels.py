"""The kernels under Triton's interpreter, against the reference in fp64. `tests/test_kernels.py` runs this
file in a process where TRITON_INTERPRET=1 was set before Triton was imported."""

from __future__ import annotations

import kernel_cases as cases
import pytest

from megatron_ibpo.loss import VARIANTS

VARIANT_NAMES = sorted(VARIANTS)


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_every_variant_equals_its_reference(variant):
    cases.check_variant("cpu", variant)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("variant", ["gspo", "gmpo", "cispo"])
def test_the_penalty_equals_its_reference(variant, kl):
    cases.check_penalty("cpu", variant, kl)


@pytest.mark.parametrize("aggregation", ["sequence-mean", "token-mean", 9.0])
@pytest.mark.parametrize("variant", ["gspo", "gspo-token", "grpo", "gmpo"])
def test_aggregations_equal_the_reference(variant, aggregation):
    cases.check_aggregation("cpu", variant, aggregation)


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_without_old_log_probs_they_are_the_present_ones(variant):
    cases.check_own_old_logprobs("cpu", variant)


@pytest.mark.parametrize("variant", [v for v in VARIANT_NAMES if VARIANTS[v].takes_token_advantages])
def test_advantages_of_tokens(variant):
    cases.check_token_advantages("cpu", variant)


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_gradients_equal_finite_differences(variant):
    cases.check_finite_differences("cpu", variant)


@pytest.mark.parametrize("variant", ["gspo", "grpo"])
def test_bf16_logits(variant):
    cases.check_bf16("cpu", variant)


def test_rows_of_several_blocks_and_a_tail():
    cases.check_wide_rows("cpu")


def test_rows_whose_peak_comes_late():
    cases.check_rows_with_a_late_peak("cpu")


@pytest.mark.parametrize("offset", [-40.0, -1e4, -900.0, 900.0])
def test_rows_of_large_logits(offset):
    cases.check_rows_of_large_logits("cpu", offset)


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("offset", [-1e4, 1e4])
@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_ratios_that_overflow_give_no_nan(variant, offset, advantage):
    cases.check_ratio_overflow("cpu", variant, offset, advantage)


def test_masked_rows_and_empty_sequences():
    cases.check_masked_rows("cpu")


def test_the_gradient_is_written_over_the_logits_once():
    cases.check_inplace("cpu")


def test_padded_vocabulary_takes_no_part():
    cases.check_padded_vocabulary("cpu")


def test_weights_of_one_change_no_bit():
    cases.check_weights_of_one_change_nothing("cpu")


def test_the_order_of_sequences_changes_no_bit():
    cases.check_order_of_sequences("cpu")


@pytest.mark.parametrize("variant", ["gspo", "dapo", "gmpo"])
def test_training_with_the_kernels_is_training_with_the_reference(variant):
    cases.check_training("cpu", variant)


def test_a_target_outside_the_vocabulary_is_named():
    cases.check_targets_outside("cpu")
