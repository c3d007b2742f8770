"""Ray for the length of a run: the run's own on this machine, or a place in an existing cluster.

The run's own Ray listens on the loopback interface only, requires a token, keeps its files in a private
temporary directory and leaves nothing behind, however the run ends.
"""

import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from megatron_ibpo.basics.entry_point import FAILED
from megatron_ibpo.basics.rendezvous import LOOPBACK, private_directory, variables_set
from megatron_ibpo.weights import first_line

SWEEP_TIMEOUT_S = 15.0
"""Seconds for the process that cleans up, once Ray itself has been told to stop."""
OBJECT_STORE_BYTES = 1024**3
"""Bytes of the object store of the run's own Ray. It holds data in transit between processes, mostly the
packed arrays of a step: 16 bytes per token for 67 million tokens."""

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # we may give GPUs to a process without GPUs of Ray's
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_task_events_report_interval_ms": "0",  # a record of every call, for a dashboard: 5 MB per 100 steps
    # engines and verifiers end with their owner by themselves and clean up; killed by Ray they could not
    "RAY_kill_child_processes_on_worker_exit": "0",
}
START_WAIT_S = 120.0
"""Seconds for Ray to start. Ray's own limit for each part is 30 s, which a busy machine exceeds."""
RAYLET_WAIT = "RAY_raylet_start_wait_time_s"
GCS_WAIT = "RAY_gcs_server_port_wait_time_s"
"""Variable for a head that chooses its port; set in other cases, it would multiply Ray's waits."""
RAY_DIRECTORY = "r"
"""Subdirectory of a private directory, since Ray makes its own directory writable for every user."""
SOCKET_BYTES = len(f"/{RAY_DIRECTORY}/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
SERVERS_NOT_USED = ("start_log_monitor", "start_monitor", "start_api_server")
"""Methods of Ray's node that start processes for a terminal, an autoscaler and a dashboard. The run's own Ray
has none of these, and on two cores the processes take a second of every start."""
ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable which, set to 0, prevents it on every system from replacing 127.0.0.1 by an address that
other machines reach."""

TOKEN_FILE = ".ray_token"
"""Name of the token's file, in the private directory of a Ray, and in the run's directory for the other nodes
of a cluster. Processes get its path: an environment variable with the token itself would reach every
child."""

CONNECT_TIMEOUT_S = 10.0
NO_CLUSTER = (
    "start a cluster with `ray start --head`, or leave out --ray-address and RAY_ADDRESS, and the run "
    "starts its own Ray"
)
OTHER_TOKEN = (
    "that cluster has another token; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the one it was started "
    "with (RUN_DIR/.ray_token for a cluster of examples/run.sh)"
)
LOOK_EVERY_S = 0.2
ASK_EVERY_S = 5.0
MOST_UNANSWERED = 4
"""Calls in a row without an answer that end this process; each takes a wait and a time-out of `ASK_EVERY_S`.
Ray ends the process after 60 s, in its own words."""
T = TypeVar("T")
_abandoned = threading.Event()


class ClusterError(ValueError):
    """Ray cannot be used as the command asks; the user can fix that."""


class ClusterFailedError(RuntimeError):
    """Ray, or a node, failed or took too long. The command is correct, and may work another time."""


class RayStartError(ClusterFailedError):
    """Ray did not start, or could not be joined. Another try may succeed."""


@contextmanager
def open_ray(address: str | None, *, num_cpus: int, object_store_bytes: int | None = None) -> Iterator[None]:
    """Connect this process to Ray, and disconnect it on the way out.

    Args:
        address: an existing cluster (host:port, or "auto" for the one on this machine); None starts one.
        num_cpus: processes that the run's own Ray may hold at once. They share the processors.
        object_store_bytes: shared memory of the run's own Ray.

    Raises:
        ClusterError: there is no such cluster, it runs another version of Ray or Python, requires another
            token, or Ray has no room on this machine.
        RayStartError: Ray does not start, or not in time.
    """
    os.environ |= QUIET
    _abandoned.clear()  # first: the start may be abandoned while Ray is imported
    import ray

    if address is None:
        with retry_once(lambda: _start_own(num_cpus, object_store_bytes or OBJECT_STORE_BYTES)):
            yield
        return
    use_token()
    retry_once(lambda: _connect(address))
    try:
        yield
    finally:
        ray.shutdown()


def retry_once(start: Callable[[], T]) -> T:
    """Call `start`, and once more if Ray did not start."""
    try:
        return start()
    except RayStartError as error:
        if _abandoned.is_set():
            raise
        print(f"{error}; trying again", file=sys.stderr, flush=True)
        return start()


def _start_own(num_cpus: int, object_store_bytes: int) -> ExitStack:
    """Start the run's own Ray. Return the stack that ends it."""
    import ray

    room = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    if room < object_store_bytes:
        raise ClusterError(
            f"--object-store-bytes: /dev/shm has {room / 1024**2:.0f} MiB free, and Ray needs "
            f"{object_store_bytes / 1024**2:.0f} MiB; enlarge it (docker: --shm-size), or lower the flag"
        )
    with ExitStack() as stack:
        directory = stack.enter_context(ray_directory())
        stack.enter_context(own_token(directory))
        stack.callback(ray.shutdown)
        try:
            with _isolated():
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    object_store_memory=object_store_bytes,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    # with another address of 127.0.0.0/8, Ray's servers would listen on all interfaces
                    _node_ip_address=LOOPBACK,
                    _temp_dir=str(directory / RAY_DIRECTORY),
                )
        except Exception as error:
            raise RayStartError(f"Ray does not start on this machine: {first_line(error)}") from error
        stack.enter_context(ended_with_ray())
        return stack.pop_all()


