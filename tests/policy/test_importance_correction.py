"""Importance corrections by hand: what weighs how much, and what is counted as cut."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ibpo.config import Config, ConfigError, LossConfig
from megatron_ibpo.policy.importance_correction import (
    Corrected,
    correct,
    correction_metrics,
    is_rejected,
    masked,
    truncated,
)
from megatron_ibpo.policy.packing import pack
from megatron_ibpo.policy.planning import MicroBatch
from megatron_ibpo.run.checks import check_settings
from support.train_sequences import packed


def close(*values):
    return pytest.approx(list(values), rel=1e-6)


def test_a_ratio_counts_up_to_the_clip():
    assert truncated(np.array([0.1, 1.0, 2.0, 7.0]), 2.0).tolist() == [0.1, 1.0, 2.0, 2.0]


def test_a_ratio_counts_between_the_bounds_and_nowhere_else():
    assert masked(np.array([0.4, 0.5, 1.0, 5.0, 5.1]), 0.5, 5.0).tolist() == [0.0, 0.5, 1.0, 5.0, 0.0]


def test_a_sequence_is_rejected_by_its_geometric_mean():
    """√(2 · 1/2) = 1 and √(4 · 1) = 2, however long the sequence is."""
    assert not is_rejected(np.log([2.0, 0.5] * 50), 0.99, 1.01)
    assert is_rejected(np.log([4.0, 1.0] * 50), 0.5, 1.9)
    assert not is_rejected(np.log([4.0, 1.0]), 0.5, 2.1)
    assert is_rejected(np.log([0.25, 1.0]), 0.51, 2.0)


def test_tokens_are_truncated_whatever_the_variant():
    for variant in ("gspo", "gspo-token", "grpo"):
        loss = LossConfig(loss_variant=variant, use_tis=True, tis_clip=1.5)
        found, told = correct(packed([0.5, 3.0], [1.2]), loss)
        assert found.token_weights_R.tolist() == close(0.5, 1.5, 1.2)
        assert found.weights_S.tolist() == [0.5, 0.5]
        assert [(own.member, own.tokens, own.tokens_cut) for own in told] == [(0, 2, 1), (1, 1, 0)]
        assert [own.weight for own in told] == close(2.0, 1.2)


def test_a_mask_multiplies_into_the_weights_that_tokens_have():
    arrays = packed([0.4, 0.8, 6.0], [1.0], token_weights=[[1.0, 0.5, 1.0], [0.25]])
    found, told = correct(arrays, LossConfig(icepop=(0.5, 5.0)))
    assert found.token_weights_R.tolist() == close(0.0, 0.4, 0.0, 0.25)
    assert found.importance_weights_R.tolist() == close(0.0, 0.8, 0.0, 1.0), "in the loss without the mask"
    assert [own.tokens_cut for own in told] == [2, 0]
    assert [own.weight for own in told] == close(0.8, 1.0)


def test_a_rejected_sequence_weighs_nothing_and_stays():
    """Geometric means 2, 1 and 1/2; the tokens of those that stay are truncated as well."""
    arrays = packed([4.0, 1.0], [2.0, 0.5], [0.5], weights=[0.5, 0.25, 1.0])
    found, told = correct(arrays, LossConfig(sequence_rejection=(0.9, 1.1)))
    assert found.importance_weights_R is None
    assert found.weights_S.tolist() == [0.0, 0.25, 0.0]
    assert found.token_weights_R.tolist() == [1.0] * 5
    assert told == [Corrected(0, 2, 0, 0.0), Corrected(1, 2, 0, 2.0), Corrected(2, 1, 0, 0.0)]
    both, _ = correct(arrays, LossConfig(sequence_rejection=(0.9, 1.1), use_tis=True, tis_clip=1.5))
    assert both.weights_S.tolist() == [0.0, 0.25, 0.0]
    assert both.token_weights_R.tolist() == close(1.5, 1.0, 1.5, 0.5, 0.5)


def test_tokens_outside_the_loss_take_no_part():
    """The middle token is a tool's, for which an engine may report anything."""
    arrays = packed([1.2, 1000.0, 0.8], masks=[[True, False, True]])
    arrays.rollout_logprobs_R[1] = math.nan
    loss = LossConfig(icepop=(0.5, 5.0), sequence_rejection=(0.9, 1.1))
    found, (told,) = correct(arrays, loss)
    assert found.token_weights_R.tolist() == close(1.2, 1.0, 0.8)
    assert found.weights_S.tolist() == [0.5]
    assert (told.tokens, told.tokens_cut, told.weight) == (2, 0, pytest.approx(2.0, rel=1e-6))


