"""The critic: its loss by hand, the same values and gradients under every layout, and resuming."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_ibpo.policy.critic import value_loss
from megatron_ibpo.weights.weight_errors import CheckpointError
from support import planned
from support.critics import critic_config, open_critic, rows_with_returns
from support.layouts import layout
from support.ranks import run_ranks
from support.tiny_models import make_qwen3, make_qwen3_next
from support.train_sequences import with_holes
from support.trainers import close_trainer, open_trainer

LR = {"dense": 0.01, "tied": 0.01, "next": 0.003}
"""For a step of ordinary size: values, of up to 10, move by up to 1. A step of more than they are would blow
rounding up, on every processor differently. So do larger random weights than these in delta nets."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {
        "dense": make_qwen3(directory / "dense", 3, std=0.1),
        "tied": make_qwen3(directory / "tied", 5, std=0.1, tie=True),
        "next": make_qwen3_next(directory / "next", 4, std=0.06),
    }


# ------------------------------------------------------------------------------------------------- the loss


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "clipped"),
    [
        (0.5, 0.4, 1.0, 0.125, False),  # within ±.2 of the old value
        (0.9, 0.4, 1.0, 0.08, True),  # too far towards the return: as if it were .6
        (0.1, 0.4, 1.0, 0.405, False),  # too far away from it: nothing holds it back
        (1.6, 1.5, 1.0, 0.18, False),
        (1.1, 1.5, 1.0, 0.045, True),
    ],
)
def test_the_value_loss_follows_no_farther_than_the_clip(value, old, target, loss, clipped):
    loss_N, clipped_N = value_loss(torch.tensor([value]), torch.tensor([old]), torch.tensor([target]), 0.2)
    assert loss_N.item() == pytest.approx(loss)
    assert clipped_N.item() is clipped


def test_where_the_clip_counts_there_is_no_gradient():
    values = torch.tensor([0.9, 0.5], requires_grad=True)
    value_loss(values, torch.tensor([0.4, 0.4]), torch.ones(2), 0.2)[0].sum().backward()
    assert values.grad.tolist() == [0.0, pytest.approx(-0.5)]


# -------------------------------------------------------------------------------------------------- layouts


def valued(world, cases, rows):
    """Return, for each (checkpoint, layout): values before, metrics of an update, values after."""
    found = []
    for hf_dir, parallel in cases:
        critic = open_critic(world, hf_dir, critic_config(parallel, lr=LR[hf_dir.name]))
        before, metrics, after = (
            planned.values(critic, rows),
            planned.update_values(critic, rows),
            planned.values(critic, rows),
        )
        found.append((before, metrics, after))
        close_trainer()
    return found


def flat(values):
    """Values of all tokens, as float64: their differences round no further."""
    return torch.tensor([v for own in values for v in own], dtype=torch.float64)


LAYOUTS = {
    "dense": {1: [layout()], 2: [layout(pp=2), layout(distributed_optimizer=True)], 4: []},
    "tied": {1: [layout()], 2: [layout(tp=2)], 4: []},
    "next": {1: [layout()], 2: [layout(tp=2, ep=2)], 4: []},
}
"""Model → ranks → layouts that together take apart what can be taken apart."""
MORE_LAYOUTS = {
    "dense": {
        1: [layout()],
        2: [layout(tp=2), layout(cp=2), layout()],
        4: [layout(tp=2, cp=2), layout(tp=2, pp=2)],
    },
    "tied": {1: [layout()], 2: [], 4: [layout(tp=2, pp=2)]},
    "next": {1: [layout()], 2: [layout(pp=2), layout(cp=2)], 4: [layout(tp=2, ep=4)]},
}


@pytest.mark.world
@pytest.mark.parametrize(
    "layouts",
    [pytest.param(LAYOUTS, id="each kind"), pytest.param(MORE_LAYOUTS, id="more", marks=pytest.mark.slow)],
)
def test_values_and_updates_are_the_same_under_every_layout(checkpoints, layouts):
    """One process against TP2, PP2, DP2, EP2 and products: values, loss, gradient norm, and how far a step
    along the gradient moves the values. Tied embeddings are untied in the critic."""
    rows = rows_with_returns()
    found = {}
    for size in (1, 2, 4):
        cases = [(checkpoints[model], chosen) for model in layouts for chosen in layouts[model][size]]
        if not cases:
            continue
        per_rank = run_ranks(valued, size, cases, rows, timeout=240)
        assert all(ranks == per_rank[0] for ranks in per_rank), "every rank knows all values"
        for (hf_dir, chosen), result in zip(cases, per_rank[0], strict=True):
            found[(hf_dir.name, size, repr(chosen))] = result
    for (family, size, chosen), (before, metrics, after) in found.items():
        expected_before, expected_metrics, expected_after = found[(family, 1, repr(layout(tp=1)))]
        where = (family, size, chosen)
        assert [len(own) for own in before] == [len(row.response_token_ids) for row in rows]
        at_first, wanted = flat(before), flat(expected_before)
        largest = wanted.abs().max().item()
        torch.testing.assert_close(at_first, wanted, rtol=0, atol=1e-5 * largest, msg=str(where))
        moved, wanted_move = flat(after) - at_first, flat(expected_after) - wanted
        farthest = wanted_move.abs().max().item()
        assert 0.2 < farthest < 2, "a step of ordinary size"
        torch.testing.assert_close(moved, wanted_move, rtol=0, atol=2e-4 * farthest, msg=str(where))
        for name in ("critic_loss", "critic_error", "critic_clip_fraction", "critic_grad_norm"):
            assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5), (where, name)


