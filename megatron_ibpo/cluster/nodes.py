"""A Ray cluster of the nodes on which the same script was started, for the length of one command.

    python -m megatron_ibpo.cluster.nodes --num-nodes 4 --node-rank 0 --address HOST:PORT -- COMMAND…

on every node, with its own rank. Node 0 starts the cluster, waits for the others, runs COMMAND with
RAY_ADDRESS set, and ends the cluster with it; the others join, and end when node 0 has ended.
"""

import argparse
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]

from megatron_ibpo.cluster.session import QUIET, ClusterError, answers, swept
from megatron_ibpo.command import command

LOOK_EVERY_S = 1.0
QUIET_S = 2.0
"""Of waiting, before it is said what for."""
START_S = 30.0
"""That Ray may take to start on this node before it is worth a word."""
REPEAT_S = 60.0
LOST_AFTER = 5
"""Looks in a row at node 0 that find nothing, before a node takes it for ended."""
GCS_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
"""What is left after that is swept up with its directory."""
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Be one node of the cluster; returns the exit status of the command on node 0, elsewhere 0."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, words = (
        (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    )
    parser = argparse.ArgumentParser(prog="megatron_ibpo.cluster.nodes", description=__doc__.splitlines()[0])
    parser.add_argument("--num-nodes", type=int, required=True)
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument("--address", required=True, help="HOST:PORT of node 0")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds to wait for other nodes")
    asked = parser.parse_args(own)
    host, _, port = asked.address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        parser.error(f"--address {asked.address}: must be HOST:PORT, the port a number (see MASTER_PORT)")
    os.environ |= QUIET
    # `ray start` asks for tokens where it finds no word on it, which the nodes would have to share beforehand
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    host = numeric_address(host, asked.num_nodes)
    if asked.node_rank == 0:
        return _lead(host, int(port), asked.num_nodes, asked.timeout, words)
    return _follow(host, int(port), asked.timeout)


def numeric_address(host: str, num_nodes: int) -> str:
    """The address of node 0 in digits. Ray hands it on as it is given, and a name belongs to no interface
    that gloo and NCCL could be told to listen on.

    Raises:
        ClusterError: there is no such host, or its name means this machine alone, as /etc/hosts often has it,
            and there are other nodes.
    """
    with suppress(ValueError):
        return str(ipaddress.ip_address(host))
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ClusterError(f"MASTER_ADDR={host}: no such host is known here ({error})") from None
    addresses = [str(entry[4][0]) for entry in found]
    addresses.sort(key=lambda address: ":" in address)  # IPv4 first
    reached = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    if num_nodes > 1 and not reached:
        raise ClusterError(
            f"MASTER_ADDR={host} means {addresses[0]} here, which other nodes do not reach: set it to the "
            "address of node 0 (`hostname -I` there shows what it has)"
        )
    return (reached or addresses)[0]


def _lead(host: str, port: int, num_nodes: int, timeout: float, command: Sequence[str]) -> int:
    if answers(host, port, LOOK_EVERY_S):
        raise ClusterError(
            f"port {port} is in use on {host}: set MASTER_PORT to a free one, the same on all nodes"
        )
    with _ray_node(
        "--head", f"--port={port}", f"--node-ip-address={host}", "--include-dashboard=false"
    ) as ray:
        _wait(
            lambda: answers(host, port, LOOK_EVERY_S), f"Ray to start at {host}:{port}", ray, timeout, START_S
        )
        missing = _Missing(f"{host}:{port}", num_nodes)
        _wait(lambda: missing.count() == 0, missing, ray, timeout)
        with _handed_on() as hand_on:
            child = subprocess.Popen(command, env=os.environ | {"RAY_ADDRESS": f"{host}:{port}"})
            hand_on.append(child)
            return _status(child.wait())


@contextmanager
def _handed_on() -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Signals go on to the command that is put into the list, which ends in its own way and time. A terminal
    sends some to both; the command takes two in quick succession for one."""
    commands: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, _: object) -> None:
        for child in commands:
            child.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in HANDED_ON}
    try:
        yield commands
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(host: str, port: int, timeout: float) -> int:
    _wait(lambda: answers(host, port, LOOK_EVERY_S), f"node 0 at {host}:{port}", None, timeout)
    with _ray_node(f"--address={host}:{port}") as ray:
        lost = 0
        while lost < LOST_AFTER:
            time.sleep(LOOK_EVERY_S)
            lost = 0 if answers(host, port, LOOK_EVERY_S) else lost + 1
            if ray.poll() is not None:
                raise ClusterError(f"Ray has ended on this node (status {ray.returncode})")
    return 0


class _Missing:
    """The nodes that have not joined yet."""

    def __init__(self, address: str, num_nodes: int) -> None:
        self._address, self._num_nodes = address, num_nodes
        self._left = num_nodes

    def count(self) -> int:
        """Asked of the head's own table: a driver here would be one more in the cluster."""
        nodes = GcsClient(address=self._address).get_all_node_info(timeout=GCS_TIMEOUT_S)
        alive = sum(node.state == GcsNodeInfo.ALIVE for node in nodes.values())
        self._left = max(0, self._num_nodes - max(1, alive))  # this one is on its way
        return self._left

    def __str__(self) -> str:
        nodes = "1 more node" if self._left == 1 else f"{self._left} more nodes"
        return f"{nodes} at {self._address}"


@contextmanager
def _ray_node(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`ray start` as a child of this process, in a directory that is gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="ibpo-ray-"))
    with swept(directory):
        options = [*arguments, "--block", "--disable-usage-stats"]
        options += [f"--temp-dir={directory}"]
        ray = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *options],
            stdout=subprocess.DEVNULL,
            stderr=(directory / "start.log").open("wb"),
            start_new_session=True,  # a Ctrl-C is for the command first
        )
        try:
            yield ray
        finally:
            ray.terminate()
            try:
                ray.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                ray.kill()


def _wait(
    done: Callable[[], bool],
    what: object,
    ray: subprocess.Popen[bytes] | None,
    timeout: float,
    quiet: float = QUIET_S,
) -> None:
    """Until `done`; says what it waits for, after a moment and then each minute.

    Raises:
        ClusterError: it took longer than `timeout` seconds, or Ray ended on this node.
    """
    started, said = time.monotonic(), 0.0
    while not done():
        waited = time.monotonic() - started
        if ray is not None and ray.poll() is not None:
            raise ClusterError(f"Ray has ended on this node (status {ray.returncode}) before all nodes came")
        if waited > timeout:
            raise ClusterError(
                f"waited {waited:.0f} s for {what}; start the script on every node with its own "
                "NODE_RANK and the same MASTER_ADDR, MASTER_PORT and NNODES"
            )
        if waited > quiet and (not said or waited - said > REPEAT_S):
            print(f"waiting for {what}", file=sys.stderr, flush=True)
            said = waited
        time.sleep(LOOK_EVERY_S)


def _status(code: int) -> int:
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