def test_what_was_cut_is_told_as_shares_of_all():
    """Five tokens of which three are masked; of three sequences one is all masked and one rejected."""
    told = [Corrected(0, 2, 2, 0.0), Corrected(1, 2, 1, 1.5), Corrected(2, 1, 0, 0.0)]
    assert correction_metrics(told) == {
        "importance_weight_mean": 1.5 / 5,
        "importance_token_cut_fraction": 3 / 5,
        "importance_sequence_cut_fraction": 2 / 3,
    }
    assert correction_metrics([]) == {}


def test_a_ratio_beyond_all_numbers_is_cut_and_stays_finite():
    arrays = packed([1.0, 1.0])
    arrays = replace(arrays, old_logprobs_R=np.array([-1e4, 1e4], np.float32))
    for loss in (LossConfig(use_tis=True), LossConfig(icepop=(0.5, 5.0))):
        found, (told,) = correct(replace(arrays, rollout_logprobs_R=np.zeros(2, np.float32)), loss)
        assert np.isfinite(found.token_weights_R).all()
        assert told.tokens_cut == (1 if loss.use_tis else 2)


def test_an_empty_share_has_nothing_to_correct():
    arrays = pack(MicroBatch((), ()))
    assert correct(arrays, LossConfig(use_tis=True)) == (arrays, [])


@given(st.lists(st.lists(st.floats(0.2, 5.0), min_size=1, max_size=6), min_size=2, max_size=6))
def test_how_sequences_are_cut_into_micro_batches_changes_nothing(ratios):
    loss = LossConfig(icepop=(0.5, 2.0), sequence_rejection=(0.8, 1.25))
    whole, told = correct(packed(*ratios), loss)
    alone = [correct(packed(own), loss) for own in ratios]
    assert np.concatenate([a.token_weights_R for a, _ in alone]).tolist() == whole.token_weights_R.tolist()
    assert [own._replace(member=i) for i, (_, (own,)) in enumerate(alone)] == told


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"use_tis": True, "icepop": (0.5, 5.0)}, "--use-tis and --icepop both weight tokens"),
        ({"use_tis": True, "old_logprobs": "engine"}, "--use-tis cannot be combined with --old-logprobs"),
        ({"icepop": (1.1, 5.0)}, r"--icepop: must be two bounds LOW HIGH with 0 <= LOW < 1 < HIGH"),
        ({"sequence_rejection": (1.1, 2.0)}, "--sequence-rejection: must be two bounds"),
        ({"sequence_rejection": (0.9, math.inf)}, "--sequence-rejection: must be a finite number"),
        ({"sequence_rejection": (math.nan, 1.1)}, "--sequence-rejection: must be a finite number"),
        ({"icepop": (0.5, 5.0, 6.0)}, "--icepop: must be two bounds"),
    ],
)
def test_corrections_that_contradict_each_other_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        check_settings(Config(loss=LossConfig(**settings)))


def test_a_mask_and_a_rejection_go_together():
    config = Config(loss=LossConfig(icepop=(0.5, 5.0), sequence_rejection=(0.99, 1.01)))
    with pytest.raises(ConfigError) as refused:  # of the model that is missing, among others
        check_settings(config)
    assert "icepop" not in str(refused.value)
    assert "rejection" not in str(refused.value)
