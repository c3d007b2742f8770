"""A Ray cluster of the nodes on which the same script was started, for the length of one command.

    python -m megatron_ibpo.cluster.nodes \\
        --num-nodes 4 --node-rank 0 --address HOST:PORT --run-dir DIR -- COMMAND…

on every node, with its own rank. Node 0 starts the cluster, waits for the others, runs COMMAND with
RAY_ADDRESS set, and ends the cluster with it; the others join, and end when node 0 has ended. They know each
other by a token that node 0 writes into DIR.

Ray has `ray symmetric-run` for this. It ends by `ray stop`, which ends every other Ray of the machine too,
and does not start beside one; its status is 0 where Ray did not start; it hands on no signal and no token.
"""

import argparse
import ipaddress
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]

from megatron_ibpo.basics.entry_point import command
from megatron_ibpo.basics.text import counted
from megatron_ibpo.cluster.ray_session import (
    QUIET,
    RAY_DIRECTORY,
    RAYLET_WAIT,
    START_WAIT_S,
    TOKEN_FILE,
    ClusterError,
    ClusterFailedError,
    RayStartError,
    is_listening,
    makes_token,
    own_token,
    patience,
    ray_directory,
    retry_once,
    use_token,
    write_token,
)
from megatron_ibpo.config import path_of_user

LOOK_EVERY_S = 1.0
QUIET_S = 2.0
"""Seconds of waiting before a line gives the reason."""
START_S = 30.0
"""Seconds for Ray to start on this node before a line reports the wait."""
REPEAT_S = 60.0
LOST_AFTER = 5
"""Consecutive failed looks at node 0 before another node considers it ended."""
GCS_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
"""Seconds for Ray to stop; after that the rest is removed with its directory."""
TOKEN_WAIT_S = 60.0
"""Seconds to wait for the token once node 0 has written it: other nodes may see a shared directory a little
later."""
SHARE_TOKEN = (
    "put RUN_DIR on a disk that all nodes share, through which they get the token of the cluster, or set "
    "the same RAY_AUTH_TOKEN on all of them (RAY_AUTH_MODE=disabled on all turns tokens off)"
)
START_ALL = (
    "start the script on every node with its own NODE_RANK and the same MASTER_ADDR, MASTER_PORT and NNODES"
)
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run one node of the cluster. Return the exit status of the command on node 0, and 0 elsewhere."""
    words = list(sys.argv[1:] if argv is None else argv)
    node_flags, words = (
        (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    )
    parser = argparse.ArgumentParser(prog="megatron_ibpo.cluster.nodes", description=__doc__.splitlines()[0])
    parser.add_argument("--num-nodes", type=int, required=True)
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument("--address", required=True, help="HOST:PORT of node 0")
    parser.add_argument("--run-dir", type=Path, help="directory that all nodes share")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds to wait for other nodes")
    arguments = parser.parse_args(node_flags)
    host, _, port = arguments.address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        parser.error(f"--address {arguments.address}: must be HOST:PORT, the port a number (see MASTER_PORT)")
    os.environ |= QUIET
    use_token()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    host = numeric_address(host, arguments.num_nodes)
    run_dir = None if arguments.run_dir is None else path_of_user(arguments.run_dir)
    if arguments.node_rank == 0:
        return _lead(host, int(port), arguments.num_nodes, run_dir, arguments.timeout, words)
    return _follow(host, int(port), run_dir, arguments.timeout)


def numeric_address(host: str, num_nodes: int) -> str:
    """Return the numeric address of node 0: Ray passes the address on as given, and gloo and NCCL cannot be
    told to listen on a name. Raises ClusterError if there is no such host, or its name means this machine
    alone, as is common in /etc/hosts, and there are other nodes."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(host))
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ClusterError(f"MASTER_ADDR={host}: no such host is known here ({error})") from None
    addresses = [str(entry[4][0]) for entry in entries]
    addresses.sort(key=lambda address: ":" in address)  # IPv4 first
    reached = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    if num_nodes > 1 and not reached:
        raise ClusterError(
            f"MASTER_ADDR={host} is {addresses[0]} here, which other nodes cannot reach; set it to the "
            "address of node 0 (`hostname -I` lists the addresses of a node)"
        )
    return (reached or addresses)[0]


def _lead(
    host: str, port: int, num_nodes: int, run_dir: Path | None, timeout: float, command: Sequence[str]
) -> int:
    if is_listening(host, port, LOOK_EVERY_S):
        raise ClusterError(
            f"port {port} is in use on {host}: set MASTER_PORT to a free one, the same on all nodes"
        )
    with ExitStack() as stack:
        token = stack.enter_context(_shared_token(run_dir)) if num_nodes > 1 and makes_token() else None
        ray = retry_once(lambda: _start_head(host, port, token, stack))
        missing = _Missing(f"{host}:{port}", num_nodes)
        _wait(missing.has_none, missing, ray, timeout)
        return _run_command(command, f"{host}:{port}")


def _start_head(host: str, port: int, token: str | None, stack: ExitStack) -> "_RayNode":
    """Start the cluster; `stack` ends it."""
    options = ("--head", f"--port={port}", f"--node-ip-address={host}", "--include-dashboard=false")
    awaited, late = f"Ray to start at {host}:{port}", RayStartError("is this machine busy?")
    with ExitStack() as startup:
        ray = startup.enter_context(_ray_node(token, *options))
        _wait(lambda: is_listening(host, port, LOOK_EVERY_S), awaited, ray, START_WAIT_S, START_S, late)
        stack.push(startup.pop_all())
    return ray


