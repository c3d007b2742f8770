"""The reference policy: its weights take the policy's place for a pass of log-probs, and leave no trace."""

from itertools import chain

import pytest
import torch

from support import planned
from support.layouts import layout
from support.train_sequences import sequences
from support.trainers import close_trainer, config_for, open_trainer

QUICK = {"next": {"tp": 2, "ep": 2}, "dense, sharded optimizer": {"distributed_optimizer": True}}
REST = {"dense": {"tp": 2}, "tied": {"pp": 2}, "dense, bfloat16": {"tp": 2}}


def held(trainer):
    """Copies of the model's weights, and of what the optimizer steps on (float32 masters under bfloat16)."""
    masters = [tensor for group in trainer.optimizer.param_groups for tensor in group["params"]]
    return [t.detach().clone() for t in [*chain(*(c.parameters() for c in trainer.chunks)), *masters]]


@pytest.mark.world(2)
@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(own, marks=pytest.mark.slow) for own in REST)])
def test_inside_it_is_the_reference_and_afterwards_the_policy_bit_for_bit(world, checkpoints, case):
    from megatron_ibpo.policy.reference import load_reference

    rows, config = sequences(6), config_for(layout(**(QUICK | REST)[case]), lr=1e-2, eps_adam=1e-8)
    config.model.bf16 = "bfloat16" in case
    policy = checkpoints[case.split(",")[0]]
    undisturbed, _, _ = open_trainer(world, policy, config)
    wanted = planned.logprobs(undisturbed, rows)
    _, norm = (planned.update(undisturbed, rows)["grad_norm"] for _ in range(2))
    close_trainer()
    trainer, _, shape = open_trainer(world, policy, config)
    planned.update(trainer, rows)
    weights, before = held(trainer), planned.logprobs(trainer, rows)
    reference = load_reference(trainer.chunks, shape, policy)
    with reference.swapped_in(trainer.chunks):
        assert planned.logprobs(trainer, rows) == wanted != before
    assert planned.logprobs(trainer, rows) == before
    assert all(map(torch.equal, weights, held(trainer)))
    assert planned.update(trainer, rows)["grad_norm"] == norm, "training goes on as if nothing had been"


class Tiny(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), value))
        self.tied = self.weight
        self.register_buffer("bias", torch.full((2,), -value))


def fail_inside(reference, policy):
    with reference.swapped_in([policy]):
        raise KeyError


def test_each_weight_is_exchanged_once_in_place_and_restored_after_an_error():
    from megatron_ibpo.policy.reference import Reference

    policy = Tiny(1.0)
    reference = Reference([Tiny(2.0)])
    view = policy.weight.data[1:]
    with reference.swapped_in([policy]):
        assert policy.weight.tolist() == [2.0] * 3
        assert policy.bias.tolist() == [-2.0] * 2
        assert view.tolist() == [2.0] * 2
        with pytest.raises(RuntimeError, match="in the model already"):
            fail_inside(reference, policy)
    with pytest.raises(KeyError):
        fail_inside(reference, policy)
    assert policy.weight.tolist() == [1.0] * 3
    assert policy.bias.tolist() == [-1.0] * 2
    with reference.swapped_in([policy]):
        assert policy.weight.tolist() == [2.0] * 3
