"""The reference policy: its weights take the policy's place for a pass of log-probs, and leave no trace."""

from functools import partial
from itertools import chain

import pytest
import torch

from support import planned
from support.layouts import layout
from support.ranks import run_ranks
from support.tiny_models import make_qwen3, make_qwen3_next
from support.train_sequences import sequences
from support.trainers import close_trainer, config_for, open_trainer


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two of each model, by its name."""
    directory = tmp_path_factory.mktemp("models")
    make = {"dense": make_qwen3, "tied": partial(make_qwen3, tie=True), "next": make_qwen3_next}
    return {
        name: [made(directory / f"{name}{seed}", seed, std=0.1) for seed in (3, 4)]
        for name, made in make.items()
    }


def held(trainer):
    """Copies of the model's weights, and of what the optimizer steps on (float32 masters under bfloat16)."""
    masters = [tensor for group in trainer.optimizer.param_groups for tensor in group["params"]]
    return [t.detach().clone() for t in [*chain(*(c.parameters() for c in trainer.chunks)), *masters]]


def exchanged(world, policy_dir, reference_dir, parallel, bf16):
    """After an update: log-probs of policy, reference, policy again; those of the reference opened alone;
    whether each bit is back; the next update's gradient norm, and the same without an exchange."""
    from megatron_ibpo.policy.reference import load_reference

    rows, config = sequences(6), config_of(parallel, bf16)
    alone, _, _ = open_trainer(world, reference_dir, config)
    wanted = planned.logprobs(alone, rows)
    close_trainer()
    undisturbed, _, _ = open_trainer(world, policy_dir, config)
    norms = [planned.update(undisturbed, rows)["grad_norm"] for _ in range(2)]
    close_trainer()
    trainer, _, shape = open_trainer(world, policy_dir, config)
    reference = load_reference(trainer.chunks, shape, reference_dir)
    planned.update(trainer, rows)
    weights = held(trainer)
    before = planned.logprobs(trainer, rows)
    with reference.swapped_in(trainer.chunks):
        inside = planned.logprobs(trainer, rows)
    after = planned.logprobs(trainer, rows)
    is_back = all(map(torch.equal, weights, held(trainer)))
    next_update = planned.update(trainer, rows)["grad_norm"]
    close_trainer()
    return (before, inside, after), wanted, is_back, next_update, norms[1]


def config_of(parallel, bf16):
    config = config_for(parallel, lr=1e-2, eps_adam=1e-8)
    config.model.bf16 = bf16
    return config


CASES = {
    "dense": layout(tp=2),
    "tied": layout(pp=2),
    "next": layout(tp=2, ep=2),
    "dense, bfloat16": layout(tp=2),
    "dense, sharded optimizer": layout(distributed_optimizer=True),
}


QUICK = ["next", "dense, sharded optimizer"]
EACH = [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.world
@pytest.mark.parametrize("case", EACH)
def test_inside_it_is_the_reference_and_afterwards_the_policy_bit_for_bit(checkpoints, case):
    policy, reference = checkpoints[case.split(",")[0]]
    found = run_ranks(exchanged, 2, policy, reference, CASES[case], "bfloat16" in case)
    for (before, inside, after), alone, is_back, norm, undisturbed in found:
        assert inside == alone
        assert inside != before == after
        assert is_back
        assert norm == undisturbed, "training goes on as if nothing had been"


class Tiny(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), value))
        self.tied = self.weight
        self.register_buffer("bias", torch.full((2,), -value))


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


def fail_inside(reference, policy):
    with reference.swapped_in([policy]):
        raise KeyError
