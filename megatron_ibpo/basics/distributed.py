"""The trainer ranks, and what they agree on: errors, sums and other small Python objects.

These go over gloo, alongside NCCL and without a GPU; tensors of the model travel in Megatron's own groups.
"""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from megatron_ibpo.basics.rendezvous import (
    LOOPBACK,
    NODE_ADDRESS,
    STORE_DESCRIPTOR,
    environment_number,
    listen,
)

T = TypeVar("T")


class RemoteError(RuntimeError):
    """Another rank failed; this rank stops with it instead of waiting for it."""


@dataclass(frozen=True)
class World:
    """The group of all trainer ranks, from the view of one of them."""

    rank: int
    size: int
    device: torch.device
    control: Any
    """gloo process group over all ranks."""

    @property
    def is_rank_0(self) -> bool:
        return self.rank == 0

    @property
    def device_type(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.device.type == "cuda" else "cpu"

    def on_rank_0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank; fails as `on_all_ranks`."""
        return self.on_all_ranks(work if self.is_rank_0 else lambda: None)[0]  # type: ignore[return-value]

    def on_all_ranks(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return the results of all, in rank order, on every rank.

        A rank that fails raises its own exception, and the others RemoteError with its text: none waits.
        """
        result: Any = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        text = None if error is None else f"{type(error).__name__}: {error}"
        outcomes = self.all_gather((result, text))
        if error is not None:
            raise error
        for rank, (_, text) in enumerate(outcomes):
            if text is not None:
                raise RemoteError(f"rank {rank} failed: {text}")
        return [result for result, _ in outcomes]

    def all_gather(self, item: T) -> list[T]:
        """Return every rank's `item`, in rank order, on every rank."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self.control)
        return items

    def close(self) -> None:
        """Leave the process groups, without waiting, since another rank may have failed."""
        dist.destroy_process_group()

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)


def start_world(timeout_minutes: float = 30.0) -> World:
    """Join the processes that the launcher (torchrun) started; without a launcher, a world of one.

    Every collective gives up after `timeout_minutes`. Raises ValueError for a variable of the launcher that
    is not a whole number in its range.
    """
    size = environment_number("WORLD_SIZE", 1, least=1)
    rank = environment_number("RANK", 0, most=size - 1)
    local_rank = environment_number("LOCAL_RANK", 0, most=size - 1)
    timeout = timedelta(minutes=timeout_minutes)
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(local_rank)
    store = _store(rank, size, timeout)
    dist.init_process_group(
        "nccl" if has_cuda else "gloo", rank=rank, world_size=size, timeout=timeout, store=store
    )
    control = dist.new_group(backend="gloo", timeout=timeout)
    device = torch.device("cuda", local_rank) if has_cuda else torch.device("cpu")
    return World(rank, size, device, control)


def own_address() -> str:
    """Return the address at which the run's other processes reach this machine; loopback if none is set."""
    return os.environ.get(NODE_ADDRESS) or LOOPBACK


def open_store(
    address: str, port: int, timeout: timedelta, size: int | None = None, descriptor: int | None = None
) -> dist.TCPStore:
    """Start a TCP store bound to `address` only. torch's own socket listens on every interface, and any
    process that reaches it can read and write the ranks' messages.

    Args:
        port: 0 for any free port.
        size: processes to wait for, this one included; None: none.
        descriptor: socket that already listens there; None: open one.
    """
    with listen(address, port) if descriptor is None else socket.socket(fileno=descriptor) as listener:
        return dist.TCPStore(
            address,
            listener.getsockname()[1],
            size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=size is not None,
            master_listen_fd=listener.detach(),
        )


def _store(rank: int, size: int, timeout: timedelta) -> Any:
    """Return the store where the ranks meet; None if the launcher has one, as torchrun does."""
    if "MASTER_ADDR" not in os.environ:
        if size != 1:
            raise RuntimeError(f"WORLD_SIZE={size} but no MASTER_ADDR: start the ranks with torchrun")
        return dist.HashStore()
    port = environment_number("MASTER_PORT", 0, most=65535)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    address = os.environ["MASTER_ADDR"]
    if rank == 0:
        descriptor = os.environ.pop(STORE_DESCRIPTOR, None)  # once: it belongs to the store from now on
        return open_store(address, port, timeout, size, None if descriptor is None else int(descriptor))
    return dist.TCPStore(address, port, size, is_master=False, timeout=timeout)
