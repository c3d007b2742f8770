"""The nodes that Ray knows, and a placement reserved on them."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from megatron_ibpo.cluster.placement import Engines, Node, Placement, PlacementError, plan_placement
from megatron_ibpo.config import Config

NODE_LOOK_S = 5.0
"""Seconds between checks for room in the cluster."""
RESERVE_TIMEOUT_S = 30.0
"""Seconds to wait for a reservation. Free resources are reserved in well under a second; resources in use by
others may stay so for hours."""


class NodeLostError(RuntimeError):
    """A node of the run is gone, and trainers with it."""


def lost_nodes(placement: Placement, nodes: Iterable[int]) -> list[str]:
    """Return the addresses of those of the placement's `nodes`, given by index, that have left the
    cluster."""
    alive = {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]}
    chosen = [placement.nodes[index] for index in sorted(set(nodes))]
    return [node.address for node in chosen if node.node_id not in alive]


def place_run(config: Config, *, samples: bool = True, wait: float = 0.0) -> Placement:
    """Place trainers, and engines unless `samples` is False, on the nodes of the cluster; retry for `wait`
    seconds while it is too small. Raises PlacementError if it still is, and ValueError if settings do not
    suit its devices."""
    deadline = time.monotonic() + wait
    while True:
        try:
            return _placed(config, samples=samples)
        except PlacementError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(NODE_LOOK_S)


def _placed(config: Config, *, samples: bool) -> Placement:
    """Place them once (`place_run`)."""
    cluster, rollout = config.cluster, config.rollout
    nodes = cluster_nodes()
    num_gpus = sum(node.gpus for node in nodes)
    size, own_gpus, engines = rollout.rollout_num_gpus_per_engine, rollout.rollout_num_gpus, None
    if num_gpus and own_gpus is None and not rollout.colocate and not cluster.num_trainers:
        own_gpus = max(1, num_gpus // 2 // size) * size  # half of them, as far as whole engines go
    if samples and config.run.load_debug_rollout_data is None:
        engines = Engines(size, rollout.colocate, own_gpus)
    if num_gpus and rollout.colocate and rollout.max_staleness:
        raise ValueError(
            f"--max-staleness {rollout.max_staleness}: engines that share the trainers' GPUs sleep while "
            "those train, so sampling cannot run ahead; give them GPUs of their own (--no-colocate "
            "--rollout-num-gpus N)"
        )
    if not num_gpus and config.optimizer.use_precision_aware_optimizer:
        raise ValueError("--use-precision-aware-optimizer: saves GPU memory, and there is no GPU; drop it")
    engine_gpus = 0 if rollout.colocate or engines is None else own_gpus or 0
    num_trainers = cluster.num_trainers or max(1, num_gpus - engine_gpus)
    return plan_placement(nodes, num_trainers=num_trainers, engines=engines, on_gpu=num_gpus > 0)


def place_engines(config: Config) -> Placement:
    """Place engines alone: on all GPUs of the cluster, or as many CPU processes as a run has trainers. Raises
    PlacementError if the cluster is too small."""
    nodes, rollout = cluster_nodes(), config.rollout
    size, num_gpus = rollout.rollout_num_gpus_per_engine, sum(node.gpus for node in nodes)
    within_nodes = sum(node.gpus // size for node in nodes)
    engines = within_nodes or (num_gpus or config.cluster.num_trainers or 1) // size or 1
    requested = Engines(size, colocate=False, num_gpus=rollout.rollout_num_gpus or engines * size)
    return plan_placement(nodes, num_trainers=0, engines=requested, on_gpu=num_gpus > 0)


def cluster_nodes() -> list[Node]:
    """Return the living nodes of the cluster, the driver's first."""
    driver_node = ray.get_runtime_context().get_node_id()
    alive = [(entry, entry["Resources"]) for entry in ray.nodes() if entry["Alive"]]
    nodes = [
        Node(entry["NodeID"], entry["NodeManagerAddress"], int(free.get("CPU", 0)), int(free.get("GPU", 0)))
        for entry, free in alive
    ]
    return sorted(nodes, key=lambda node: node.node_id != driver_node)


@contextmanager
def reserved(placement: Placement) -> Iterator[PlacementGroup]:
    """Reserve all of a placement or nothing, and release it on the way out. Bundle r belongs to trainer rank
    r; engines that do not share the trainers' have the bundles after those. Raises PlacementError if other
    users of the cluster hold the resources."""
    slots = placement.trainers + ([] if placement.colocated else placement.engines)
    bundles = [{"CPU": 1.0} | ({"GPU": float(slot.gpus)} if slot.gpus else {}) for slot in slots]
    labels = [{"ray.io/node-id": placement.nodes[slot.node].node_id} for slot in slots]
    group = placement_group(bundles, strategy="PACK", bundle_label_selector=labels)
    try:
        if not group.wait(RESERVE_TIMEOUT_S):
            free = {n: value for n, value in ray.available_resources().items() if n in ("CPU", "GPU")}
            raise PlacementError(
                f"the cluster is large enough for {len(placement.trainers)} trainers and "
                f"{len(placement.engines)} engines, but other jobs hold its resources (free: "
                f"{free or 'nothing'}); end those jobs, or wait for them"
            )
        yield group
    finally:
        remove_placement_group(group)