def _run_command(command: Sequence[str], address: str) -> int:
    """Return the status of the command. Signals to this process go on to it, and it ends in its own way and
    time. A terminal sends some to both; a command counts two in quick succession as one."""
    children: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, _: object) -> None:
        for child in children:
            child.send_signal(number)

    previous_handlers = {number: signal.signal(number, hand_on) for number in HANDED_ON}
    try:
        children.append(subprocess.Popen(command, env=os.environ | {"RAY_ADDRESS": address}))
        code = children[0].wait()
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


@contextmanager
def _shared_token(run_dir: Path | None) -> Iterator[str]:
    """Give a token that stays in `run_dir` for as long as the cluster exists."""
    if run_dir is None:
        raise ClusterError(f"--run-dir is not given: {SHARE_TOKEN}")
    token = secrets.token_hex()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = write_token(run_dir, token)
    except OSError as error:
        raise ClusterError(f"RUN_DIR: {run_dir} cannot be written: {error.strerror}") from error
    try:
        yield token
    finally:
        if _read_token(path) == token:  # otherwise a later start has written its own
            path.unlink(missing_ok=True)


def _follow(host: str, port: int, run_dir: Path | None, timeout: float) -> int:
    _wait(lambda: is_listening(host, port, LOOK_EVERY_S), f"node 0 at {host}:{port}", None, timeout)
    token = _token_of_node_0(run_dir) if makes_token() else None
    retry_once(lambda: _join_cluster(host, port, token))
    return 0


def _join_cluster(host: str, port: int, token: str | None) -> None:
    """Be a node of the cluster until node 0 has ended."""
    with _ray_node(token, f"--address={host}:{port}") as ray:
        lost = 0
        while lost < LOST_AFTER:
            time.sleep(LOOK_EVERY_S)
            lost = 0 if is_listening(host, port, LOOK_EVERY_S) else lost + 1
            ray.check()


def _token_of_node_0(run_dir: Path | None) -> str:
    if run_dir is None:
        raise ClusterError(f"--run-dir is not given: {SHARE_TOKEN}")
    path = run_dir / TOKEN_FILE
    awaited = f"{path}, which node 0 writes"
    _wait(lambda: bool(_read_token(path)), awaited, None, TOKEN_WAIT_S, late=ClusterError(SHARE_TOKEN))
    return _read_token(path)


def _read_token(path: Path) -> str:
    """Return the token in the file; empty if there is none."""
    with suppress(OSError):
        return path.read_text()
    return ""


@dataclass
class _Missing:
    """The nodes that have not joined yet."""

    address: str
    num_nodes: int
    count: int = 0

    def has_none(self) -> bool:
        """Count them in the head's own table, since a driver here would be one more process in the
        cluster."""
        nodes = GcsClient(address=self.address).get_all_node_info(timeout=GCS_TIMEOUT_S)
        alive = sum(node.state == GcsNodeInfo.ALIVE for node in nodes.values())
        self.count = max(0, self.num_nodes - max(1, alive))  # this node is still joining
        return self.count == 0

    def __str__(self) -> str:
        return f"{counted(self.count, 'more node')} at {self.address}"


@dataclass(frozen=True)
class _RayNode:
    """`ray start` as a child of this process."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def check(self) -> None:
        """Raise ClusterError if Ray has ended on this node and would again, and RayStartError if it has ended
        for another reason."""
        if self.process.poll() is None:
            return
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        ending = f"Ray has ended on this node (status {self.process.returncode})"
        if any("InvalidAuthToken" in line for line in lines):
            raise ClusterError(f"{ending}: node 0 has another token; {SHARE_TOKEN}")
        if mismatch := [line.strip() for line in lines if "ersion mismatch" in line]:
            raise ClusterError(f"{ending}: {mismatch[0]}; start all nodes from the same environment")
        raise RayStartError(": ".join([ending, *(line.strip() for line in lines[-1:])]))


@contextmanager
def _ray_node(token: str | None, *arguments: str) -> Iterator[_RayNode]:
    """Run a node of Ray in a temporary directory; both are gone afterwards."""
    with ray_directory() as directory, own_token(directory, token):
        options = [*arguments, "--block", "--disable-usage-stats", f"--temp-dir={directory / RAY_DIRECTORY}"]
        log = directory / "start.log"
        ray = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *options],
            stdout=subprocess.DEVNULL,
            stderr=log.open("wb"),
            env=os.environ | patience(RAYLET_WAIT),
            start_new_session=True,  # a Ctrl-C is for the command first
        )
        try:
            yield _RayNode(ray, log)
        finally:
            ray.terminate()
            try:
                ray.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                ray.kill()


def _wait(
    done: Callable[[], bool],
    awaited: object,
    ray: _RayNode | None,
    timeout: float,
    quiet: float = QUIET_S,
    late: Exception | None = None,
) -> None:
    """Wait until `done`; report the reason after a moment and then every minute. Raise `late`, by default
    ClusterFailedError, with the wait before its message after `timeout` seconds, and as `_RayNode.check`."""
    started, last_report = time.monotonic(), 0.0
    while not done():
        waited = time.monotonic() - started
        if ray is not None:
            ray.check()
        if waited > timeout:
            late = late or ClusterFailedError(START_ALL)
            raise type(late)(f"waited {waited:.0f} s for {awaited}; {late}")
        if waited > quiet and (not last_report or waited - last_report > REPEAT_S):
            print(f"waiting for {awaited}", file=sys.stderr, flush=True)
            last_report = waited
        time.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    sys.exit(main())
