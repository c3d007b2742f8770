"""Megatron's other ways to keep an optimizer and to reduce gradients take the same steps."""

from functools import partial
from unittest import mock

import pytest
import torch

from megatron_ibpo.config import ConfigError, ParallelConfig
from megatron_ibpo.run.settings import parse_config
from support import planned
from support.ranks import run_ranks
from support.tiny_models import make_qwen3
from support.train_sequences import sequences
from support.trainers import close_trainer, config_for, open_trainer, weights_of

OVERLAP = {"whole": ParallelConfig(), "sharded": ParallelConfig(use_distributed_optimizer=True)}


def overlapped(world, hf_dir, rows):
    """Return by layout: gradient norms of two updates with one reduction after the backward pass, and with
    many during it; and how many."""
    from megatron_ibpo.policy import forward_backward as module

    found, small = {}, partial(module.DistributedDataParallelConfig, bucket_size=4000)
    for name, parallel in OVERLAP.items():
        for overlap in (False, True):
            parallel.overlap_grad_reduce = overlap
            with mock.patch.object(module, "DistributedDataParallelConfig", small):
                trainer, export, _ = open_trainer(world, hf_dir, config_for(parallel, lr=1e-3, eps_adam=1e-2))
            norms = [planned.update(trainer, rows)["grad_norm"] for _ in range(2)]
            found[name, overlap] = norms, weights_of(export), len(trainer.chunks[0].bucket_groups)
            close_trainer()
    return found


@pytest.mark.world
def test_gradients_reduced_during_the_backward_pass_are_the_same(tmp_path):
    found = run_ranks(overlapped, 2, make_qwen3(tmp_path / "dense", 3, std=0.1), sequences(6))[0]
    for name in OVERLAP:
        (norms, weights, one), (other_norms, other_weights, many) = found[name, False], found[name, True]
        assert (one, many > 4) == (1, True)
        assert other_norms == pytest.approx(norms, rel=1e-6)
        for tensor, own in weights.items():
            assert torch.allclose(other_weights[tensor], own, atol=1e-6)


def as_on_gpus(method):
    """Megatron's choice of what goes to the host, made as if the optimizer's parameters were on a GPU."""

    def choose(self, fraction):
        device = {own.untyped_storage().data_ptr() for group in self.param_groups for own in group["params"]}
        on_device = property(lambda tensor: tensor.untyped_storage().data_ptr() in device)
        with (
            mock.patch.object(torch.Tensor, "is_cuda", on_device),
            mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
        ):
            return method(self, fraction)

    return choose


def kept_on_the_host(world, hf_dir, rows, directory):
    """Gradient norms and weights: of an optimizer on the device, of one in host memory that saves itself and
    makes room on the way, and of each resumed from that checkpoint."""
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer as Hybrid

    from megatron_ibpo.policy.checkpoint import load_checkpoint
    from megatron_ibpo.policy.residence import Held, Residence
    from megatron_ibpo.policy.saving import save_checkpoint

    found = {}

    def opened(offload):
        config = config_for(ParallelConfig(use_distributed_optimizer=True), lr=1e-3, eps_adam=1e-2)
        config.model.bf16 = True
        config.optimizer.use_precision_aware_optimizer = config.optimizer.optimizer_cpu_offload = offload
        trainer, export, _ = open_trainer(world, hf_dir, config)
        for part in trainer.optimizer.chained_optimizers:
            part.optimizer.pin_cpu_grads = False  # needs CUDA
        return trainer, export, lambda: planned.update(trainer, rows)["grad_norm"]

    def close(name, norms, export):
        found[name] = norms, weights_of(export)
        close_trainer()

    _, export, update = opened(False)
    close("device", [update() for _ in range(2)], export)
    choose = as_on_gpus(Hybrid._get_sub_optimizer_param_groups)
    with (
        mock.patch.object(Hybrid, "_get_sub_optimizer_param_groups", choose),
        mock.patch.object(distrib_optimizer, "HAVE_APEX_OR_TE", True),
    ):
        trainer, export, update = opened(True)
        norms = [update()]
        residence = Residence([trainer], world, offload=True)
        residence.leave(Held.NOTHING)
        residence.bring(Held.EVERYTHING)
        saved = save_checkpoint(trainer, directory, 1, {})
        close("host", [*norms, update()], export)
        trainer, export, update = opened(True)
        load_checkpoint(trainer, saved)
        close("host, resumed", [update()], export)
    trainer, export, update = opened(False)
    load_checkpoint(trainer, saved)
    close("device, resumed", [update()], export)
    return found


@pytest.mark.world
def test_an_optimizer_in_host_memory_takes_the_same_steps_and_goes_on_from_its_checkpoint(tmp_path):
    model = make_qwen3(tmp_path / "dense", 3, std=0.1)
    found = run_ranks(kept_on_the_host, 2, model, sequences(6), tmp_path / "checkpoints")[0]
    norms, weights = found["device"]
    assert found["host"][0] == pytest.approx(norms, rel=1e-3)
    for name, own in weights.items():
        assert torch.allclose(found["host"][1][name].float(), own.float(), atol=1e-3)
    assert found["host, resumed"][0] == found["host"][0][1:]
    for name, own in found["host"][1].items():
        assert torch.equal(found["host, resumed"][1][name], own)
    assert found["device, resumed"][0] == pytest.approx(norms[1:], rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--use-precision-aware-optimizer"], "needs --use-distributed-optimizer"),
        (
            ["--use-precision-aware-optimizer", "--use-distributed-optimizer", "--bf16", "False"],
            "needs bfloat16 weights",
        ),
        (["--optimizer-cpu-offload"], "needs --use-precision-aware-optimizer"),
        (["--overlap-cpu-optimizer-d2h-h2d"], "has no effect without --optimizer-cpu-offload"),
    ],
)
def test_what_an_optimizer_needs_is_said_before_anything_starts(flags, says):
    from megatron_ibpo.run.checks import check_run

    with pytest.raises(ConfigError, match=says):
        check_run(parse_config([*flags, "--dry-run"]))
