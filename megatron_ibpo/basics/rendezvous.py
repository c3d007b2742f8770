"""Addresses and sockets by which the processes of a run find each other. Imports no torch."""

import socket

LOOPBACK = "127.0.0.1"
NODE_ADDRESS = "IBPO_NODE_ADDRESS"
"""Environment variable with this node's address, as the other processes of the run reach it."""
STORE_DESCRIPTOR = "IBPO_STORE_DESCRIPTOR"
"""Environment variable of rank 0 with the file descriptor of a socket that already listens at MASTER_PORT. A
port that was only found free may be taken by the time that a rank has imported torch."""


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at this address and no other; if `port` is 0, at any free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)
