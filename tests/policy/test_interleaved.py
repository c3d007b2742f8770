"""An interleaved pipeline, where ranks hold several pieces of the model each, trains as one process does."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ibpo.config import Config, ModelConfig, ParallelConfig
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.plan.memory import rank_memory
from megatron_ibpo.plan.parameter_count import take_census
from megatron_ibpo.policy.overrides import check_overrides, micro_batch_multiple, model_chunks
from megatron_ibpo.policy.planning import cut_shares, deal, empty_micro_batches, plan_update
from support import planned
from support.critics import critic_config, open_critic, rows_with_returns
from support.ranks import run_ranks
from support.tiny_models import make_qwen3, make_qwen3_next
from support.train_sequences import sequences
from support.trainers import EPSILON, LR, assert_close, close_trainer, config_for, open_trainer, weights_of

ONE = (1, 1)
STAGES = (2, 1)
INTERLEAVED = (2, 2)
"""(pipeline stages, pieces of the model on each)."""
MAKE = {
    "dense": partial(make_qwen3, layers=4),
    "tied": partial(make_qwen3, layers=4, tie=True),
    "deep": partial(make_qwen3, layers=8),
    "next": make_qwen3_next,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    return {name: make(place / name, 3, std=0.1) for name, make in MAKE.items()}


def interleaved(layout, config, **parallel):
    stages, chunks = layout
    config.parallel = ParallelConfig(pipeline_model_parallel_size=stages, **parallel)
    if chunks > 1:
        config.model.model_override = (f"virtual_pipeline_model_parallel_size={chunks}",)
    return config


def updated(world, hf_dir, layout, rows, parallel):
    """Log-probs, metrics, weights as loaded, and gradients, of a step held to a reference policy."""
    config = interleaved(layout, config_for(None, max_tokens=60, kl_coef=0.5), **parallel)
    trainer, export, _ = open_trainer(world, hf_dir, config, reference=hf_dir)
    before, logprobs = weights_of(export), planned.logprobs(trainer, rows)
    metrics, after = planned.update(trainer, rows), weights_of(export)
    close_trainer()
    return logprobs, metrics, before, {name: (before[name] - after[name]) * (EPSILON / LR) for name in before}


def all_updated(world, hf_dirs, layout, rows, parallel):
    return [updated(world, hf_dir, layout, rows, parallel) for hf_dir in hf_dirs]


def check_updates(hf_dirs, layout, ranks, **parallel):
    rows = sequences(6)
    expected = run_ranks(all_updated, 1, hf_dirs, ONE, rows, {})[0]
    found = run_ranks(all_updated, ranks, hf_dirs, layout, rows, parallel, timeout=240)
    for number, (logprobs, metrics, before, moved) in enumerate(expected):
        own_logprobs, own_metrics, own_before, own_moved = found[0][number]
        assert all(own_before[name].equal(before[name]) for name in before)
        assert own_moved.keys() == moved.keys() == before.keys(), "every weight has a name"
        assert_close(own_moved, moved)
        for values, wanted in zip(own_logprobs, logprobs, strict=True):
            assert values == pytest.approx(wanted, abs=1e-5)
        for name in {*metrics} - {"seconds_old_logprobs"}:
            assert own_metrics[name] == pytest.approx(metrics[name], rel=2e-4, abs=1e-6), name
            assert all(rank[number][1][name] == own_metrics[name] for rank in found)


SHARED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "expert_model_parallel_size": 2,
}


@pytest.mark.world
@pytest.mark.parametrize(
    ("names", "layout", "ranks", "parallel"),
    [
        pytest.param(["tied", "next"], INTERLEAVED, 2, {}, id="two stages"),
        pytest.param(["next"], INTERLEAVED, 4, SHARED, id="shared optimizer", marks=pytest.mark.slow),
        pytest.param(["deep"], (4, 2), 4, {}, id="four stages", marks=pytest.mark.slow),
    ],
)
def test_logprobs_loss_and_gradients_are_those_of_one_process(models, names, layout, ranks, parallel):
    check_updates([models[name] for name in names], layout, ranks, **parallel)


def criticised(world, hf_dir, layout, rows):
    config = interleaved(layout, critic_config(None, lr=0.01, max_tokens=40))
    critic = open_critic(world, hf_dir, config)
    found = planned.values(critic, rows), planned.update_values(critic, rows), planned.values(critic, rows)
    close_trainer()
    return found


@pytest.mark.world
@pytest.mark.slow
def test_the_critic_is_that_of_one_process(models):
    rows = rows_with_returns()
    before, metrics, after = run_ranks(criticised, 1, models["tied"], ONE, rows)[0]
    for own_before, own_metrics, own_after in run_ranks(criticised, 2, models["tied"], INTERLEAVED, rows):
        assert own_metrics == pytest.approx(metrics, rel=2e-4, abs=1e-6)
        for own, wanted in zip([*own_before, *own_after], [*before, *after], strict=True):
            assert own == pytest.approx(wanted, abs=1e-4)


def test_what_a_stage_holds_is_counted_with_its_pieces(models):
    """The first stage of the tiny Qwen3-Next holds the layers 0 and 2, the last 1 and 3."""
    shape = read_hf_config(models["next"])
    config = interleaved(INTERLEAVED, config_for(None))
    parts = take_census(shape, config, world_size=2).stages
    whole = take_census(shape, interleaved(ONE, config_for(None)), world_size=1)
    assert [part.layers for part in parts] == [2, 2]
    assert sum(part.parameters for part in parts) == whole.total


def test_activations_are_counted_by_what_the_schedule_keeps_alive(models):
    """Of two stages with two pieces each the first has seen 2 + 2 + 1 forward passes through a piece when its
    first backward pass begins, the last 2 + 1; without interleaving 2 and 1 through both."""
    shape = read_hf_config(models["dense"])

    def activations(layout):
        config = interleaved(layout, config_for(None))
        census = take_census(shape, config, world_size=2)
        return [rank_memory(shape, config, part, census, 1000).activations for part in census.stages]

    plain, pieces = activations(STAGES), activations(INTERLEAVED)
    once = plain[0] - plain[1]
    assert once > 0
    assert [own - before for own, before in zip(pieces, plain, strict=True)] == [once / 2, once / 2]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 5))
def test_micro_batches_of_nothing_fill_up_to_what_the_schedule_takes(lengths, ranks, multiple):
    shares = deal(lengths, ranks, planned.cost)
    filled = cut_shares(shares, lengths, 40, planned.cost, multiple)
    plain = cut_shares(shares, lengths, 40, planned.cost)
    for own, before in zip(filled, plain, strict=True):
        assert len(own) % multiple == 0
        assert own[: len(before)] == before
        assert not any(own[len(before) :])
        assert len(own) - len(before) < multiple


def test_they_are_counted():
    config = interleaved(INTERLEAVED, config_for(None, max_tokens=1))
    shares = plan_update([row for row in sequences(9) if row.advantage][:5], config, 1, planned.cost).shares
    assert len(shares[0][0].cut.micro_batches) == 6
    assert empty_micro_batches(shares) == 1


@pytest.mark.parametrize(
    ("stages", "settings", "says"),
    [
        (1, ["virtual_pipeline_model_parallel_size=2"], "needs --pipeline-model-parallel-size of at least 2"),
        (2, ["virtual_pipeline_model_parallel_size=1"], "must be at least 2"),
        (2, ["num_layers_per_virtual_pipeline_stage=1"], "use virtual_pipeline_model_parallel_size"),
        (
            4,
            ["virtual_pipeline_model_parallel_size=2", "microbatch_group_size_per_vp_stage=3"],
            "must be at least --pipeline-model-parallel-size",
        ),
        (
            2,
            ["virtual_pipeline_model_parallel_size=2", "overlap_p2p_comm=false"],
            "would mix up what they send",
        ),
    ],
)
def test_what_the_schedule_cannot_run_is_refused(stages, settings, says):
    config = Config(
        model=ModelConfig(model_override=tuple(settings)),
        parallel=ParallelConfig(pipeline_model_parallel_size=stages),
    )
    with pytest.raises(ValueError, match=says):
        check_overrides(config)


def test_groups_of_micro_batches_may_be_larger_than_the_pipeline():
    config = interleaved(INTERLEAVED, config_for(None))
    assert (model_chunks(config), micro_batch_multiple(config)) == (2, 2)
    config.model.model_override += ("microbatch_group_size_per_vp_stage=3",)
    assert micro_batch_multiple(config) == 3
    assert micro_batch_multiple(interleaved(STAGES, config_for(None))) == 1