def by_hand(world, hf_dir, cases):
    """Values before an update on each of these rows, and its metrics."""
    found = []
    for rows in cases:
        critic = open_critic(world, hf_dir, critic_config(layout(), lr=LR[hf_dir.name], value_clip=0.2))
        found.append((planned.values(critic, rows), planned.update_values(critic, rows)))
        close_trainer()
    return found


@pytest.mark.world
def test_the_loss_is_the_mean_over_all_trained_tokens(checkpoints):
    """Over three data-parallel ranks with uneven shares; with holes, without what a loss mask leaves out."""
    whole = rows_with_returns(7)
    cases = [whole, with_holes(whole)]
    for found in run_ranks(by_hand, 3, checkpoints["dense"], cases):
        for rows, (values, metrics) in zip(cases, found, strict=True):
            flat = [
                (v, o, r)
                for own, row in zip(values, rows, strict=True)
                for v, o, r, kept in zip(own, row.values, row.returns, row.loss_mask, strict=True)
                if kept
            ]
            v, o, r = torch.tensor(flat, dtype=torch.float64).T
            loss, clipped = value_loss(v, o, r, 0.2)
            assert metrics["critic_loss"] == pytest.approx(loss.mean().item(), rel=1e-5)
            assert metrics["critic_error"] == pytest.approx((v - r).abs().mean().item(), rel=1e-5)
            assert metrics["critic_clip_fraction"] == pytest.approx(clipped.double().mean().item())


# -------------------------------------------------------------------------------------- learning, resuming


def learned(world, hf_dir, rows):
    critic = open_critic(
        world, hf_dir, critic_config(layout(), lr=1e-2, eps_adam=1e-8, value_clip=10.0), head=0.0
    )
    first = planned.values(critic, rows)
    errors = [planned.update_values(critic, rows)["critic_error"] for _ in range(40)]
    close_trainer()
    return first, errors


@pytest.mark.world
def test_a_critic_starts_at_0_and_learns_what_it_is_shown(checkpoints):
    rows = [
        replace(r, returns=np.full(len(r.returns), float(n % 2))) for n, r in enumerate(rows_with_returns(6))
    ]
    first, errors = run_ranks(learned, 1, checkpoints["dense"], rows)[0]
    assert {value for own in first for value in own} == {0.0}
    assert errors[-1] < 0.2 * errors[0]


def save_and_resume(world, hf_dir, rows, directory, resumes):
    """Metrics and values after a checkpoint that is written here or else read; then what is said of one
    without a critic."""
    from megatron_ibpo.policy.checkpoint import load_checkpoint
    from megatron_ibpo.policy.critic import Critic
    from megatron_ibpo.policy.model import build_value_model
    from megatron_ibpo.policy.saving import save_checkpoint
    from megatron_ibpo.weights.formats.load import load_hf
    from megatron_ibpo.weights.formats.run_state import find_checkpoint

    config = critic_config(layout(tp=2), lr=1e-3, eps_adam=1e-8)
    trainer, _, shape = open_trainer(world, hf_dir, config)
    chunks = build_value_model(shape, config)
    load_hf(chunks, shape, hf_dir, head=False)
    critic = Critic(chunks, config, world, total_updates=10)
    planned.update(trainer, rows)
    if resumes:
        load_checkpoint(trainer, find_checkpoint(directory), critic)
    else:
        planned.update_values(critic, rows)
        save_checkpoint(trainer, directory, 1, {}, critic)
    found = [planned.update_values(critic, rows), planned.update_values(critic, rows)]
    found.append(planned.values(critic, rows))
    if resumes:
        alone = save_checkpoint(trainer, directory / "policy alone", 1, {})
        with pytest.raises(CheckpointError, match="holds no critic"):
            load_checkpoint(trainer, alone, critic)
    close_trainer()
    return found


@pytest.mark.world
def test_a_resumed_critic_goes_on_bit_for_bit_and_needs_a_checkpoint_that_holds_one(checkpoints, tmp_path):
    arguments = (checkpoints["dense"], rows_with_returns(6), tmp_path)
    through = run_ranks(save_and_resume, 2, *arguments, False)[0]
    assert run_ranks(save_and_resume, 2, *arguments, True)[0] == through
