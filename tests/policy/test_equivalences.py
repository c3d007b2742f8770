"""What must be the same bit for bit: settings that differ in name only move the weights alike."""

import hashlib
import random
from dataclasses import replace

import numpy as np
import pytest

from megatron_ibpo.basics.records import token_ids
from support import planned
from support.credit_cases import Loop, algorithm, fix_last, of_preset, plain, some_groups
from support.layouts import layout
from support.train_sequences import sequences
from support.trainers import close_trainer, config_for, open_trainer


def ones(row):
    return np.ones(len(row.response_token_ids))


@pytest.mark.world(1)
def test_settings_that_differ_in_name_only_move_the_weights_alike(world, checkpoints):
    """Compared after one rollout's two updates, the second of which is off-policy."""

    def moved(rows, **loss):
        config = config_for(layout(), num_steps_per_rollout=2, lr=1e-2, eps_adam=1e-8, **loss)
        trainer, export, _ = open_trainer(world, checkpoints["dense"], config)
        planned.update(trainer, rows)
        digest = hashlib.blake2b()
        for _, tensor in export:
            digest.update(tensor.numpy().tobytes())
        close_trainer()
        return digest.hexdigest()

    # a mask of ones is none
    rows = sequences(8)
    bare = [replace(row, token_weights=None) for row in rows]
    masked = [replace(row, token_weights=ones(row)) for row in rows]
    mixed = [replace(row, token_weights=None) if n % 2 else row for n, row in enumerate(masked)]
    halved = [replace(row, token_weights=0.5 * ones(row)) for row in rows]
    assert moved(bare) == moved(masked) == moved(mixed) != moved(halved)

    # of responses of one token the token ratio is the sequence's
    rng = random.Random(0)
    single = [
        replace(row, response_token_ids=token_ids([rng.randrange(2, 64)]), loss_mask=np.array([True]))
        for row in rows
    ]
    single = [replace(row, token_weights=None, rollout_logprobs=None) for row in single]
    of_one = [moved(single, loss_variant=variant) for variant in ("gspo", "gspo-token", "grpo")]
    assert len({*of_one}) == 1
    assert moved(rows, loss_variant="gspo") != moved(rows, loss_variant="grpo")

    # one advantage for all tokens is the sequence's
    spread = [replace(row, token_advantages=row.advantage * ones(row)) for row in rows]
    some = [row if n % 2 else full for n, (row, full) in enumerate(zip(rows, spread, strict=True))]
    assert len({moved(given, loss_variant="grpo") for given in (rows, spread, some)}) == 1

    # a sequence whose mean advantage is 0 is trained on where its tokens differ
    still = replace(bare[0], advantage=0.0)
    around = -ones(still) / (len(ones(still)) - 1)
    around[0] = 1.0
    differing = replace(still, token_advantages=around)
    assert moved([still], loss_variant="grpo") != moved([differing], loss_variant="grpo")


def test_without_shaping_and_corrections_every_variant_gives_the_credit_of_gspo():
    gspo = Loop(fix_last).credit(some_groups(), algorithm(**of_preset("gspo"))).sequences
    for variant in ("base", "ratio"):
        off = algorithm(ibpo_lambda=0.0, ibpo_joint=False, ibpo_variant=variant)
        assert plain(Loop(fix_last).credit(some_groups(), off).sequences) == plain(gspo)
