"""Learning rate, warm-up and weight decay: by hand, and after a resume."""

import math
from dataclasses import replace

import pytest
import torch

from support import planned
from support.layouts import layout
from support.ranks import run_ranks
from support.tiny_models import make_qwen3_next
from support.train_sequences import sequences
from support.trainers import (
    EPSILON,
    LR,
    assert_close,
    close_trainer,
    config_for,
    one_update,
    open_trainer,
    weights_of,
)

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
    found = [one_update(world, hf_dir, scheduled("constant", 0.0, decay), rows) for decay in (0.0, 0.1)]
    return found[0][0], *(after for _, after, _ in found)


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
        config.optimizer.clip_grad = bound
        before, after, metrics = one_update(world, hf_dir, config, rows)
        steps = {name: before[name] - tensor for name, tensor in after.items()}
        # Adam's first step is LR · g / (|g| + EPSILON)
        gradients = {name: EPSILON * step / (LR - step.abs()) for name, step in steps.items()}
        found.append((gradients, metrics["grad_norm"]))
        bound = metrics["grad_norm"] / 2
    return found


def test_a_gradient_above_the_bound_is_scaled_to_it_as_a_whole(checkpoints):
    (whole, norm), (scaled, told) = run_ranks(clipped, 1, checkpoints["dense"], sequences(6))[0]
    assert told == norm == pytest.approx(math.sqrt(sum(g.square().sum() for g in whole.values())), rel=1e-3)
    assert_close(scaled, {name: gradient / 2 for name, gradient in whole.items()})


RESUMED = {
    "dense": (2, "dense", layout(tp=2), 1),
    "delta net": (2, "delta net", layout(tp=2, ep=2), 1),
    "dense, before its first update": (1, "dense", layout(), 0),
    "dense, sharded, before its first update": (1, "dense", layout(distributed_optimizer=True), 0),
    "delta net, before its first update": (1, "delta net", layout(), 0),
}
"""Ranks, checkpoint, layout, updates before the run is saved."""


def runs(world, checkpoints, rows, directory, resumes):
    return {
        name: saved_or_resumed(world, checkpoints[family], rows, directory / name, parallel, updates, resumes)
        for name, (ranks, family, parallel, updates) in RESUMED.items()
        if ranks == world.size
    }


def saved_or_resumed(world, hf_dir, rows, directory, parallel, updates, resumes):
    from megatron_ibpo.policy.checkpoint import load_checkpoint
    from megatron_ibpo.policy.saving import save_checkpoint
    from megatron_ibpo.weights.formats.run_state import find_checkpoint, load_run_state

    config = replace(scheduled(warmup=0.2, lr=1e-3, eps_adam=1e-8), parallel=parallel)
    trainer, export, _ = open_trainer(world, hf_dir, config)
    state = None
    if resumes:
        found = find_checkpoint(directory)
        state = load_run_state(found)
        load_checkpoint(trainer, found)
    else:
        for _ in range(updates):
            planned.update(trainer, rows)
        save_checkpoint(trainer, directory, 1, {"note": "kept"})
    metrics = [planned.update(trainer, rows) for _ in range(2)]
    weights = weights_of(export)
    close_trainer()
    return weights, [(m["grad_norm"], m["learning_rate"]) for m in metrics], state


@pytest.fixture(scope="module")
def uninterrupted_and_resumed(checkpoints, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    small = make_qwen3_next(directory / "model", 4, std=0.1, layers=1)
    arguments = ({**checkpoints, "delta net": small}, sequences(6), directory)
    return [
        run_ranks(runs, 1, *arguments, resumes)[0] | run_ranks(runs, 2, *arguments, resumes)[0]
        for resumes in (False, True)
    ]


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_trainer_goes_on_bit_for_bit(uninterrupted_and_resumed, name):
    """It resumes in the midst of warm-up, through the peak, with weight decay. And before the first update:
    where no response was right so far, no advantage is anything but 0, and Adam has no state."""
    (weights, told, _), (resumed, resumed_told, state) = (found[name] for found in uninterrupted_and_resumed)
    assert state == {"step": 1, "note": "kept"}
    assert told == resumed_told
    assert len({rate for _, rate in told}) == 2
    assert weights.keys() == resumed.keys()
    for tensor, expected in weights.items():
        assert torch.equal(expected, resumed[tensor]), tensor