@contextmanager
def ray_directory() -> Iterator[Path]:
    """Make a private directory for a Ray. It is removed afterwards, and the processes that use it are ended.
    Raises ClusterError if none can be made."""
    try:
        directory = private_directory("ibpo-ray-", SOCKET_BYTES)
    except OSError as error:
        raise ClusterError(str(error)) from error
    with swept(directory):
        yield directory


@contextmanager
def _isolated() -> Iterator[None]:
    """Keep Ray's processes on this machine and in their own process group, and give them `START_WAIT_S` to
    start. A Ctrl-C, a closed terminal, `kill %1` and `timeout` reach the whole group of the driver, which
    must finish its step with its processes; Ray protects them only from SIGINT."""
    from ray._private import ray_constants, services
    from ray._private.node import Node

    started: list[subprocess.Popen[bytes]] = []
    popen, get_node = services.ConsolePopen, services.get_node
    deadline, over = time.monotonic() + START_WAIT_S, threading.Event()

    def is_late() -> bool:
        return _abandoned.is_set() or time.monotonic() > deadline

    def start(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        started.append(popen(*arguments, process_group=0, **options))
        return started[-1]

    def wait_for_node(*arguments: Any) -> Any:  # Ray gives up after 30 s
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError as error:
                if is_late():
                    raise TimeoutError("its node manager did not start in time") from error

    def end_when_late() -> None:  # Ray's own consecutive waits last a quarter of an hour
        while not over.wait(LOOK_EVERY_S):
            if is_late():
                for process in started:
                    process.kill()
                return

    with ExitStack() as stack:
        stack.enter_context(variables_set({ONE_MACHINE: "0"} | patience(GCS_WAIT)))
        stack.enter_context(mock.patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False))
        stack.enter_context(mock.patch.object(services, "ConsolePopen", start))
        stack.enter_context(mock.patch.object(services, "get_node", wait_for_node))
        for name in SERVERS_NOT_USED:
            if hasattr(Node, name):  # another version of Ray may have other names, and then starts them
                stack.enter_context(mock.patch.object(Node, name))
        threading.Thread(target=end_when_late, daemon=True).start()
        stack.callback(over.set)
        read_settings_again()
        yield


def patience(*limits: str) -> dict[str, str]:
    """Return longer limits for Ray's start, unless the user has set them."""
    return {name: f"{START_WAIT_S:.0f}" for name in limits if name not in os.environ}


def abandon_start() -> None:
    """Make a Ray that another thread starts fail soon, without a second try."""
    _abandoned.set()


def _connect(address: str) -> None:
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError

    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit() and not is_listening(host, int(port), CONNECT_TIMEOUT_S):  # Ray would try for minutes
        raise ClusterError(f"--ray-address {address}: nothing answers there; {NO_CLUSTER}")
    try:
        if port.isdigit() and "://" not in address:
            GcsClient(address=address)  # reports at once what ray.init would retry for minutes
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except AuthenticationError as error:
        raise ClusterError(f"--ray-address {address}: {OTHER_TOKEN}") from error
    except Exception as error:
        text = str(error)
        if "ersion mismatch" in text:
            versions = " ".join(text.split())  # the two versions are on separate lines
            raise ClusterError(
                f"--ray-address {address}: {versions}; start both from the same environment"
            ) from error
        if not port.isdigit():  # "auto", or no address at all
            raise ClusterError(f"--ray-address {address}: {first_line(error)}; {NO_CLUSTER}") from error
        raise RayStartError(f"--ray-address {address}: Ray cannot be joined: {first_line(error)}") from error


def is_listening(host: str, port: int, timeout: float) -> bool:
    """Return whether something listens there."""
    try:
        with socket.create_connection((host, port), timeout=timeout):
            return True
    except OSError:
        return False


