"""The kernels under tensor and context parallelism equal the reference of one process."""

from __future__ import annotations

import pytest

from support import layout_cases
from support.kernel_cases import KINDS

pytestmark = pytest.mark.kernel


# (2, 2) has both in one; tests/loss/test_loss_layouts.py takes every variant and layout in torch
@pytest.mark.parametrize(
    ("tp", "cp"), [(2, 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in [(2, 1), (4, 1), (1, 2)])]
)
def test_a_variant_of_each_kind_equals_one_process(tp, cp):
    layout_cases.check_layout("triton", tp, cp, (*KINDS, layout_cases.BY_PLACE_NAME))
