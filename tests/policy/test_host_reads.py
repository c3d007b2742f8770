"""Reads of tensors' values, for which a GPU would wait, counted on the CPU, where the same calls read."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

import megatron_ibpo
from support import planned
from support.critics import critic_config, open_critic, rows_with_returns
from support.layouts import layout
from support.trainers import close_trainer, config_for, open_trainer

PACKAGE = Path(megatron_ibpo.__file__).resolve().parent
WATCHED = ("policy/", "loss/")
"""Rooms whose own reads are counted; what Megatron reads for them is not theirs."""
OF_THE_CPU = ("_row_logprobs", "_write_gradient")
"""The loss in plain torch; on a GPU kernels take its place, and the device itself checks targets."""
READS = {"item", "tolist", "cpu", "nonzero", "masked_select", "bincount", "unique"}
READS |= {"__bool__", "__int__", "__float__", "__index__"}


class HostReads(TorchFunctionMode):
    """Counts, by file and function of the caller, what would make the host wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if waits(function.__name__, args, kwargs or {}):
            self.note(sys._getframe(1).f_code)
        return function(*args, **(kwargs or {}))

    def note(self, code):
        path = Path(code.co_filename).resolve()
        if PACKAGE in path.parents:
            name = path.relative_to(PACKAGE).as_posix()
            if name.startswith(WATCHED) and code.co_name not in OF_THE_CPU:
                self.found[f"{name}:{code.co_name}"] += 1


def waits(name, args, kwargs):
    if name == "repeat_interleave":
        return "output_size" not in kwargs
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in index)
    return name in READS


@pytest.mark.world(1)
@pytest.mark.parametrize("max_tokens", [10_000, 60])
def test_an_update_reads_the_device_as_often_however_many_micro_batches_it_has(
    world, checkpoints, max_tokens
):
    """Once for the numbers of an optimizer step, and once for the log-probs or values of each pass."""
    rows, hf_dir = rows_with_returns(9), checkpoints["dense"]
    step, values = "policy/forward_backward.py:_on_host", "policy/packing.py:response_values"
    for settings, passes in (
        ({}, 1),  # the second step's old log-probs
        ({"loss_variant": "grpo", "old_logprobs": "engine", "loss_backend": "torch"}, 0),
        ({"fuse_lm_head": True, "use_tis": True}, 2),  # importance weights need both steps' old log-probs
        ({"kl_coef": 0.1}, 3),  # and the reference's
    ):
        config = config_for(layout(), max_tokens=max_tokens, num_steps_per_rollout=2, **settings)
        trainer, _, _ = open_trainer(world, hf_dir, config, hf_dir if "kl_coef" in settings else None)
        with HostReads() as counted:
            planned.update(trainer, rows)
        close_trainer()
        assert counted.found == Counter({step: 2, values: passes}), settings
    critic = open_critic(world, hf_dir, critic_config(layout(), lr=0.01, max_tokens=max_tokens))
    with HostReads() as counted:
        planned.values(critic, rows)
        planned.update_values(critic, rows)
    assert counted.found == {step: 1, values: 1}


def test_a_read_would_be_seen():
    mask, values = torch.tensor([True, False]), torch.tensor([1.0, 2.0])
    one = values.sum()
    for read in (values.tolist, one.item, lambda: values[mask], lambda: bool(one), mask.nonzero):
        with HostReads() as counted:
            counted.note = lambda code, counted=counted: counted.found.update(["read"])
            read()
        assert counted.found == {"read": 1}
