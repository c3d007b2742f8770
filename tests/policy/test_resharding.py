"""A training run's checkpoint goes on under another layout as under its own, optimizer included."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from support import planned
from support.layouts import layout
from support.ranks import run_ranks
from support.tiny_models import make_qwen3, make_qwen3_next
from support.train_sequences import sequences
from support.trainers import close_trainer, config_for, open_trainer

pytestmark = pytest.mark.world


SHARDED = {"distributed_optimizer": True}
PAIRS = {
    "dense CP2 DP2 to TP2 DP2, sharded": (4, layout(cp=2, **SHARDED), 4, layout(tp=2, **SHARDED)),
    "next CP2 to one rank, sharded": (2, layout(cp=2, **SHARDED), 1, layout(**SHARDED)),
    "dense TP2 to one rank": (2, layout(tp=2), 1, layout()),
    "dense TP2 to PP2": (2, layout(tp=2), 2, layout(pp=2)),
    "dense DP2 to one rank, sharded": (2, layout(**SHARDED), 1, layout(**SHARDED)),
    "dense TP2 DP2 to PP2, sharded": (4, layout(tp=2, **SHARDED), 2, layout(pp=2, **SHARDED)),
    "next EP2 to one rank": (2, layout(ep=2), 1, layout()),
    "next EP2 to TP2 EP2": (2, layout(ep=2), 2, layout(tp=2, ep=2)),
    "next TP2 to uneven PP2": (2, layout(tp=2), 2, layout(pp=2, first=1)),
    "next EP2 to one rank, sharded": (2, layout(ep=2, **SHARDED), 1, layout(**SHARDED)),
    "next EP2 DP2 to TP2 EP2, sharded": (4, layout(ep=2, **SHARDED), 2, layout(tp=2, ep=2, **SHARDED)),
}
"""Ranks and layout that save, ranks and layout that load; "sharded": the optimizer, over data parallel."""
QUICK = [
    "dense TP2 to one rank",
    "dense TP2 DP2 to PP2, sharded",
    "next TP2 to uneven PP2",
    "next EP2 DP2 to TP2 EP2, sharded",
]
"""Each kind of parallelism taken apart and put together, with either optimizer; the rest is slow."""


def go_on(world, cases, saving):
    """For each (name, checkpoint to start from, where to save, layout): weights and gradient norms of two
    updates after a first one, which is made and saved here or else read."""
    return {
        name: updates(world, hf_dir, directory, parallel, saving)
        for name, hf_dir, directory, parallel in cases
    }


def updates(world, hf_dir, directory, parallel, saving):
    from megatron_ibpo.policy.checkpoint import load_checkpoint
    from megatron_ibpo.policy.saving import save_checkpoint
    from megatron_ibpo.weights.formats.run_state import find_checkpoint

    # a large epsilon: what rounding makes of a gradient near zero does not decide about the step
    trainer, export, _ = open_trainer(world, hf_dir, config_for(parallel, lr=1e-2, eps_adam=1e-2))
    rows = sequences(6)
    if saving:
        planned.update(trainer, rows)
        save_checkpoint(trainer, directory, 1, {})
    else:
        load_checkpoint(trainer, find_checkpoint(directory))
    norms = [planned.update(trainer, rows)["grad_norm"] for _ in range(2)]
    weights = {name: None if tensor is None else tensor.clone() for name, tensor in export}
    close_trainer()
    return weights, norms


REST = [name for name in PAIRS if name not in QUICK]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return went_on(QUICK, tmp_path_factory.mktemp("resharding"))


@pytest.fixture(scope="module")
def rest(tmp_path_factory):
    return went_on(REST, tmp_path_factory.mktemp("resharding"))


def went_on(names, directory):
    """By pair: what goes on in the first layout, and in the second. All pairs of a size share a world."""
    models = {
        "dense": make_qwen3(directory / "dense", 3, std=0.1),
        "next": make_qwen3_next(directory / "next", 4, std=0.1),
    }
    through, resumed = {}, {}
    for results, saving in ((through, True), (resumed, False)):
        for size in (1, 2, 4):
            cases = [
                (name, models[name.split()[0]], directory / name, before if saving else after)
                for name, (old_size, before, new_size, after) in ((name, PAIRS[name]) for name in names)
                if size == (old_size if saving else new_size)
            ]
            if cases:
                results |= run_ranks(go_on, size, cases, saving, timeout=240)[0]
    return {name: (through[name], resumed[name]) for name in names}


@pytest.mark.parametrize(
    ("computed", "name"),
    [
        *(pytest.param("quick", name, id=name) for name in QUICK),
        *(pytest.param("rest", name, id=name, marks=pytest.mark.slow) for name in REST),
    ],
)
def test_another_layout_goes_on_from_the_same_state(request, computed, name):
    (weights, norms), (resumed_weights, resumed_norms) = request.getfixturevalue(computed)[name]
    assert resumed_norms == pytest.approx(norms, rel=1e-5)
    for tensor, expected in weights.items():
        assert (resumed_weights[tensor] - expected).abs().max() < 1e-6, tensor


def load_with_other_optimizer(world, hf_dir, directory):
    from megatron_ibpo.policy.checkpoint import load_checkpoint
    from megatron_ibpo.policy.saving import save_checkpoint

    trainer, _, _ = open_trainer(world, hf_dir, config_for(layout()))
    saved = save_checkpoint(trainer, directory, 1, {})
    close_trainer()
    trainer, _, _ = open_trainer(world, hf_dir, config_for(layout(distributed_optimizer=True)))
    with pytest.raises(ValueError, match="saved with use_distributed_optimizer=False"):
        load_checkpoint(trainer, saved)
    close_trainer()


def test_a_sharded_optimizer_does_not_take_the_state_of_a_whole_one(tmp_path):
    run_ranks(load_with_other_optimizer, 1, make_qwen3(tmp_path / "dense", 3), tmp_path)


def gathered(world, hf_dir):
    """Elements of optimizer state that this rank holds for a checkpoint, which takes no memory of the device;
    and all that its parameters have."""
    from megatron_ibpo.policy.checkpoint import saved_state

    trainer, _, _ = open_trainer(world, hf_dir, config_for(layout(distributed_optimizer=True)))
    planned.update(trainer, sequences(6))
    with mock.patch.object(torch.Tensor, "cuda", side_effect=AssertionError("on the device")):
        state = saved_state(trainer)["optimizer"]["param_state"]
    elements = sum(shard.data.numel() for tensors in (state or {}).values() for shard in tensors.values())
    parameters = sum(parameter.numel() for parameter in trainer.chunks[0].parameters())
    close_trainer()
    return elements, parameters


def test_a_sharded_optimizer_is_gathered_in_main_memory_by_one_rank_alone(tmp_path):
    (first, parameters), (second, _) = run_ranks(gathered, 2, make_qwen3(tmp_path / "dense", 3))
    assert (first, second) == (3 * parameters, 0)  # fp32 weights and both moments
