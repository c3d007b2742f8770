"""The ranks of a run meet at a port that is theirs from the moment it is chosen."""

import itertools
import os
import threading
from contextlib import closing, suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_ibpo.basics import rendezvous
from megatron_ibpo.basics.distributed import start_world
from megatron_ibpo.basics.rendezvous import LOOPBACK, STORE_DESCRIPTOR, listen


def test_nobody_else_gets_the_port_before_the_ranks_meet_there(monkeypatch):
    with listen(LOOPBACK) as held:
        port, descriptor = held.getsockname()[1], held.detach()
    with pytest.raises(OSError, match="in use"):
        listen(LOOPBACK, port)
    place = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    for name, value in (place | {STORE_DESCRIPTOR: str(descriptor)}).items():
        monkeypatch.setenv(name, value)
    with closing(start_world()):
        assert STORE_DESCRIPTOR not in os.environ, "the socket is the store's now"
        other = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=5))
        assert other.num_keys() > 0
    with listen(LOOPBACK, port):
        pass  # free again


def test_a_directory_goes_while_another_thread_writes_into_it(tmp_path):
    """As vLLM may, in an engine whose owner has died while it starts."""
    directory, wrote = rendezvous.private_directory("ibpo-", 0, (str(tmp_path),)), threading.Event()

    def write():
        with suppress(FileNotFoundError):
            for number in itertools.count():
                (directory / str(number)).touch()
                wrote.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    assert wrote.wait(10)
    rendezvous.remove_private(directory)
    writer.join(10)
    assert not writer.is_alive()
    assert list(directory.parent.glob(f"{directory.name}*")) == []
