"""A value is one of its declared type, or refused."""

from typing import Literal

import pytest

from megatron_ibpo.config.values import as_type


@pytest.mark.parametrize("value", [True, 1.0, "1", 3])
def test_a_literal_takes_values_of_its_own_type_alone(value):
    assert as_type(1, Literal[1, 2]) == 1
    with pytest.raises(TypeError, match="one of 1, 2"):
        as_type(value, Literal[1, 2])
