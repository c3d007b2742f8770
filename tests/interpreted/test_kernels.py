"""The kernels under Triton's interpreter. `tests/kernels/test_kernels.py` runs this file in a process where
TRITON_INTERPRET=1 was set before Triton was imported."""

from __future__ import annotations

import pytest

from support import kernel_cases as cases
from support.kernel_suite import *  # noqa: F403

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="session")
def device():
    return "cpu"


def test_a_target_outside_the_vocabulary_is_named(device):
    cases.check_targets_outside(device)
