"""The kernels under Triton's interpreter. `tests/kernels/test_kernels.py` runs this file in a process where
TRITON_INTERPRET=1 was set before Triton was imported."""

from __future__ import annotations

import pytest

from support.kernel_cases import make_batch, run
from support.kernel_suite import *  # noqa: F403

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