def take_back_signals() -> None:
    """Restore the SIGTERM handler in the main thread once Ray is up. Ray treats SIGTERM as a crash, whatever
    handler there is, and ends the process three seconds later."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


# ------------------------------------------------------------------------------------------------------ token


def _has_token() -> bool:
    return bool(os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"))


def makes_token() -> bool:
    """Return whether a run makes its own token: not if the user has set one, or wants none."""
    return not _has_token() and os.environ.get("RAY_AUTH_MODE", "token").lower() == "token"


def use_token() -> None:
    """Present the token that the user has set. Ray does so for an address only if the mode is set too."""
    if _has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        read_settings_again()


def write_token(directory: Path, token: str) -> Path:
    """Write the token atomically where only this user can read it, over an older one. Return the file."""
    descriptor, written = tempfile.mkstemp(dir=directory, prefix=TOKEN_FILE)  # mode 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    return Path(written).replace(directory / TOKEN_FILE)


@contextmanager
def own_token(directory: Path, token: str | None = None) -> Iterator[None]:
    """Give this process and its children `token`, by default a new one, unless the user has set one. They
    read it from their own file in `directory`, so that changes to other copies of it do not matter."""
    if not makes_token():
        yield
        return
    path = write_token(directory, token or secrets.token_hex())
    try:
        with variables_set({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}):
            read_settings_again()
            yield
    finally:
        read_settings_again()


def read_settings_again() -> None:
    """Make Ray read its environment variables and the token again; it reads them only once per process."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


# ------------------------------------------------------------------------------------------------ clearing up

SWEEP = """
import os, shutil, signal, sys, time
directory, spared = sys.argv[1], {int(sys.argv[2]), os.getpid()}
sys.stdin.read()  # until the driver has closed it, or is no more
def held(pid):
    try:
        files = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
        command = open(f"/proc/{pid}/cmdline").read()
    except OSError:
        return False
    return directory in command or any(file.startswith(directory) for file in files)
deadline = time.monotonic() + 10
while time.monotonic() < deadline:
    left = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) not in spared and held(pid)]
    if not left:
        break
    for pid in left:
        try:
            os.kill(int(pid), signal.SIGKILL)
        except OSError:
            pass
    time.sleep(0.1)
shutil.rmtree(directory, ignore_errors=True)
"""
"""Program of a process that outlives the driver: it ends processes that still use the directory of its Ray.
After an orderly end there are none; after a kill Ray's own agents would stay."""


@contextmanager
def swept(directory: Path) -> Iterator[None]:
    """Remove `directory`, and end processes that still use it, when this block or this process has ended."""
    sweeper = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", SWEEP, str(directory), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # protects it from a Ctrl-C
    )
    assert sweeper.stdin is not None
    try:
        yield
    finally:
        sweeper.stdin.close()
        try:
            sweeper.wait(SWEEP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            sweeper.kill()
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def ended_with_ray() -> Iterator[None]:
    """End this process with one line and status 1 as soon as a server of the Ray that it started dies, or
    once its GCS server no longer answers: after a SIGTERM that of Ray 2.60 hangs instead of ending. Ray
    itself would print twenty lines without the raylet, and go on for a minute without the GCS server."""
    from ray._private import ray_constants, worker
    from ray.exceptions import RayError

    node: Any = worker._global_node
    servers = {
        ray_constants.PROCESS_TYPE_GCS_SERVER: "GCS server",
        ray_constants.PROCESS_TYPE_RAYLET: "raylet",
    }
    over = threading.Event()
    global_worker: Any = worker.global_worker

    def watch() -> None:
        while not over.wait(LOOK_EVERY_S):
            dead = [servers[kind] for kind, _ in node.dead_processes() if kind in servers]
            if dead and not over.is_set():
                _end(f"error: Ray's {' and '.join(dead)} on this machine has died; start the run again")

    def ask() -> None:
        unanswered = 0
        while unanswered < MOST_UNANSWERED:
            if over.wait(ASK_EVERY_S):
                return
            try:
                global_worker.gcs_client.internal_kv_get(b"any key", None, timeout=ASK_EVERY_S)
                unanswered = 0
            except RayError:
                unanswered += 1  # not seconds: those go on while this process is stopped
        if not over.is_set():
            _end("error: Ray's GCS server on this machine no longer answers; start the run again")

    watchers = [threading.Thread(target=target, name="Ray's servers", daemon=True) for target in (watch, ask)]
    for watcher in watchers:
        watcher.start()
    try:
        yield
    finally:
        over.set()
        for watcher in watchers:
            watcher.join()


def _end(text: str) -> None:
    with suppress(Exception):
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
    os._exit(FAILED)
