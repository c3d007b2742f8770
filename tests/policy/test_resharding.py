"""A training run's checkpoint goes on under another layout as under its own, optimizer included."""

import pytest

from support import planned
from support.layouts import layout
from support.ranks import run_ranks
from support.tiny_models import make_qwen3, make_qwen3_next
from support.train_sequences import sequences
from support.trainers import close_trainer, config_for, open_trainer, weights_of

pytestmark = pytest.mark.world


def on(ranks, pieces=1, **sizes):
    """Return (ranks, layout, pieces of the model on each pipeline stage)."""
    return ranks, layout(**sizes), pieces


SHARDED = {"distributed_optimizer": True}
QUICK = {
    "dense TP2 DP2 to PP2, sharded": (on(4, tp=2, **SHARDED), on(2, pp=2, **SHARDED)),
    "deltas TP2 to uneven PP2": (on(2, tp=2), on(2, pp=2, first=1)),
    "deltas EP2 to one rank, sharded": (on(2, ep=2, **SHARDED), on(1, **SHARDED)),
}
"""Where a checkpoint is saved and where it goes on: each kind of parallelism taken apart and put together,
with either optimizer; "sharded": the optimizer, over data parallel."""
REST = {
    "dense CP2 DP2 to TP2 DP2, sharded": (on(4, cp=2, **SHARDED), on(4, tp=2, **SHARDED)),
    "next TP2 to uneven PP2": (on(2, tp=2), on(2, pp=2, first=1)),
    "next EP2 to one rank, sharded": (on(2, ep=2, **SHARDED), on(1, **SHARDED)),
    "next CP2 to one rank, sharded": (on(2, cp=2, **SHARDED), on(1, **SHARDED)),
    "dense TP2 to one rank": (on(2, tp=2), on(1)),
    "dense TP2 to PP2": (on(2, tp=2), on(2, pp=2)),
    "dense DP2 to one rank, sharded": (on(2, **SHARDED), on(1, **SHARDED)),
    "next EP2 to one rank": (on(2, ep=2), on(1)),
    "next EP2 to TP2 EP2": (on(2, ep=2), on(2, tp=2, ep=2)),
    "next EP2 DP2 to TP2 EP2, sharded": (on(4, ep=2, **SHARDED), on(2, tp=2, ep=2, **SHARDED)),
    "deep one rank to interleaved PP2": (on(1), on(2, pp=2, pieces=2)),
    "deep interleaved PP2 to PP2": (on(2, pp=2, pieces=2), on(2, pp=2)),
    "next PP2 to interleaved PP2": (on(2, pp=2), on(2, pp=2, pieces=2)),
    "next interleaved PP2 to one rank": (on(2, pp=2, pieces=2), on(1)),
    "next interleaved PP2 to the same": (on(2, pp=2, pieces=2), on(2, pp=2, pieces=2)),
}


def go_on(world, cases, saving):
    """Return, for each (name, checkpoint to start from, where to save, layout, pieces): gradient norm and
    weights of the second update, before which the first is made and saved here or else read."""
    return {name: second_update(world, saving, *case) for name, *case in cases}


def second_update(world, saving, hf_dir, directory, parallel, pieces):
    from megatron_ibpo.policy.checkpoint import load_checkpoint
    from megatron_ibpo.policy.saving import save_checkpoint
    from megatron_ibpo.weights.formats.run_state import find_checkpoint

    # a large epsilon: what rounding makes of a gradient near zero does not decide about the step
    config = config_for(parallel, lr=1e-2, eps_adam=1e-2)
    if pieces > 1:
        config.model.model_override = (f"virtual_pipeline_model_parallel_size={pieces}",)
    trainer, export, _ = open_trainer(world, hf_dir, config)
    rows = sequences(6)
    if saving:
        planned.update(trainer, rows)
        save_checkpoint(trainer, directory, 1, {})
    else:
        load_checkpoint(trainer, find_checkpoint(directory))
    norm, weights = planned.update(trainer, rows)["grad_norm"], weights_of(export)
    close_trainer()
    return norm, weights


@pytest.mark.parametrize(
    "pairs", [pytest.param(QUICK, id="each kind"), pytest.param(REST, id="more", marks=pytest.mark.slow)]
)
def test_another_layout_goes_on_from_the_same_state(tmp_path, pairs):
    """All pairs of a size share a world."""
    models = {
        "dense": make_qwen3(tmp_path / "dense", 3, std=0.1),
        "deep": make_qwen3(tmp_path / "deep", 3, std=0.1, layers=4),
        "deltas": make_qwen3_next(tmp_path / "deltas", 4, std=0.1, layers=3),
        "next": make_qwen3_next(tmp_path / "next", 4, std=0.1),
    }
    through, resumed = {}, {}
    for results, end in ((through, 0), (resumed, 1)):
        for size in sorted({pair[end][0] for pair in pairs.values()}):
            cases = [
                (name, models[name.split()[0]], tmp_path / name, *pair[end][1:])
                for name, pair in pairs.items()
                if pair[end][0] == size
            ]
            results |= run_ranks(go_on, size, cases, end == 0, timeout=240)[0]
    assert through.keys() == resumed.keys() == pairs.keys()
    for name, (norm, weights) in through.items():
        resumed_norm, resumed_weights = resumed[name]
        assert resumed_norm == pytest.approx(norm, rel=1e-5), name
        assert resumed_weights.keys() == weights.keys()
        for tensor, expected in weights.items():
            assert (resumed_weights[tensor] - expected).abs().max() < 1e-6, (name, tensor)


def load_with_other_optimizer(world, hf_dir, directory):
    from megatron_ibpo.policy.checkpoint import load_checkpoint
    from megatron_ibpo.policy.saving import save_checkpoint

    trainer, _, _ = open_trainer(world, hf_dir, config_for(layout()))
    saved = save_checkpoint(trainer, directory, 1, {})
    close_trainer()
    trainer, _, _ = open_trainer(world, hf_dir, config_for(layout(**SHARDED)))
    with pytest.raises(ValueError, match="saved with use_distributed_optimizer=False"):
        load_checkpoint(trainer, saved)
    close_trainer()


def test_a_sharded_optimizer_does_not_take_the_state_of_a_whole_one(tmp_path):
    run_ranks(load_with_other_optimizer, 1, make_qwen3(tmp_path / "dense", 3), tmp_path)
