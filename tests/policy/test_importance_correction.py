"""Importance corrections by hand: what weighs how much, and what is counted as cut."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ibpo.config import Config, ConfigError, LossConfig
from megatron_ibpo.policy.importance_correction import Corrected, correct, correction_metrics, is_rejected
from megatron_ibpo.policy.packing import pack
from megatron_ibpo.policy.planning import MicroBatch
from megatron_ibpo.run.checks import check_settings
from support.train_sequences import packed


def close(*values):
    return pytest.approx(list(values), rel=1e-6)


def test_a_rejected_sequence_weighs_nothing_and_stays():
    """By its geometric mean: √(2 · 1/2) = 1 and √(4 · 1) = 2. Tokens may be truncated as well."""
    assert is_rejected(np.log([4.0, 1.0] * 50), 0.5, 1.9)
    assert not is_rejected(np.log([4.0, 1.0] * 50), 0.5, 2.1)
    arrays = packed([4.0, 1.0], [2.0, 0.5], [0.5], weights=[0.5, 0.25, 1.0])
    found, told = correct(arrays, LossConfig(sequence_rejection=(0.9, 1.1)))
    assert found.importance_weights_R is None
    assert found.weights_S.tolist() == [0.0, 0.25, 0.0]
    assert found.token_weights_R.tolist() == [1.0] * 5
    assert told == [Corrected(0, 2, 0, 0.0), Corrected(1, 2, 0, 2.0), Corrected(2, 1, 0, 0.0)]
    assert [*correction_metrics(told).values()] == [2.0 / 5, 0.0, 2 / 3], "shares of all"
    both, told = correct(arrays, LossConfig(sequence_rejection=(0.9, 1.1), use_tis=True, tis_clip=1.5))
    assert [own.tokens_cut for own in told] == [1, 1, 0]
    assert both.weights_S.tolist() == [0.0, 0.25, 0.0]
    assert both.token_weights_R.tolist() == close(1.5, 1.0, 1.5, 0.5, 0.5)


def test_tokens_outside_the_loss_take_no_part_and_a_mask_multiplies_into_their_weights():
    """The middle token is a tool's, for which an engine may report anything."""
    arrays = packed([1.2, 1000.0, 0.8], masks=[[True, False, True]], token_weights=[[0.5, 1.0, 1.0]])
    arrays.rollout_logprobs_R[1] = math.nan
    found, (told,) = correct(arrays, LossConfig(icepop=(0.5, 5.0), sequence_rejection=(0.9, 1.1)))
    assert found.token_weights_R.tolist() == close(0.6, 1.0, 0.8)
    assert found.importance_weights_R.tolist() == close(1.2, 1.0, 0.8), "in the loss without the mask"
    assert found.weights_S.tolist() == [0.5]
    assert (told.tokens, told.tokens_cut, told.weight) == (2, 0, pytest.approx(2.0, rel=1e-6))


def test_a_ratio_beyond_all_numbers_is_cut_and_stays_finite_and_no_sequence_has_none():
    arrays = replace(packed([1.0, 1.0]), old_logprobs_R=np.array([-1e4, 1e4], np.float32))
    for loss, cut in ((LossConfig(use_tis=True), 1), (LossConfig(icepop=(0.5, 5.0)), 2)):
        found, (told,) = correct(replace(arrays, rollout_logprobs_R=np.zeros(2, np.float32)), loss)
        assert np.isfinite(found.token_weights_R).all()
        assert told.tokens_cut == cut
    empty = pack(MicroBatch((), ()))
    assert correct(empty, LossConfig(use_tis=True)) == (empty, [])
    assert correction_metrics([]) == {}


@given(st.lists(st.lists(st.floats(0.2, 5.0), min_size=1, max_size=6), min_size=2, max_size=6))
def test_how_sequences_are_cut_into_micro_batches_changes_nothing(ratios):
    loss = LossConfig(icepop=(0.5, 2.0), sequence_rejection=(0.8, 1.25))
    whole, told = correct(packed(*ratios), loss)
    alone = [correct(packed(own), loss) for own in ratios]
    assert np.concatenate([a.token_weights_R for a, _ in alone]).tolist() == whole.token_weights_R.tolist()
    assert [own._replace(member=i) for i, (_, (own,)) in enumerate(alone)] == told


def test_corrections_that_contradict_each_other_are_refused():
    bounds = "must be two bounds LOW HIGH with 0 <= LOW < 1 < HIGH"
    for settings, says in (
        ({"use_tis": True, "icepop": (0.5, 5.0)}, "--use-tis and --icepop both weight tokens"),
        ({"use_tis": True, "old_logprobs": "engine"}, "--use-tis cannot be combined with --old-logprobs"),
        ({"icepop": (0.5, 5.0, 6.0)}, f"--icepop: {bounds}"),
        ({"sequence_rejection": (1.1, 2.0)}, f"--sequence-rejection: {bounds}"),
        ({"sequence_rejection": (0.9, math.inf)}, "--sequence-rejection: must be a finite number"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_settings(Config(loss=LossConfig(**settings)))
