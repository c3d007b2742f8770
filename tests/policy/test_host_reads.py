"""Reads of tensors' values, for which a GPU would wait, counted on the CPU, where the same calls read."""

import os
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
WATCHED = ("policy/", "loss/")  # rooms whose own reads are counted, without what Megatron reads for them
OF_THE_CPU = ("_row_logprobs", "_write_gradient")  # the loss in torch; on a GPU kernels take its place
READS = {"item", "tolist", "cpu", "nonzero", "masked_select", "bincount", "unique"}
READS |= {"__bool__", "__int__", "__float__", "__index__"}


class HostReads(TorchFunctionMode):
    """Counts, by file and function of the caller, what would make the host wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        called, by_mask = function.__name__, False
        if called in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            by_mask = any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in index)
        of_unknown_size = called == "repeat_interleave" and "output_size" not in (kwargs or {})
        if called in READS or by_mask or of_unknown_size:
            code = sys._getframe(1).f_code
            name = os.path.relpath(Path(code.co_filename).resolve(), PACKAGE)
            if name.startswith(WATCHED) and code.co_name not in OF_THE_CPU:
                self.found[f"{name}:{code.co_name}"] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.world(1)
@pytest.mark.parametrize("max_tokens", [10_000, 60])
def test_reads_of_the_device_do_not_grow_with_micro_batches(world, checkpoints, max_tokens):
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
