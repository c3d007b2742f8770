"""The kernels under Triton's interpreter, as conftest.py says."""

import re
import sys

import pytest

from support.kernel_cases import *  # noqa: F403
from support.kernel_cases import (
    BY_PLACE_NAME,
    check_layout,
    check_set_layout,
    check_variant,
    make_batch,
    run,
)
from support.paths import ROOT
from support.traced_cases import *  # noqa: F403

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="session")
def device():
    return "cpu"


def test_a_target_outside_the_vocabulary_is_named(device):
    """CPUs raise an error that names the id; on GPUs the device asserts, which no test survives."""
    batch = make_batch(device)
    row = int(batch["response_mask_N"].nonzero()[0])
    batch["targets_N"][row] = 517
    with pytest.raises(ValueError, match="target id 517 is outside the vocabulary"):
        run(batch, backend="triton")


@pytest.mark.parametrize("name", ["spo:SPO", "spo:UNDECIDED"])
def test_documented_variants_agree_between_torch_and_kernel(name, tmp_path, monkeypatch):
    text = (ROOT / "docs/loss_variants.md").read_text()
    (tmp_path / "spo.py").write_text("".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    monkeypatch.syspath_prepend(tmp_path)
    check_variant("cpu", name)
    sys.modules.pop("spo")


@pytest.mark.world(4)
@pytest.mark.parametrize("variants", [
    ("gspo", "gmpo", BY_PLACE_NAME), pytest.param(("gspo-token", "cispo"), marks=pytest.mark.slow),
])  # fmt: skip
def test_the_kernels_of_every_rank_together_equal_one_process(world, variants):
    """tests/loss/test_linear_loss.py takes every variant in torch."""
    check_layout(world, "triton", 2, 2, variants)
    check_set_layout(world, "triton", 2, 2, variants[:1])
