import threading
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_ibpo.weights.transfer.nccl_group import abort, ends_when_lost, is_lost, joined, say_lost


@pytest.fixture
def group(monkeypatch):
    """A stand-in that waits until it is aborted, as a communicator does whose other member is gone."""
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())
    aborted = threading.Event()
    own = SimpleNamespace(device=torch.device("cpu", 0), comm=None, disabled=False, aborted=aborted)

    def abort_once(_):
        assert own.disabled, "calls after the abort were open"
        aborted.set()

    own.nccl = SimpleNamespace(ncclCommAbort=abort_once)
    return own


@pytest.fixture
def stores():
    """The stores of trainer rank 0 and of another member."""
    host, wait = "127.0.0.1", timedelta(seconds=10)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=wait)
    return [store, dist.TCPStore(host, store.port, timeout=wait)]


@pytest.mark.parametrize("loss", ["another member says so", "rank 0 has gone", "it takes too long"])
def test_a_member_stops_waiting_when_another_is_lost(group, stores, loss):
    with ends_when_lost(stores[1], group, 0.5 if loss == "it takes too long" else 30) as lost:
        if loss == "another member says so":
            say_lost(stores[0])
        if loss == "rank 0 has gone":
            del stores[0]
        assert group.aborted.wait(30)
    assert lost.is_set()


def test_a_group_that_is_whole_is_left_alone_and_one_is_aborted_once(group, stores):
    with ends_when_lost(stores[1], group, 30) as lost:
        pass
    say_lost(stores[0])  # of the next pass
    assert not lost.is_set()
    assert not group.aborted.is_set()
    abort(group)
    group.nccl = None
    abort(group)


def test_what_keeps_a_member_from_joining_is_said_at_once_to_it_and_to_the_others(stores):
    def join():
        raise OSError("no socket interface found")

    ours, theirs = stores
    with pytest.raises(OSError, match="no socket interface"):
        joined(join, 0, theirs, timeout=30)
    assert is_lost(ours)
    assert joined(threading.Event().wait, 0, ours, timeout=30) is None  # another, that waits for it
