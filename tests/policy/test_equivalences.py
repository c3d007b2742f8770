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
from support.ranks import run_ranks
from support.tiny_models import make_qwen3
from support.train_sequences import sequences
from support.trainers import close_trainer, config_for, open_trainer

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("model"), 3, std=0.1)


def fingerprints(world, hf_dir, cases):
    """Return hashes of the weights after one rollout's two updates, the second off-policy, for each (loss,
    sequences)."""
    found = []
    for loss, rows in cases:
        config = config_for(layout(), num_steps_per_rollout=2, lr=1e-2, eps_adam=1e-8, **loss)
        trainer, export, _ = open_trainer(world, hf_dir, config)
        planned.update(trainer, rows)
        digest = hashlib.blake2b()
        for _, tensor in export:
            digest.update(tensor.numpy().tobytes())
        found.append(digest.hexdigest())
        close_trainer()
    return found


def moved(model, *cases):
    return run_ranks(fingerprints, 1, model, list(cases))[0]


def test_an_all_ones_mask_is_no_mask(model):
    plain = [replace(s, token_weights=None) for s in sequences(8)]
    ones = [replace(s, token_weights=np.ones(len(s.response_token_ids))) for s in plain]
    mixed = [replace(s, token_weights=None) if n % 2 else s for n, s in enumerate(ones)]
    halved = [replace(s, token_weights=np.full(len(s.response_token_ids), 0.5)) for s in plain]
    first, second, third, other = moved(model, ({}, plain), ({}, ones), ({}, mixed), ({}, halved))
    assert first == second == third
    assert other != first


def test_of_one_token_the_token_ratio_is_the_sequences(model):
    """gspo, its token form and grpo, with one clip range and responses of one token."""
    rng = random.Random(0)
    rows = [
        replace(
            s,
            response_token_ids=token_ids([rng.randrange(2, 64)]),
            loss_mask=np.array([True]),
            token_weights=None,
            rollout_logprobs=None,
        )
        for s in sequences(8)
    ]
    by_variant = moved(model, *(({"loss_variant": v}, rows) for v in ("gspo", "gspo-token", "grpo")))
    assert len(set(by_variant)) == 1
    longer = moved(model, *(({"loss_variant": v}, sequences(8)) for v in ("gspo", "grpo")))
    assert len(set(longer)) == 2


def test_one_advantage_for_all_tokens_is_the_sequences(model):
    rows = sequences(8)
    spread = [replace(s, token_advantages=np.full(len(s.response_token_ids), s.advantage)) for s in rows]
    some = [s if n % 2 else full for n, (s, full) in enumerate(zip(rows, spread, strict=True))]
    by_shape = moved(model, *(({"loss_variant": "grpo"}, given) for given in (rows, spread, some)))
    assert len(set(by_shape)) == 1


def test_token_advantages_alone_move_the_weights(model):
    """A sequence whose mean advantage is 0 is trained on where its tokens differ."""
    (row,) = [replace(s, advantage=0.0, token_weights=None) for s in sequences(2)[:1]]
    tokens = len(row.response_token_ids)
    token_advantages = np.full(tokens, -1.0 / (tokens - 1))
    token_advantages[0] = 1.0
    still, differing = moved(
        model,
        ({"loss_variant": "grpo"}, [row]),
        ({"loss_variant": "grpo"}, [replace(row, token_advantages=token_advantages)]),
    )
    assert still != differing


def test_no_shaping_and_no_joint_training_trains_as_gspo(model):
    """The ratio's credit too: without λ and corrections nothing of either is left."""
    gspo = Loop(fix_last).credit(some_groups(), algorithm(**of_preset("gspo"))).sequences
    off = algorithm(ibpo_lambda=0.0, ibpo_joint=False)
    for variant in ("base", "ratio"):
        of_variant = algorithm(ibpo_lambda=0.0, ibpo_joint=False, ibpo_variant=variant)
        credit = Loop(fix_last).credit(some_groups(), of_variant)
        assert plain(credit.sequences) == plain(gspo)
    by_credit = moved(model, ({}, gspo), ({}, Loop(fix_last).credit(some_groups(), off).sequences))
    assert len(set(by_credit)) == 1
