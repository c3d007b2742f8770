"""An NCCL group that ends for all its members when one of them is lost.

NCCL waits forever for a lost member, and pynccl has no watchdog. So the members watch a store while they send
and receive: a member that learns of a loss reports it there, and each aborts its own part. Abort is the only
call that ends NCCL's waiting. Not run on GPUs.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

LOOK_EVERY_S = 0.2
"""Seconds between looks at the store: the others wait that much longer after one is lost."""
LOST = "lost"
"""Key in the store of a group that can no longer be used."""


def say_lost(store: dist.Store) -> None:
    """Tell all members of the store's group that one of them is lost."""
    store.set(LOST, "")


def run_join(join: Callable[[], T], device: int, store: dist.Store, timeout: float) -> T | None:
    """Return the result of `join`, called on GPU number `device`; None once the store reports a lost member,
    or after `timeout` seconds. NCCL itself would wait forever; the thread that called it then does. Raises
    what `join` raised; the others hear at once that this one is lost."""
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            with torch.accelerator.device_index(device):  # a thread starts with the first
                outcome.set_result(join())
        except Exception as error:
            outcome.set_exception(error)
            say_lost(store)

    joining = threading.Thread(target=work, name="NCCL join", daemon=True)
    joining.start()
    deadline = time.monotonic() + timeout
    while joining.is_alive() and not is_lost(store) and time.monotonic() < deadline:
        joining.join(LOOK_EVERY_S)
    return outcome.result() if outcome.done() else None


@contextmanager
def ends_when_lost(store: dist.Store, group: Any, timeout: float) -> Iterator[threading.Event]:
    """End all waiting in `group`, vLLM's PyNcclCommunicator, when the store reports a lost member, when it is
    gone with trainer rank 0, or after `timeout` seconds, and set the event that this yields. After that, data
    sent is lost, data received is undefined, and neither raises."""
    lost, over = threading.Event(), threading.Event()
    deadline = time.monotonic() + timeout

    def watch() -> None:
        while not over.wait(LOOK_EVERY_S):
            if is_lost(store) or time.monotonic() > deadline:
                lost.set()
                abort(group)
                return

    watcher = threading.Thread(target=watch, name="NCCL group", daemon=True)
    watcher.start()
    try:
        yield lost
    finally:
        over.set()
        watcher.join()


def abort(group: Any) -> None:
    """End this member's part of a group, whatever it waits for. (`PyNcclCommunicator.destroy` closes the
    group to further calls only afterwards, when the waiting thread may have made one.)"""
    if group.disabled:
        return
    group.disabled = True
    with torch.accelerator.device_index(group.device.index):
        group.nccl.ncclCommAbort(group.comm)


def is_lost(store: dist.Store) -> bool:
    """Return whether a member reported a loss, or the store has gone with trainer rank 0."""
    try:
        return store.check([LOST])
    except RuntimeError:
        return True
