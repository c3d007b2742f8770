"""Learning rate, warm-up and weight decay: by hand, and after a resume."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support import planned
from support.layouts import layout
from support.ranks import run_ranks
from support.train_sequences import sequences
from support.trainers import EPSILON, LR, assert_close, close_trainer, config_for, open_trainer

pytestmark = pytest.mark.world

UPDATES = 10
"""Of a run, as `open_trainer` says to the schedule."""


def scheduled(style="cosine", warmup=0.3, decay=0.1, **settings):
    config = config_for(layout(), **settings)
    optimizer = replace(
        config.optimizer,
        lr_decay_style=style,
        lr_warmup_fraction=warmup,
        weight_decay=decay,
        min_lr_ratio=0.1,
    )
    return replace(config, optimizer=optimizer)


def rates(world, hf_dir, rows, configs):
    found = []
    for config in configs:
        trainer, _, _ = open_trainer(world, hf_dir, config)
        found.append([planned.update(trainer, rows)["learning_rate"] for _ in range(UPDATES // 2)])
        close_trainer()
    return found


def test_the_rate_rises_in_a_line_and_falls_as_the_schedule_says(checkpoints):
    """Peak 1e-3, a tenth of it at the end; of 10 updates 3 are warm-up. A step tells the mean of its two."""
    settings = {"lr": 1e-3, "eps_adam": 1e-8, "num_steps_per_rollout": 2}
    styles = ("cosine", "linear", "constant")
    configs = [scheduled(style, **settings) for style in styles] + [scheduled("cosine", 0.0, **settings)]
    found = run_ranks(rates, 1, checkpoints["dense"], sequences(6), configs)[0]
    share = {
        "cosine": lambda passed: 0.1 + 0.9 * (1 + math.cos(math.pi * passed)) / 2,
        "linear": lambda passed: 1 - 0.9 * passed,
        "constant": lambda passed: 1.0,
    }

    def by_hand(style, warmup):
        after = [share[style]((k - warmup) / (UPDATES - warmup)) for k in range(warmup + 1, UPDATES + 1)]
        each = [k / warmup for k in range(1, warmup + 1)] + after
        return [1e-3 * (one + other) / 2 for one, other in zip(each[::2], each[1::2], strict=True)]

    for own, (style, warmup) in zip(found, [*((style, 3) for style in styles), ("cosine", 0)], strict=True):
        assert own == pytest.approx(by_hand(style, warmup), rel=1e-6), style


def decayed(world, hf_dir, rows):
    """Weights before, and after an update without and with decay."""
    found = []
    for decay in (0.0, 0.1):
        trainer, export, _ = open_trainer(world, hf_dir, scheduled("constant", 0.0, decay))
        before = {name: tensor.clone() for name, tensor in export}
        planned.update(trainer, rows)
        found.append({name: tensor.clone() for name, tensor in export})
        close_trainer()
    return before, *found


def test_decay_takes_its_share_of_every_matrix_and_of_no_norm(checkpoints):
    """AdamW's: lr · decay · weight beside the step itself, which the weight decay does not scale."""
    before, plain, with_decay = run_ranks(decayed, 1, checkpoints["dense"], sequences(6))[0]
    norms = {name for name, tensor in before.items() if tensor.dim() == 1}
    assert norms
    for name, weight in before.items():
        taken = 0.0 * weight if name in norms else LR * 0.1 * weight
        scale = max(taken.abs().max().item(), 1 / EPSILON)
        assert (plain[name] - with_decay[name] - taken).abs().max() < 1e-5 * scale, name


def clipped(world, hf_dir, rows):
    """(gradient by name, norm that is told) without a bound, and with one of half the norm."""
    found, bound = [], 1e9
    for _ in range(2):
        config = scheduled("constant", 0.0, 0.0)
        config = replace(config, optimizer=replace(config.optimizer, clip_grad=bound))
        trainer, export, _ = open_trainer(world, hf_dir, config)
        before = {name: tensor.clone() for name, tensor in export}
        norm = planned.update(trainer, rows)["grad_norm"]
        steps = {name: before[name] - tensor for name, tensor in export}
        # Adam's first step is LR · g / (|g| + EPSILON)
        found.append(({name: EPSILON * step / (LR - step.abs()) for name, step in steps.items()}, norm))
        close_trainer()
        bound = norm / 2
    return found


def test_a_gradient_above_the_bound_is_scaled_to_it_as_a_whole(checkpoints):
    (whole, norm), (scaled, told) = run_ranks(clipped, 1, checkpoints["dense"], sequences(6))[0]
    assert told == norm == pytest.approx(math.sqrt(sum(g.square().sum() for g in whole.values())), rel=1e-3)
    assert_close(scaled, {name: gradient / 2 for name, gradient in whole.items()})


def saved_and_resumed(world, hf_dir, rows, directory, parallel, mode, updates=1):
    from megatron_ibpo.policy.checkpoint import load_checkpoint
    from megatron_ibpo.policy.saving import save_checkpoint
    from megatron_ibpo.weights.formats.run_state import find_checkpoint, load_run_state

    config = replace(scheduled(lr=1e-3, eps_adam=1e-8), parallel=parallel)
    trainer, export, _ = open_trainer(world, hf_dir, config)
    state = None
    if mode == "uninterrupted":
        for _ in range(updates):
            planned.update(trainer, rows)
        save_checkpoint(trainer, Path(directory), 1, {"note": "kept"})
    else:
        found = find_checkpoint(Path(directory))
        state = load_run_state(found)
        load_checkpoint(trainer, found)
    metrics = [planned.update(trainer, rows) for _ in range(4)]
    weights = {name: None if tensor is None else tensor.clone() for name, tensor in export}
    close_trainer()
    told = [(m["grad_norm"], m["learning_rate"]) for m in metrics]
    return (weights if world.is_rank_0 else None), told, state


@pytest.mark.parametrize("family", ["dense", "next"])
def test_a_resumed_trainer_goes_on_bit_for_bit(checkpoints, tmp_path, family):
    """In the midst of warm-up, through the peak, with weight decay."""
    rows = sequences(6)
    parallel = layout(tp=2, ep=2 if family == "next" else 1)
    arguments = (checkpoints[family], rows, str(tmp_path), parallel)
    through = run_ranks(saved_and_resumed, 2, *arguments, "uninterrupted")[0]
    resumed = run_ranks(saved_and_resumed, 2, *arguments, "resumed")[0]
    assert resumed[2] == {"step": 1, "note": "kept"}
    assert through[1] == resumed[1]
    assert len({rate for _, rate in through[1]}) == 4
    for name in through[0]:
        assert torch.equal(through[0][name], resumed[0][name]), name


@pytest.mark.parametrize(("family", "sharded"), [("dense", False), ("dense", True), ("next", False)])
def test_a_run_that_was_saved_before_its_first_update_resumes_bit_for_bit(
    checkpoints, tmp_path, family, sharded
):
    """Where no response was right so far, no advantage is anything but 0, and Adam has no state."""
    rows = sequences(6)
    arguments = (checkpoints[family], rows, str(tmp_path), layout(distributed_optimizer=sharded))
    through = run_ranks(saved_and_resumed, 1, *arguments, "uninterrupted", 0)[0]
    resumed = run_ranks(saved_and_resumed, 1, *arguments, "resumed", 0)[0]
    assert through[1] == resumed[1]
    for name in through[0]:
        assert torch.equal(through[0][name], resumed[0][name]), name
