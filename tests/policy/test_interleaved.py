"""An interleaved pipeline, where ranks hold several pieces of the model each, trains as one process does."""

import pytest

from megatron_ibpo.models import read_hf_config
from megatron_ibpo.plan.memory import rank_memory
from megatron_ibpo.plan.parameter_count import take_census
from megatron_ibpo.policy.overrides import check_overrides, micro_batch_multiple, model_chunks
from megatron_ibpo.policy.planning import empty_micro_batches, plan_update
from support import planned
from support.critics import critic_config, open_critic, rows_with_returns
from support.layouts import layout
from support.ranks import run_ranks
from support.train_sequences import sequences
from support.trainers import EPSILON, LR, assert_close, close_trainer, config_for, open_trainer, weights_of


def interleaved(stages, chunks=2, config=None, **sizes):
    config = config or config_for(None)
    config.parallel = layout(pp=stages, **sizes)
    config.model.model_override = (f"virtual_pipeline_model_parallel_size={chunks}",) if chunks > 1 else ()
    return config


def updated(world, hf_dirs, stages, chunks, rows, sizes):
    """What one step, held to a reference policy, comes to for each model and its critic."""
    found = []
    for hf_dir in hf_dirs:
        config = interleaved(stages, chunks, config_for(None, max_tokens=60, kl_coef=0.5), **sizes)
        trainer, export, _ = open_trainer(world, hf_dir, config, reference=hf_dir)
        before, logprobs = weights_of(export), planned.logprobs(trainer, rows)
        metrics, after = planned.update(trainer, rows), weights_of(export)
        close_trainer()
        moved = {name: (before[name] - after[name]) * (EPSILON / LR) for name in before}
        config = interleaved(stages, chunks, critic_config(None, lr=0.01, max_tokens=40), **sizes)
        critic = open_critic(world, hf_dir, config)
        values, of_critic = planned.values(critic, rows), planned.update_values(critic, rows)
        close_trainer()
        found.append((logprobs + values, metrics | of_critic, before, moved))
    return found


SHARED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "ep": 2}


@pytest.mark.world
@pytest.mark.parametrize(("names", "stages", "ranks", "sizes"), [
    (["deep", "next"], 2, 2, {}),
    pytest.param(["next"], 2, 4, SHARED, marks=pytest.mark.slow),
    pytest.param(["deep"], 4, 4, {}, marks=pytest.mark.slow),
])  # fmt: skip
def test_logprobs_loss_and_gradients_are_those_of_one_process(checkpoints, names, stages, ranks, sizes):
    hf_dirs, rows = [checkpoints[name] for name in names], rows_with_returns()
    expected = run_ranks(updated, 1, hf_dirs, 1, 1, rows, {})[0]
    found = run_ranks(updated, ranks, hf_dirs, stages, 2, rows, sizes, timeout=240)
    for number, (logprobs, metrics, before, moved) in enumerate(expected):
        own_logprobs, own_metrics, own_before, own_moved = found[0][number]
        assert all(own_before[name].equal(before[name]) for name in before)
        assert own_moved.keys() == moved.keys() == before.keys(), "every weight has a name"
        assert_close(own_moved, moved)
        for values, wanted in zip(own_logprobs, logprobs, strict=True):
            assert values == pytest.approx(wanted, abs=1e-5, rel=1e-5)
        for name in {*metrics} - {"seconds_old_logprobs"}:
            assert own_metrics[name] == pytest.approx(metrics[name], rel=2e-4, abs=1e-6), name
            assert all(rank[number][1][name] == own_metrics[name] for rank in found)


def test_what_a_stage_holds_is_counted_with_its_pieces(checkpoints):
    """The first stage of the tiny Qwen3-Next holds the layers 0 and 2, the last 1 and 3. Of two stages with
    two pieces each the first has seen 2 + 2 + 1 forward passes through a piece when its first backward pass
    begins, the last 2 + 1; without interleaving 2 and 1 through both."""
    shape = read_hf_config(checkpoints["next"])
    parts = take_census(shape, interleaved(2), world_size=2).stages
    assert [part.layers for part in parts] == [2, 2]
    whole = take_census(shape, interleaved(1, 1), world_size=1)
    assert sum(part.parameters for part in parts) == whole.total

    def activations(chunks):
        shape, config = read_hf_config(checkpoints["deep"]), interleaved(2, chunks)
        census = take_census(shape, config, world_size=2)
        return [rank_memory(shape, config, part, census, 1000).activations for part in census.stages]

    plain, pieces = activations(1), activations(2)
    once = plain[0] - plain[1]
    assert once > 0
    assert [own - before for own, before in zip(pieces, plain, strict=True)] == [once / 2, once / 2]


def test_micro_batches_of_nothing_are_counted():
    config = interleaved(2, config=config_for(None, max_tokens=1))
    shares = plan_update([row for row in sequences(9) if row.advantage][:5], config, 1, planned.cost).shares
    assert len(shares[0][0].cut.micro_batches) == 6
    assert empty_micro_batches(shares) == 1
    assert (model_chunks(config), micro_batch_multiple(config)) == (2, 2)
    assert micro_batch_multiple(interleaved(2, 1)) == 1
    config.model.model_override += ("microbatch_group_size_per_vp_stage=3",)
    assert micro_batch_multiple(config) == 3, "groups may be larger than the pipeline"


def test_what_the_schedule_cannot_run_is_refused():
    for stages, settings, says in (
        (1, (), "needs --pipeline-model-parallel-size of at least 2"),
        (4, ("microbatch_group_size_per_vp_stage=3",), "must be at least --pipeline-model-parallel-size"),
        (2, ("overlap_p2p_comm=false",), "would mix up what they send"),
    ):
        config = interleaved(stages)
        config.model.model_override += settings
        with pytest.raises(ValueError, match=says):
            check_overrides(config)
