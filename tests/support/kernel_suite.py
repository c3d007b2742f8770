"""The kernels against the reference in fp64, on the device that the fixture `device` of the importing folder
names: `tests/interpreted` and `tests/gpu` each run all of it."""

from __future__ import annotations

import pytest

from megatron_ibpo.loss import VARIANTS
from support import kernel_cases as cases
from support import linear_cases

VARIANT_NAMES = sorted(VARIANTS)
PENALISED = [f"{name} {kl}" for name in ("gspo", "gmpo", "cispo") for kl in ("k1", "k2", "k3")]
TAKE_TOKEN_ADVANTAGES = [name for name in VARIANT_NAMES if VARIANTS[name].takes_token_advantages]
SLOW = pytest.mark.slow


def mostly(*quick: str, of=VARIANT_NAMES):
    """These variants; `quick` stand for the others where a processor interprets the kernels."""
    return [pytest.param(name, marks=() if name in quick else SLOW) for name in of]


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_every_variant_equals_its_reference(device, variant):
    cases.check_variant(device, variant)


@pytest.mark.parametrize("penalised", mostly("gspo k2", "cispo k3", of=PENALISED))
def test_the_penalty_equals_its_reference(device, penalised):
    cases.check_penalty(device, *penalised.split())


@pytest.mark.parametrize("aggregation", [pytest.param("sequence-mean", marks=SLOW), "token-mean", 9.0])
@pytest.mark.parametrize("variant", mostly("gspo", of=["gspo", "gspo-token", "grpo", "gmpo"]))
def test_aggregations_equal_the_reference(device, variant, aggregation):
    cases.check_aggregation(device, variant, aggregation)


@pytest.mark.parametrize("variant", mostly("gspo-token", "gmpo"))
def test_without_old_log_probs_they_are_the_present_ones(device, variant):
    cases.check_own_old_logprobs(device, variant)


@pytest.mark.parametrize("variant", mostly("gspo-token", "sapo", of=TAKE_TOKEN_ADVANTAGES))
def test_advantages_of_tokens(device, variant):
    cases.check_token_advantages(device, variant)


@pytest.mark.parametrize("variant", mostly("gspo", "gspo-token", "gmpo", "cispo", "sapo"))
def test_tokens_of_probability_0(device, variant):
    cases.check_impossible_tokens(device, variant)


@pytest.mark.parametrize("variant", mostly("gspo", "cispo"))
def test_gradients_equal_finite_differences(device, variant):
    cases.check_finite_differences(device, variant)


@pytest.mark.parametrize("variant", mostly("gspo"))
def test_bf16_logits(device, variant):
    cases.check_bf16(device, variant)


def test_rows_of_several_blocks_and_a_tail(device):
    cases.check_wide_rows(device)


def test_rows_whose_peak_comes_late(device):
    cases.check_rows_with_a_late_peak(device)


@pytest.mark.parametrize("offset", [-40.0, -1e4, -900.0, 900.0])
def test_rows_of_large_logits(device, offset):
    cases.check_rows_of_large_logits(device, offset)


def test_logits_of_minus_infinity_take_no_part(device):
    cases.check_forbidden_tokens(device)


@pytest.mark.parametrize("variant", mostly("gspo", "gspo-token", "gmpo", "cispo", "sapo"))
def test_ratios_that_overflow_give_no_nan(device, variant):
    cases.check_ratio_overflow(device, variant)
    cases.check_overflow_without_advantage(device, variant)


def test_masked_rows_and_empty_sequences(device):
    cases.check_masked_rows(device)


def test_the_gradient_is_written_over_the_logits_once(device):
    cases.check_inplace(device)


def test_padded_vocabulary_takes_no_part(device):
    cases.check_padded_vocabulary(device)


def test_weights_of_one_change_no_bit(device):
    cases.check_weights_of_one_change_nothing(device)


def test_the_order_of_sequences_changes_no_bit(device):
    cases.check_order_of_sequences(device)


@pytest.mark.parametrize("variant", mostly("gspo", of=["gspo", "dapo", "gmpo"]))
def test_training_with_the_kernels_is_training_with_the_reference(device, variant):
    cases.check_training(device, variant)


@pytest.mark.parametrize("variant", mostly("dual-clip", "gmpo", of=linear_cases.FUSED))
def test_the_fused_head_equals_the_loss_of_the_logits(device, variant):
    linear_cases.check_fused_head(device, variant)
