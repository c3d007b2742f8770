"""Plan of the node and GPUs for each process, before anything is reserved or started; and the main memory of
a node."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from megatron_ibpo.basics.text import listed

_GROUPS = Path("/sys/fs/cgroup")
_PROCESS_GROUPS = Path("/proc/self/cgroup")
_MOST_NAMED = 32
"""Most nodes that a message names before it only counts."""


class PlacementError(ValueError):
    """The cluster is too small for the run."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, with its free resources."""

    node_id: str
    address: str
    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Slot:
    """One process: the index of its node, and the number of GPUs reserved for it there."""

    node: int
    gpus: int
    """0 on CPUs, for an engine on the trainers' GPUs, and for one that spans nodes, whose GPUs vLLM's own Ray
    back end reserves."""


@dataclass(frozen=True, slots=True)
class Engines:
    """The requested engines."""

    tensor_parallel_size: int
    """GPUs (or CPU workers) per engine."""
    colocate: bool
    """True if they share the trainers' GPUs."""
    num_gpus: int | None = None
    """Total GPUs of engines with their own GPUs; None: as many as there are trainers."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of every process of a run."""

    nodes: list[Node]
    trainers: list[Slot]
    """Places of trainers by rank. Consecutive ranks are on one node."""
    engines: list[Slot]
    partners: list[tuple[int, ...]]
    """Trainer ranks whose GPUs an engine shares; empty for engines with their own. On CPUs, the ranks next to
    an engine."""
    colocated: bool

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (node, trainers, engines) for display."""
        ranks, engines = _by_node(self.trainers), _by_node(self.engines)
        return [
            (node.address, _ranges(ranks[index]), _ranges(engines[index]))
            for index, node in enumerate(self.nodes)
        ]

    @property
    def on_gpu(self) -> bool:
        """True if any node has GPUs for the run."""
        return any(node.gpus for node in self.nodes)

    def spans_nodes(self, engine: int) -> bool:
        """Return whether the engine is larger than a node. Nothing is reserved for it, since vLLM does that
        itself."""
        return self.on_gpu and not self.colocated and self.engines[engine].gpus == 0

    @property
    def owners(self) -> list[int]:
        """Trainer rank that talks to each engine during a weight update."""
        return [
            partners[0] if partners else number % len(self.trainers)
            for number, partners in enumerate(self.partners)
        ]


def plan_placement(
    nodes: Sequence[Node], *, num_trainers: int, engines: Engines | None, on_gpu: bool
) -> Placement:
    """Place trainers node by node, then engines: colocated ones on the GPUs of consecutive trainers, others
    on the rest, nodes without trainers first. Raises PlacementError with the missing and the available
    resources.

    Args:
        nodes: nodes that the run may use, the driver's first.
        engines: None for a run without engines (recorded rollouts are replayed).
        on_gpu: every trainer takes one GPU, every engine its tensor-parallel size; otherwise each process
            takes one CPU.
    """
    nodes = sorted(nodes, key=lambda node: -(node.gpus if on_gpu else 0))  # stable: the driver's stays first
    free = [node.gpus if on_gpu else node.cpus for node in nodes]
    trainers = _fill(free, num_trainers, "GPUs" if on_gpu else "CPUs", nodes, on_gpu)
    if engines is None:
        return Placement(nodes, trainers, [], [], colocated=False)
    if engines.colocate:
        return _colocated(nodes, trainers, engines, on_gpu)
    return _place_separately(nodes, trainers, free, engines, on_gpu)


def _fill(free: list[int], count: int, unit: str, nodes: Sequence[Node], on_gpu: bool) -> list[Slot]:
    if count > sum(free):
        raise PlacementError(
            f"--num-trainers {count}: the cluster has {sum(free)} {unit} ({_described(nodes, on_gpu)}); add "
            "nodes, or take a smaller layout"
        )
    slots: list[Slot] = []
    for index in range(len(nodes)):
        num_slots = min(free[index], count - len(slots))
        slots += [Slot(index, 1 if on_gpu else 0)] * num_slots
        free[index] -= num_slots
    return slots


def _colocated(nodes: Sequence[Node], trainers: Sequence[Slot], engines: Engines, on_gpu: bool) -> Placement:
    size = engines.tensor_parallel_size
    places, partners = [], []
    for first in range(0, len(trainers), size):
        ranks = tuple(range(first, first + size))
        if ranks[-1] >= len(trainers) or trainers[first].node != trainers[ranks[-1]].node:
            counts = [f"{nodes[index].address}: {len(r)}" for index, r in sorted(_by_node(trainers).items())]
            raise PlacementError(
                f"--rollout-num-gpus-per-engine {size}: must divide the number of trainers on each node, "
                f"since a colocated engine lies within one node ({listed(counts, most=_MOST_NAMED)})"
            )
        places.append(Slot(trainers[first].node, 0))
        partners.append(ranks)
    return Placement(list(nodes), list(trainers), places, partners, colocated=True)


def _place_separately(
    nodes: Sequence[Node], trainers: Sequence[Slot], free: list[int], engines: Engines, on_gpu: bool
) -> Placement:
    size = engines.tensor_parallel_size
    total = engines.num_gpus or len(trainers)
    if total % size:
        raise PlacementError(
            f"--rollout-num-gpus {total}: must be a multiple of --rollout-num-gpus-per-engine {size}"
        )
    with_trainers = {slot.node for slot in trainers}
    order = sorted(range(len(nodes)), key=lambda index: index in with_trainers)
    step = size if on_gpu else 1
    places: list[Slot] = []
    if on_gpu and size > max(node.gpus for node in nodes):
        gpus = [index for index in order for _ in range(free[index])]
        count = min(len(gpus), total) // size
        places += [Slot(gpus[number * size], 0) for number in range(count)]
        for index in gpus[: count * size]:
            free[index] -= 1
    for index in order:
        while free[index] >= step and len(places) < total // size:
            places.append(Slot(index, size if on_gpu else 0))
            free[index] -= step
    if len(places) < total // size:
        unit = "GPUs" if on_gpu else "CPUs"
        alongside = f"alongside {len(trainers)} trainers " if trainers else ""
        raise PlacementError(
            f"--rollout-num-gpus {total}: {alongside}there is room for {len(places)} of {total // size} "
            f"engines of {step} {unit} each ({_described(nodes, on_gpu)}); add nodes, or ask for fewer"
            + (", or drop --no-colocate" if trainers else "")
        )
    return Placement(list(nodes), list(trainers), places, [()] * len(places), colocated=False)


def _described(nodes: Sequence[Node], on_gpu: bool) -> str:
    return listed(
        [f"{node.address}: {node.gpus if on_gpu else node.cpus}" for node in nodes], most=_MOST_NAMED
    )


def _by_node(slots: Sequence[Slot]) -> dict[int, list[int]]:
    """Return the numbers of the slots on each node."""
    numbers: dict[int, list[int]] = defaultdict(list)
    for number, slot in enumerate(slots):
        numbers[slot.node].append(number)
    return numbers


def _ranges(numbers: Sequence[int]) -> str:
    """Format numbers: 3, 4, 5 as 3-5; none as –."""
    if not numbers:
        return "–"
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))


def main_memory(groups: Path = _GROUPS, process_groups: Path = _PROCESS_GROUPS) -> int:
    """Return the bytes that the processes of a run may take on this node: all its memory, or the lowest limit
    of a control group that this process is in, as containers and batch systems set it. The use by other
    programs is not subtracted. Source: cgroups(7); only version 1 has been run."""
    limits = [psutil.virtual_memory().total]
    for file in _limit_files(groups, process_groups):
        with suppress(OSError, ValueError):  # not shown in this container, or "max"
            limits.append(int(file.read_text(encoding="utf-8")))
    return min(limits)


def _limit_files(groups: Path, process_groups: Path) -> Iterator[Path]:
    """Yield the limit files of this process's group and of all groups around it, for either version of the
    kernel's interface."""
    lines = ""
    with suppress(OSError):  # a kernel without control groups
        lines = process_groups.read_text(encoding="utf-8")
    for line in lines.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        group = PurePosixPath(path)
        for around in (group, *group.parents):
            yield groups / controllers / around.relative_to("/") / name
