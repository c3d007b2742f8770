"""The kernels under tensor and context parallelism equal the reference of one process."""

from __future__ import annotations

import pytest

from support import layout_cases

pytestmark = pytest.mark.kernel


# (2, 2) has both in one; tests/loss/test_loss_layouts.py takes every variant and layout in torch
def test_a_variant_of_each_kind_equals_one_process():
    """Kinds differ in what they sum: sequences, ratios of sequences by tokens, geometric means, tokens."""
    layout_cases.check_layout("triton", 2, 2, ("gspo", "gspo-token", "gmpo", "cispo"))


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_every_variant_equals_one_process(tp, cp):
    layout_cases.check_layout("triton", tp, cp)
