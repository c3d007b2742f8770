"""The only kind of Ray actor here: a process that builds an object of ours and runs its methods."""

import importlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from megatron_ibpo.basics.rendezvous import NODE_ADDRESS, listen
from megatron_ibpo.cluster.deaths import ProcessDiedError, exit_reason, record_peak_memory
from megatron_ibpo.cluster.placement import main_memory

GRACE_S = 5.0
"""Seconds to wait, after the first failure of several processes, for the others to fail too, since theirs may
be the better message."""


@dataclass(frozen=True, slots=True)
class Location:
    """The place where a process runs."""

    address: str
    gpus: tuple[str, ...]
    """GPUs that Ray gave it, as named in CUDA_VISIBLE_DEVICES."""
    memory: int
    """Bytes of main memory that the processes of this node may take together."""


class _Process:
    """The code that runs inside the actor."""

    def __init__(self, name: str, environment: Mapping[str, str], paths: Sequence[str]) -> None:
        head = ray.get_runtime_context().gcs_address
        os.environ.update(listening_on(ray.util.get_node_ip_address(), head) | dict(environment))
        if gpus := ray.get_gpu_ids():  # clusters of other programs often have Ray told not to set this
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        sys.path += [path for path in paths if path not in sys.path]
        self._name = name
        self._built: Any = None
        if (logs := _ray_logs()) is not None:
            record_peak_memory(logs, os.getpid())

    def location(self) -> Location:
        address = ray.util.get_node_ip_address()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return Location(address, tuple(gpu for gpu in visible.split(",") if gpu), main_memory())

    def listen(self) -> tuple[int, int]:
        """Return port and file descriptor of a socket that listens at this node's address, for the object
        built here. A port that is merely found free may be taken seconds later."""
        with listen(ray.util.get_node_ip_address()) as listener:
            return listener.getsockname()[1], listener.detach()

    def build(self, factory: str, environment: Mapping[str, str], *arguments: Any) -> None:
        os.environ.update(environment)
        module, _, name = factory.partition(":")
        self._built = getattr(importlib.import_module(module), name)(*arguments)

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self._built, method)(*arguments, **named)


Place = PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy


def in_bundle(group: PlacementGroup, bundle: int) -> Place:
    """Return the place of a process in its own bundle of a reservation."""
    return PlacementGroupSchedulingStrategy(group, bundle)


def on_node(node_id: str) -> Place:
    """Return a place on this node only, with nothing reserved."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


class Host:
    """A process of the run, as the driver controls it."""

    def __init__(
        self, name: str, place: Place, *, gpus: int, threads: int = 1, environment: Mapping[str, str]
    ) -> None:
        """Start it, without waiting.

        Args:
            name: for messages, such as "trainer 3".
            place: see `in_bundle` and `on_node`.
            gpus: number of the bundle's GPUs that it gets.
            threads: concurrent calls. With 1 they run in its main thread.
        """
        self.name = name
        self.built: Any = None
        self._actor: Any = (
            ray.remote(_Process)
            .options(num_cpus=0, num_gpus=gpus, max_concurrency=threads, scheduling_strategy=place)
            .remote(name, dict(environment), [path or os.getcwd() for path in sys.path])
        )

    def location(self) -> Any:
        return self._actor.location.remote()

    def listen(self) -> Any:
        """Make the process listen at a port. Return a handle for the port and the descriptor there."""
        return self._actor.listen.remote()

    def build(self, factory: str, environment: Mapping[str, str], *arguments: Any) -> Any:
        """Make the process build its object; `factory` is module:name. Return a handle, which `built`
        keeps."""
        self.built = self._actor.build.remote(factory, dict(environment), *arguments)
        return self.built

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Run a method of the object in the process. Return a handle."""
        return self._actor.call.remote(method, *arguments, **named)

    def kill(self) -> None:
        with suppress(Exception):  # whatever is wrong with it, it is being ended
            ray.kill(self._actor)


