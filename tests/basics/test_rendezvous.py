"""The ranks of a run meet at a port that is theirs from the moment it is chosen."""

import os
from contextlib import closing
from datetime import timedelta

import pytest
import torch.distributed as dist

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
