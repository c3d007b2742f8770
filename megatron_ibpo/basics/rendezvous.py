"""Addresses and sockets by which the processes of a run find each other. Imports no torch."""

import socket

LOOPBACK = "127.0.0.1"
NODE_ADDRESS = "IBPO_NODE_ADDRESS"
"""Environment variable: the address of this node as the other processes of the run reach it."""
STORE_DESCRIPTOR = "IBPO_STORE_DESCRIPTOR"
"""Environment variable of rank 0, where its process listens at MASTER_PORT already: the socket's file
descriptor. A port that was only found free may be taken by the time that a rank has imported torch."""


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens at this address and at no other; where `port` is 0, at any that is free."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)
