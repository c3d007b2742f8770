"""The critic: its loss by hand, the same values and gradients under every layout, and resuming."""

from unittest import mock

import numpy as np
import pytest
import torch

from megatron_ibpo.policy import rank as policy_rank
from megatron_ibpo.policy.critic import value_loss
from megatron_ibpo.policy.saving import save_checkpoint
from megatron_ibpo.weights import CheckpointError
from support import planned
from support.critics import critic_config, open_critic, rows_with_returns
from support.layouts import layout
from support.ranks import run_ranks
from support.tiny_models import make_qwen3_next
from support.train_sequences import with_holes
from support.trainers import close_trainer

LR = {"dense": 0.01, "tied": 0.01, "calm": 0.003}
"""For a step of ordinary size: values, of up to 10, move by up to 1. A step of more than they are would blow
rounding up, on every processor differently. So do larger weights than those of `calm` in delta nets."""


def test_the_value_loss_follows_no_farther_than_the_clip():
    value = torch.tensor([0.5, 0.9, 0.1, 1.6, 1.1], requires_grad=True)
    loss, clipped = value_loss(value, torch.tensor([0.4, 0.4, 0.4, 1.5, 1.5]), torch.ones(5), 0.2)
    # within ±.2 of the old value; too far towards the return: as if it were .6; too far away from it: nothing
    # holds it back; the same two from above
    assert loss.tolist() == pytest.approx([0.125, 0.08, 0.405, 0.18, 0.045])
    assert clipped.tolist() == [False, True, False, False, True]
    loss.sum().backward()
    assert value.grad.tolist() == pytest.approx([-0.5, 0, -0.9, 0.6, 0])


def valued(world, cases, rows):
    found = []
    for hf_dir, parallel in cases:
        critic = open_critic(world, hf_dir, critic_config(parallel, lr=LR[hf_dir.name]))
        before, metrics = planned.values(critic, rows), planned.update_values(critic, rows)
        found.append((before, metrics, planned.values(critic, rows)))
        close_trainer()
    return found


def flat(values):
    """Values of all tokens, as float64: their differences round no further."""
    return torch.tensor([v for own in values for v in own], dtype=torch.float64)


SHARDED = layout(distributed_optimizer=True)
LAYOUTS = {2: {"dense": [layout(pp=2), SHARDED], "tied": [layout(tp=2)], "calm": [layout(tp=2, ep=2)]}}
MORE_LAYOUTS = {
    2: {"dense": [layout(cp=2), layout()], "calm": [layout(cp=2), layout(pp=2)]},
    4: {"dense": [layout(tp=2, cp=2)], "tied": [layout(tp=2, pp=2)], "calm": [layout(tp=2, ep=4)]},
}


@pytest.mark.world
@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE_LAYOUTS, marks=pytest.mark.slow)])
def test_values_and_updates_are_the_same_under_every_layout(checkpoints, tmp_path, layouts):
    """Also how far a step along the gradient moves the values. The critic unties embeddings."""
    rows, found = rows_with_returns(), {}
    calm = make_qwen3_next(tmp_path / "calm", 4, std=0.06)
    for size, by_model in ({1: {name: [layout()] for name in LR}} | layouts).items():
        cases = [(name, own) for name, several in by_model.items() for own in several]
        given = [(calm if name == "calm" else checkpoints[name], own) for name, own in cases]
        per_rank = run_ranks(valued, size, given, rows, timeout=240)
        assert all(own == per_rank[0] for own in per_rank), "every rank knows all values"
        for case, result in zip(cases, per_rank[0], strict=True):
            before, metrics, after = result
            expected_before, expected_metrics, expected_after = found.setdefault(case[0], result)
            assert [len(own) for own in before] == [len(row.response_token_ids) for row in rows], (
                case,
                result,
            )
            at_first, wanted = flat(before), flat(expected_before)
            largest = wanted.abs().max().item()
            torch.testing.assert_close(at_first, wanted, rtol=0, atol=1e-5 * largest, msg=str(case))
            moved, wanted_move = flat(after) - at_first, flat(expected_after) - wanted
            farthest = wanted_move.abs().max().item()
            assert 0.2 < farthest < 2, "a step of ordinary size"
            torch.testing.assert_close(moved, wanted_move, rtol=0, atol=2e-4 * farthest, msg=str(case))
            for name in ("critic_loss", "critic_error", "critic_clip_fraction", "critic_grad_norm"):
                assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5), (case, name)


@pytest.mark.world(3)
def test_the_loss_is_the_mean_over_all_trained_tokens(world, checkpoints):
    """Over three data-parallel ranks with uneven shares; with holes, without what a loss mask leaves out."""
    config = critic_config(layout(), lr=LR["dense"], value_clip=0.2)
    for rows in (rows_with_returns(7), with_holes(rows_with_returns(7))):
        critic = open_critic(world, checkpoints["dense"], config)
        values, metrics = planned.values(critic, rows), planned.update_values(critic, rows)
        close_trainer()
        masks = np.concatenate([row.loss_mask for row in rows])
        old, wanted = (flat(getattr(row, name) for row in rows)[masks] for name in ("values", "returns"))
        assert not flat(values)[~masks].any(), rows
        found = flat(values)[masks]
        loss, clipped = value_loss(found, old, wanted, 0.2)
        assert metrics["critic_loss"] == pytest.approx(loss.mean().item(), rel=1e-5), rows
        assert metrics["critic_error"] == pytest.approx((found - wanted).abs().mean().item(), rel=1e-5), rows
        assert metrics["critic_clip_fraction"] == pytest.approx(clipped.double().mean().item()), rows


@pytest.mark.world(2)
def test_a_resumed_critic_continues_bit_for_bit(world, checkpoints, tmp_path):
    rows, config = rows_with_returns(6), critic_config(layout(tp=2), lr=1e-3, eps_adam=1e-8)
    config.model.hf_checkpoint, config.algorithm.advantages = checkpoints["dense"], "critic"

    def opened(checkpoint):
        with mock.patch.object(policy_rank, "start_world", return_value=world):
            rank = policy_rank.TrainerRank(config, checkpoint)
        return rank.trainer, rank.critic

    def gone_on(critic):
        return [planned.update_values(critic, rows) for _ in range(2)], planned.values(critic, rows)

    trainer, critic = opened(None)
    assert not flat(planned.values(critic, rows)).any(), "it starts at 0"
    planned.update(trainer, rows)
    planned.update_values(critic, rows)
    saved = save_checkpoint(trainer, tmp_path, 1, {}, critic)
    alone = save_checkpoint(trainer, tmp_path / "policy alone", 1, {})
    through = gone_on(critic)
    close_trainer()
    assert gone_on(opened(saved)[1]) == through
    close_trainer()
    with pytest.raises(CheckpointError, match="holds no critic"):
        opened(alone)
