"""The reference loss under tensor and context parallelism equals that of one process."""

from __future__ import annotations

import pytest

from megatron_ibpo.loss import VARIANTS
from support import layout_cases

pytestmark = pytest.mark.world


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("tp", "cp"), [(2, 1), pytest.param(4, 1, marks=SLOW), pytest.param(1, 2, marks=SLOW), (2, 2)]
)
def test_every_variant_equals_one_process(tp, cp):
    layout_cases.check_layout("torch", tp, cp, (*VARIANTS, layout_cases.BY_PLACE_NAME))


def test_a_sequence_that_does_not_divide_among_context_parallel_ranks_is_refused():
    layout_cases.check_unequal_shares()
