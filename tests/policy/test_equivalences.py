"""What must be the same bit for bit: settings that differ in name only move the weights alike."""

from dataclasses import replace

import numpy as np
import pytest

from support.credit_cases import Loop, algorithm, fix_last, of_preset, plain, some_groups
from support.layouts import layout
from support.train_sequences import sequences
from support.trainers import config_for, one_update


@pytest.mark.world(1)
def test_settings_that_differ_in_name_only_move_the_weights_alike(world, checkpoints):
    """Compared after one rollout's two updates, the second of which is off-policy."""

    def moved(rows, variant="grpo"):
        settings = {"num_steps_per_rollout": 2, "lr": 1e-2, "eps_adam": 1e-8, "loss_variant": variant}
        _, weights, _ = one_update(world, checkpoints["dense"], config_for(layout(), **settings), rows)
        return b"".join(tensor.numpy().tobytes() for tensor in weights.values())

    def ones(row):
        return np.ones(len(row.response_token_ids))

    rows = [replace(row, token_weights=None) for row in sequences(8)]
    moved_by = {variant: moved(rows, variant) for variant in ("gspo", "grpo")}
    assert moved_by["gspo"] != moved_by["grpo"]

    # a mask of ones is none
    masked = [replace(row, token_weights=ones(row)) if n % 2 else row for n, row in enumerate(rows)]
    halved = [replace(row, token_weights=0.5 * ones(row)) for row in rows]
    assert moved(masked, "gspo") == moved_by["gspo"] != moved(halved, "gspo")

    # of responses of one token the token ratio is the sequence's
    first = {"rollout_logprobs": None, "loss_mask": np.array([True])}
    single = [replace(row, response_token_ids=row.response_token_ids[:1], **first) for row in rows]
    assert len({moved(single, variant) for variant in ("gspo", "gspo-token", "grpo")}) == 1

    # one advantage for all tokens is the sequence's
    spread = [replace(row, token_advantages=row.advantage * ones(row)) for row in rows]
    assert moved([row if n % 2 else spread[n] for n, row in enumerate(rows)]) == moved_by["grpo"]

    # a sequence whose mean advantage is 0 is trained on where its tokens differ
    still = replace(rows[0], advantage=0.0)
    around = -ones(still) / (len(ones(still)) - 1)
    around[0] = 1.0
    assert moved([still]) != moved([replace(still, token_advantages=around)])


def test_without_shaping_and_corrections_every_variant_gives_the_credit_of_gspo():
    gspo = Loop(fix_last).credit(some_groups(), algorithm(**of_preset("gspo"))).sequences
    for variant in ("base", "ratio"):
        off = algorithm(ibpo_lambda=0.0, ibpo_joint=False, ibpo_variant=variant)
        assert plain(Loop(fix_last).credit(some_groups(), off).sequences) == plain(gspo)
