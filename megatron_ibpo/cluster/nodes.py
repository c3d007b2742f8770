"""A Ray cluster of the nodes on which the same script was started, for the length of one command.

    python -m megatron_ibpo.cluster.nodes --num-nodes 4 --node-rank 0 --address HOST:PORT -- COMMAND…

on every node, with its own rank. Node 0 starts the cluster, waits for the others, runs COMMAND with
RAY_ADDRESS set, and ends the cluster with it; the others join, and end when node 0 has ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_ibpo.cluster.session import QUIET, ClusterError, swept

__all__ = ["main"]

LOOK_EVERY_S = 1.0
QUIET_S = 2.0
"""Of waiting, before it is said what for."""
REPEAT_S = 60.0
LOST_AFTER = 5
"""Looks in a row at node 0 that find nothing, before a node takes it for ended."""
STOP_TIMEOUT_S = 30.0
BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Be one node of the cluster; returns the exit status of the command on node 0, elsewhere 0."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, command = (
        (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    )
    parser = argparse.ArgumentParser(prog="megatron_ibpo.cluster.nodes", description=__doc__.splitlines()[0])
    parser.add_argument("--num-nodes", type=int, required=True)
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument("--address", required=True, help="HOST:PORT of node 0")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds to wait for other nodes")
    asked = parser.parse_args(own)
    host, _, port = asked.address.rpartition(":")
    os.environ |= QUIET
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if asked.node_rank == 0:
            return _lead(host, int(port), asked.num_nodes, asked.timeout, command)
        return _follow(host, int(port), asked.timeout)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT


def _lead(host: str, port: int, num_nodes: int, timeout: float, command: Sequence[str]) -> int:
    if _answers(host, port):
        raise ClusterError(
            f"port {port} is in use on {host}: set MASTER_PORT to a free one, the same on all nodes"
        )
    with _ray_node(
        "--head", f"--port={port}", f"--node-ip-address={host}", "--include-dashboard=false"
    ) as ray:
        _wait(lambda: _answers(host, port), f"Ray to start at {host}:{port}", ray, timeout)
        missing = _Missing(f"{host}:{port}", num_nodes)
        _wait(lambda: missing.count() == 0, missing, ray, timeout)
        child = subprocess.Popen(command, env=os.environ | {"RAY_ADDRESS": f"{host}:{port}"})
        try:
            return _status(child.wait())
        except KeyboardInterrupt:
            return _status(child.wait())  # it has had the Ctrl-C too, and ends in its own way
        finally:
            child.kill()


def _follow(host: str, port: int, timeout: float) -> int:
    _wait(lambda: _answers(host, port), f"node 0 at {host}:{port}", None, timeout)
    with _ray_node(f"--address={host}:{port}") as ray:
        lost = 0
        while lost < LOST_AFTER:
            time.sleep(LOOK_EVERY_S)
            lost = 0 if _answers(host, port) else lost + 1
            if ray.poll() is not None:
                raise ClusterError(f"Ray has ended on this node (status {ray.returncode})")
    return 0


class _Missing:
    """The nodes that have not joined yet."""

    def __init__(self, address: str, num_nodes: int) -> None:
        self._address, self._num_nodes = address, num_nodes
        self._left = num_nodes

    def count(self) -> int:
        """Asked of a process of its own: this one must not be connected when the command runs."""
        program = (
            "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR'); "
            "print(sum(node['Alive'] for node in ray.nodes()))"
        )
        found = subprocess.run(
            [sys.executable, "-c", program, self._address], capture_output=True, text=True, timeout=120
        )
        words = found.stdout.split()
        if found.returncode == 0 and words:
            self._left = max(0, self._num_nodes - int(words[-1]))
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
    done: Callable[[], bool], what: object, ray: subprocess.Popen[bytes] | None, timeout: float
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
        if waited > QUIET_S and (not said or waited - said > REPEAT_S):
            print(f"waiting for {what}", file=sys.stderr, flush=True)
            said = waited
        time.sleep(LOOK_EVERY_S)


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=LOOK_EVERY_S):
            return True
    except OSError:
        return False


def _status(code: int) -> int:
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
