"""Engines on CPUs start without packages of which they run nothing, and get the real ones when wanted."""

import subprocess
import sys

import pytest

from support.paths import TESTS

pytestmark = pytest.mark.slow

COMPILER = """
import sys

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
SHAPES = """
import sys

import torch
from megatron_ibpo.engines.vllm.slim_imports import SYMBOLIC_SHAPES, stand_in
stand_in(SYMBOLIC_SHAPES)
torch._check(True)
try:
    torch._check(False, lambda: "no")
except RuntimeError as error:
    assert str(error) == "no"
else:
    raise AssertionError
assert "sympy" not in sys.modules
from torch.fx.experimental.symbolic_shapes import ShapeEnv
assert isinstance(ShapeEnv(), ShapeEnv) and "sympy" in sys.modules
"""
ENGINE = """
import sys
from pathlib import Path

from test_decode_runs import engine_of
from megatron_ibpo.basics.records import SampleRequest, token_ids
from megatron_ibpo.engines.vllm.messages import NumberedRequest

engine = engine_of(Path(sys.argv[1]), "bfloat16", Path(sys.argv[2]))
engine.submit(0, [NumberedRequest(0, SampleRequest(token_ids([3, 4, 5]), seed=0, max_tokens=5))])
while engine.busy:
    engine.step()
heavy = {"aiohttp", "openai", "ray", "scipy", "sympy", "torch._dynamo.utils", "torch.distributed.tensor"}
imported = [name for name in heavy if hasattr(sys.modules.get(name), "__file__")]
assert not imported, imported
"""


def run(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("want", ["torch._dynamo.config", "from torch._dynamo.utils import counters"])
def test_names_without_stand_in_bring_the_compiler(want):
    run(COMPILER.format(want=want))


def test_formulas_are_imported_for_symbolic_shapes_alone():
    run(SHAPES)


@pytest.mark.engine
@pytest.mark.parametrize("model", ["tiny_qwen3", "tiny_qwen3_next"])
def test_an_engine_samples_without_unused_packages(model, tmp_path):
    paths = [str(TESTS), str(TESTS / "engines")]
    code = f"import sys; sys.path += {paths!r}\n{ENGINE}"
    run(code, TESTS.parent / "examples" / model, tmp_path)
