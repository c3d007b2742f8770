import gc

import pytest

from megatron_ibpo.basics.large_imports import uncollected


@pytest.mark.parametrize("set_before", [gc.enable, gc.disable])
def test_imports_pause_the_garbage_collector_and_restore_its_state(set_before):
    set_before()
    before = gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled() == before
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled() == before
    gc.enable()
