"""A training run's checkpoint goes on under another layout as under its own, optimizer included."""

import pytest

from support import planned
from support.layouts import layout
from support.ranks import run_ranks
from support.train_sequences import sequences
from support.trainers import close_trainer, config_for, open_trainer, weights_of

SHARDED = {"distributed_optimizer": True}
"""The optimizer, over data parallel."""
ONE, TP2, PP2 = (1, {}), (2, {"tp": 2}), (2, {"pp": 2})
UNEVEN, INTERLEAVED, EP2 = (2, {"pp": 2, "first": 1}), (2, {"pp": 2, "pieces": 2}), (2, {"ep": 2})
EP2_SHARDED, TP2_DP2 = (2, {"ep": 2, **SHARDED}), (4, {"tp": 2, **SHARDED})
QUICK = [
    ("dense", TP2_DP2, (2, {"pp": 2, **SHARDED})),
    ("deltas", TP2, UNEVEN),
    ("deltas", EP2_SHARDED, (1, SHARDED)),
]
"""Model; ranks and layout where a checkpoint is saved and where it goes on: each kind of parallelism is taken
apart and put together, with either optimizer."""
REST = [
    ("dense", (4, {"cp": 2, **SHARDED}), TP2_DP2),
    *(("next", own, other) for own, other in ((TP2, UNEVEN), (EP2, ONE), (EP2, (2, {"tp": 2, "ep": 2})))),
    *(("next", own, (1, SHARDED)) for own in (EP2_SHARDED, (2, {"cp": 2, **SHARDED}))),
    ("next", (4, {"ep": 2, **SHARDED}), (2, {"tp": 2, "ep": 2, **SHARDED})),
    *(("dense", TP2, other) for other in (ONE, PP2)),
    ("dense", (2, SHARDED), (1, SHARDED)),
    ("deep", ONE, INTERLEAVED),
    ("deep", INTERLEAVED, PP2),
    ("next", PP2, INTERLEAVED),
    *(("next", INTERLEAVED, other) for other in (ONE, INTERLEAVED)),
]


def second_updates(world, cases, saving):
    """Return, for each (checkpoint to start from, where to save, layout): gradient norm and weights of the
    second update, before which the first is made and saved here or else read."""
    from megatron_ibpo.policy.checkpoint import load_checkpoint
    from megatron_ibpo.policy.saving import save_checkpoint
    from megatron_ibpo.weights.formats.run_state import find_checkpoint

    rows, found = sequences(6), []
    for hf_dir, directory, sizes in cases:
        sizes = {"pieces": 1, **sizes}
        pieces = sizes.pop("pieces")
        # a large epsilon: what rounding makes of a gradient near zero does not decide about the step
        config = config_for(layout(**sizes), lr=1e-2, eps_adam=1e-2)
        if pieces > 1:
            config.model.model_override = (f"virtual_pipeline_model_parallel_size={pieces}",)
        trainer, export, _ = open_trainer(world, hf_dir, config)
        if saving:
            planned.update(trainer, rows)
            save_checkpoint(trainer, directory, 1, {})
        else:
            load_checkpoint(trainer, find_checkpoint(directory))
        found.append((planned.update(trainer, rows)["grad_norm"], weights_of(export)))
        close_trainer()
    return found


@pytest.mark.world
@pytest.mark.parametrize("pairs", [QUICK, pytest.param(REST, marks=pytest.mark.slow)])
def test_another_layout_goes_on_from_the_same_state(checkpoints, tmp_path, pairs):
    """All pairs of a size share a world."""
    through, resumed = {}, {}
    for results, saving in ((through, True), (resumed, False)):
        ends = {number: pair[1 if saving else 2] for number, pair in enumerate(pairs)}
        for size in sorted({ranks for ranks, _ in ends.values()}):
            own = [number for number, (ranks, _) in ends.items() if ranks == size]
            cases = [(checkpoints[pairs[n][0]], tmp_path / str(n), ends[n][1]) for n in own]
            found = run_ranks(second_updates, size, cases, saving, timeout=240)[0]
            results |= zip(own, found, strict=True)
    assert len(through) == len(resumed) == len(pairs)
    for number, (norm, weights) in through.items():
        resumed_norm, resumed_weights = resumed[number]
        assert resumed_norm == pytest.approx(norm, rel=1e-5), pairs[number]
        assert resumed_weights.keys() == weights.keys()
        for name, expected in weights.items():
            assert (resumed_weights[name] - expected).abs().max() < 1e-6, (pairs[number], name)


@pytest.mark.world(1)
def test_a_sharded_optimizer_does_not_take_the_state_of_a_whole_one(world, checkpoints, tmp_path):
    from megatron_ibpo.policy.checkpoint import load_checkpoint
    from megatron_ibpo.policy.saving import save_checkpoint

    trainer, _, _ = open_trainer(world, checkpoints["dense"], config_for(layout()))
    saved = save_checkpoint(trainer, tmp_path, 1, {})
    close_trainer()
    trainer, _, _ = open_trainer(world, checkpoints["dense"], config_for(layout(**SHARDED)))
    with pytest.raises(ValueError, match="saved with use_distributed_optimizer=False"):
        load_checkpoint(trainer, saved)
