"""Torch's compiler has stand-ins until it is wanted, and then the real one takes their place."""

import subprocess
import sys

import pytest

CODE = """
import sys

import pytest
import torch
from megatron_ibpo.engines.vllm.slim_imports import COMPILER, stand_in
stand_in(COMPILER)
weight = torch.nn.Parameter(torch.ones(2))
torch.optim.Adam([weight]).zero_grad()  # imports the compiler, for one decorator
assert not any(name.startswith("torch._dynamo.") for name in sys.modules)
{want}
assert torch._dynamo.__file__ and sys.modules["torch._dynamo.utils"].__file__
doubled = torch.compile(lambda x: x * 2, backend="eager")
assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]
"""


def run(want):
    done = subprocess.run([sys.executable, "-c", CODE.format(want=want)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_name_without_stand_in_brings_the_compiler():
    run("torch._dynamo.config")


@pytest.mark.slow
def test_a_module_without_stand_in_brings_the_compiler():
    run("from torch._dynamo.utils import counters")