def result(answer: Any, process: str, timeout: float | None = None) -> Any:
    """Return the result of a call, or raise the exception that it raised in its process. Raises
    ProcessDiedError if that ended, or there was no answer within `timeout` seconds."""
    try:
        return ray.get(answer, timeout=timeout)
    except (RayTaskError, RayActorError) as error:
        raise original_error(error, process) from None
    except GetTimeoutError:
        raise ProcessDiedError(f"{process} did not answer within {timeout:g} seconds") from None


async def awaited(answer: Any, process: str) -> Any:
    """Await the result of a call, without a time-out."""
    try:
        return await answer
    except (RayTaskError, RayActorError) as error:
        raise original_error(error, process) from None


def original_error(error: RayTaskError | RayActorError, process: str) -> Exception:
    """Return the exception that the process raised, with its traceback there as a note; or one that tells how
    it ended."""
    if isinstance(error, RayActorError):
        message = str(error)
        is_local = f"ip: {ray.util.get_node_ip_address()}\n" in message
        return ProcessDiedError(f"{process} {exit_reason(message, _ray_logs() if is_local else None)}")
    if not isinstance(error.cause, Exception):
        return error
    # Ray puts its traceback into an attribute of some errors, and into the text of all
    error.cause.add_note(f"in {process}:\n{getattr(error, 'traceback_str', error)}")
    return error.cause


def gather(refs: Sequence[Any], processes: Sequence[str], timeout: float | None = None) -> list[Any]:
    """Return the results of calls that work together, in order. After one failure the others may wait for the
    failed one forever: the error is raised after a moment in which others may fail too. A process that died
    is named first, followed by an error that it caused elsewhere."""
    waiting = list(refs)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=timeout)
        if not done:
            names = ", ".join(processes[refs.index(ref)] for ref in waiting)
            raise ProcessDiedError(f"{names} did not answer within {timeout:g} seconds")
        try:
            ray.get(done)
        except Exception:
            late = ray.wait(waiting, num_returns=len(waiting), timeout=GRACE_S)[0] if waiting else []
            ended_calls = sorted([*done, *late], key=refs.index)  # rank 0 knows of the disk
            _raise_first([(ref, processes[refs.index(ref)]) for ref in ended_calls])
    return ray.get(list(refs))


def _raise_first(calls: Sequence[tuple[Any, str]]) -> None:
    """Raise the error that explains best why some of these calls failed."""
    errors = []
    for ref, process in calls:
        try:
            result(ref, process)
        except Exception as error:
            errors.append(error)
    deaths = [error for error in errors if isinstance(error, ProcessDiedError)]
    caused = [error for error in errors if error not in deaths]
    if deaths and caused:
        reports = [*deaths, f"other processes reported: {type(caused[0]).__name__}: {caused[0]}"]
        raise ProcessDiedError("\n".join(map(str, reports)))
    raise errors[0]


def listening_on(address: str, head: str) -> dict[str, str]:
    """Return the environment that makes gloo, NCCL and vLLM listen only on the interface with this node's
    address in Ray. If none has it, as behind a translated address or if Ray was started with a name, the
    interface that reaches the cluster's head, HOST:PORT, is used. Variables set by the user stay."""
    interface = _interface(address)
    if interface is None and (facing := _facing(head)) is not None:
        address, interface = facing, _interface(facing)
    variables = {NODE_ADDRESS: address, "VLLM_HOST_IP": address}
    if interface is not None:
        # "=": NCCL would take eth1 for the beginning of a name, and eth10 as well
        variables |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {name: os.environ.get(name, value) for name, value in variables.items()}


def _interface(address: str) -> str | None:
    """Return the name of this machine's interface with the address."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces if address in {e.address for e in entries}), None)


def _facing(head: str) -> str | None:
    """Return this machine's address on the route to the head; None without a route."""
    host, _, port = head.rpartition(":")
    with suppress(OSError, ValueError):
        family, kind, protocol, _, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # chooses the route and sends nothing
            return str(probe.getsockname()[0])
    return None


def _ray_logs() -> Path | None:
    """Return where Ray keeps the logs of this node's processes; None if unknown."""
    node = ray._private.worker._global_node
    return None if node is None else Path(node.get_logs_dir_path())
