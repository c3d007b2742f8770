"""A process that waits in an NCCL group for a lost member does not wait for ever. The group is a stand-in."""

import threading
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ibpo.weights.transfer.nccl_group import abort, ends_when_lost, is_lost, joined, say_lost

HOST = "127.0.0.1"


class Group:
    """Waits until it is aborted, as a communicator does whose other member is gone."""

    device = torch.device("cpu", 0)
    comm = None

    def __init__(self) -> None:
        self.nccl = self
        self.disabled = False
        self.calls_after_abort_were_open = False
        self.aborted = threading.Event()

    def broadcast(self) -> None:
        assert self.aborted.wait(30)

    def ncclCommAbort(self, _: Any) -> None:
        self.calls_after_abort_were_open = not self.disabled
        self.aborted.set()


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())


def stores() -> tuple[dist.TCPStore, dist.TCPStore]:
    """Return the stores of trainer rank 0 and of another member."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    return store, dist.TCPStore(HOST, store.port, timeout=timedelta(seconds=10))


@pytest.mark.parametrize("loss", ["another member says so", "rank 0 has gone", "it takes too long"])
def test_a_member_stops_waiting_when_another_is_lost(loss: str) -> None:
    ours, theirs = stores()
    group = Group()
    with ends_when_lost(theirs, group, 0.5 if loss == "it takes too long" else 30) as lost:
        if loss == "another member says so":
            say_lost(ours)
        if loss == "rank 0 has gone":
            del ours
        group.broadcast()
    assert lost.is_set()
    assert not group.calls_after_abort_were_open


def test_a_group_that_is_whole_is_left_alone_and_one_is_aborted_once() -> None:
    ours, theirs = stores()
    group = Group()
    with ends_when_lost(theirs, group, 30) as lost:
        pass
    assert not lost.is_set()
    assert not group.aborted.is_set()
    say_lost(ours)  # of the next pass
    assert not group.aborted.is_set()
    abort(group)
    group.nccl = None
    abort(group)


def test_what_keeps_a_member_from_joining_is_said_at_once_to_it_and_to_the_others() -> None:
    ours, theirs = stores()

    def join() -> None:
        raise OSError("no socket interface found")

    with pytest.raises(OSError, match="no socket interface"):
        joined(join, 0, theirs, timeout=30)
    assert is_lost(ours)
    assert joined(threading.Event().wait, 0, ours, timeout=30) is None  # another, that waits for it
