"""The kernels under tensor and context parallelism equal the reference of one process."""

from __future__ import annotations

import layout_cases
import pytest


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_every_variant_equals_one_process(tp, cp):
    layout_cases.check_layout("triton", tp, cp)
