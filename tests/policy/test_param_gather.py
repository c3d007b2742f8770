"""Weights that are gathered while the next forward pass computes are those that were gathered before it."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_ibpo.models import read_hf_config
from megatron_ibpo.policy import forward_backward, parallel
from megatron_ibpo.policy.checkpoint import load_checkpoint
from megatron_ibpo.policy.model import build_model
from megatron_ibpo.policy.residence import Held, Residence
from megatron_ibpo.policy.saving import save_checkpoint
from megatron_ibpo.weights.formats.load import load_hf
from support import planned
from support.layouts import layout
from support.train_sequences import sequences
from support.trainers import close_trainer, config_for, open_trainer, weights_of

ROWS = sequences(8)


def config_of(sizes, overlap, **loss):
    gathers = {"overlap_grad_reduce": True, "overlap_param_gather": overlap}
    chosen = layout(**sizes, distributed_optimizer=True, **gathers)
    return config_for(chosen, lr=1e-2, eps_adam=1e-8, num_steps_per_rollout=2, **loss)


def gathering_late():
    """A gather happens when it is waited for: what does not wait reads what was there before."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    gather = Group.start_param_sync

    def start(group, force_sync=False):
        def wait():
            group.param_gather_handle = None
            gather(group, force_sync=True)

        assert not force_sync
        group.param_gather_handle, group.param_gather_dispatched = SimpleNamespace(wait=wait), True

    return mock.patch.object(Group, "start_param_sync", start)


@pytest.mark.parametrize(("family", "sizes", "loss"), [
    pytest.param("delta net", {}, {"fuse_lm_head": True}, marks=pytest.mark.world(2)),
    pytest.param("tied", {"pp": 2}, {"kl_coef": 0.1}, marks=(pytest.mark.world(4), pytest.mark.slow)),
    pytest.param("deltas", {"ep": 2}, {}, marks=(pytest.mark.world(2), pytest.mark.slow)),
])  # fmt: skip
def test_steps_readers_and_checkpoints_are_the_same(world, checkpoints, tmp_path, family, sizes, loss):
    """When gathers come as late as they can. That shows where children of a module are forgotten that are
    read and not called: the convolution of a delta net, a head that the loss takes."""
    hf_dir = checkpoints[family]
    small = partial(forward_backward.DistributedDataParallelConfig, bucket_size=1)

    def opened(config):
        return open_trainer(world, hf_dir, config, hf_dir if config.loss.kl_coef else None)[:2]

    def updated(trainer):
        metrics = planned.update(trainer, ROWS)
        return {name: value for name, value in metrics.items() if "seconds" not in name}

    def trained(config, directory):
        trainer, export = opened(config)
        if trainer.chunks[0].module.pre_process:  # Megatron has one bucket on the stages behind
            assert len(trainer.chunks[0].bucket_groups) > 8, "a bucket for each parameter"
        seen = [updated(trainer), planned.logprobs(trainer, ROWS), weights_of(export)]
        residence = Residence([trainer], world, offload=True)
        residence.leave(Held.NOTHING)
        residence.bring(Held.EVERYTHING)
        saved = save_checkpoint(trainer, directory, 1, {})
        seen += [updated(trainer), weights_of(export)]
        close_trainer()
        trainer, export = opened(config)
        load_checkpoint(trainer, saved)
        resumed = [weights_of(export), updated(trainer), weights_of(export)]
        torch.testing.assert_close(resumed, seen[2:], rtol=0, atol=0)
        close_trainer()
        return seen

    overlapped = config_of(sizes, overlap=True, **loss)
    with mock.patch.object(forward_backward, "DistributedDataParallelConfig", small):
        expected = trained(config_of(sizes, overlap=False, **loss), tmp_path / "before")
        for comes in (gathering_late,) if family == "delta net" else (gathering_late, nullcontext):
            with comes():
                found = trained(overlapped, tmp_path / comes.__name__)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        with gathering_late(), mock.patch.object(forward_backward, "wait_around"):
            metrics = updated(opened(overlapped)[0])
    assert (metrics == expected[0]) == (family == "tied"), "it would have shown"


@pytest.mark.world(1)
def test_weights_that_are_read_before_anything_waits_for_them_are_named(world, checkpoints):
    """The first layer reads the last norm's weight."""
    shape, config = read_hf_config(checkpoints["dense"]), config_of({}, overlap=True)
    parallel.initialize(config.parallel, world, seed=0)
    chunks = build_model(shape, config, device="cpu")
    load_hf(chunks, shape, checkpoints["dense"])
    decoder = chunks[0].decoder

    def read(*_):
        torch.mul(decoder.final_layernorm.weight, 2)

    decoder.layers[0].register_forward_pre_hook(read)
    with pytest.raises(ValueError, match=r"final_layernorm\.weight, which other modules read before"):
        forward_backward.make_trainable(chunks, config, 1e-3, 1)
