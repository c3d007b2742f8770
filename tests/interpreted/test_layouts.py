"""The kernels under tensor and context parallelism equal the reference of one process."""

from __future__ import annotations

import pytest

from support import layout_cases

pytestmark = pytest.mark.kernel

SLOW = pytest.mark.slow  # (2, 2) has both in one; tests/loss/test_loss_layouts.py takes all of them in torch


@pytest.mark.parametrize(
    ("tp", "cp"),
    [pytest.param(2, 1, marks=SLOW), pytest.param(4, 1, marks=SLOW), pytest.param(1, 2, marks=SLOW), (2, 2)],
)
def test_every_variant_equals_one_process(tp, cp):
    layout_cases.check_layout("triton", tp, cp)
