"""The gradient's norm is Megatron's to the last bit under every layout; the host waits for it once."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from megatron_ibpo.policy.forward_backward import gradient_norm, take_step
from support.layouts import layout
from support.trainers import close_trainer, config_for, open_trainer

LAYOUTS = {
    1: [("dense", layout()), ("next", layout(distributed_optimizer=True))],
    2: [
        ("dense", layout(tp=2)), ("tied", layout(pp=2)), ("dense", layout(distributed_optimizer=True)),
        ("dense", layout(cp=2)), ("next", layout(tp=2, ep=2)), ("next", layout(ep=2)),
        ("next", layout(ep=2, distributed_optimizer=True)),
    ],
}  # fmt: skip
CLIP = 0.5
READS = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"}
FOREACH = torch._foreach_norm


class HostReads(TorchFunctionMode):
    """Count reads of values, for which the host waits on a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.tensor:  # reads each tensor of a list
            self.count += sum(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args))
        self.count += getattr(function, "__name__", "") in READS
        return function(*args, **(kwargs or {}))


def count_reads(function, *args):
    """Return the result, and how many times the host read values, for which it waits on a GPU."""
    with HostReads() as reads:
        result = function(*args)
    return result, reads.count


def fill_gradients(trainer):
    for buffer in trainer.gradient_buffers():
        buffer.normal_()
    trainer.optimizer.prepare_grads()


def check_layouts(world, checkpoints, cases):
    for name, parallel in cases:
        config = config_for(parallel)
        config.optimizer.clip_grad = CLIP
        trainer, _, _ = open_trainer(world, checkpoints[name], config)
        optimizer = trainer.optimizer
        fill_gradients(trainer)
        expected, reads_of_megatron = count_reads(optimizer.get_grad_norm)
        norm, reads = count_reads(gradient_norm, optimizer)
        assert (norm, reads) == (float(expected), 1), (name, parallel)
        assert len(set(world.all_gather(norm))) == 1, (name, parallel)
        gradients = [own for part in optimizer.chained_optimizers for own in part.get_grads_for_grad_norm()]
        assert reads_of_megatron > len(gradients) > reads, (name, parallel)
        for part in optimizer.chained_optimizers:  # Adam on a CPU reads its own count of steps
            part.step_with_ready_grads = lambda: True
        optimizer.has_grad_norm_group("mtp")  # read in the first step alone
        assert count_reads(take_step, optimizer, norm)[1] == 0, (name, parallel)
        assert float(optimizer.get_grad_norm()) == pytest.approx(CLIP, rel=1e-5), (name, parallel)
        close_trainer()


@pytest.mark.world(1)
def test_the_norm_on_one_rank_is_megatrons(world, checkpoints):
    check_layouts(world, checkpoints, LAYOUTS[1])


@pytest.mark.world(2)
def test_the_norm_over_two_ranks_is_megatrons(world, checkpoints):
    """Experts and the rest have groups of their own where the optimizer is not distributed."""
    check_layouts(world, checkpoints, LAYOUTS[2])


@pytest.mark.world(1)
def test_a_step_computes_its_norm_once(world, checkpoints, monkeypatch):
    """Megatron's step takes the norm that decided whether there is a step at all."""
    trainer, _, _ = open_trainer(world, checkpoints["dense"], config_for(layout()))
    calls = []

    def counted(*arguments, **named):
        calls.append(arguments)
        return FOREACH(*arguments, **named)

    monkeypatch.setattr(torch, "_foreach_norm", counted)
    monkeypatch.setattr("megatron.core.optimizer.optimizer.get_grad_norm_fp32", lambda *_, **__: 1 / 0)
    fill_gradients(trainer)
    weights = [parameter.clone() for parameter in trainer.optimizer.get_parameters()]
    take_step(trainer.optimizer, trainer.gradient_norm())
    assert len(calls) == 1
    assert not any(map(torch.equal, weights, trainer.optimizer.get_parameters()))
    close_trainer()
