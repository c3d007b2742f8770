"""The nodes that Ray knows, and a placement reserved on them."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from megatron_ibpo.cluster.placement import Node, Placement, PlacementError

NODE_LOOK_S = 5.0
"""Seconds between checks for room in the cluster."""
RESERVE_TIMEOUT_S = 30.0
"""Seconds to wait for a reservation. Free resources are reserved in well under a second; resources in use by
others may stay so for hours."""


class NodeLostError(RuntimeError):
    """A node of the run is gone, and trainers with it."""


def lost_nodes(placement: Placement, nodes: Iterable[int]) -> list[str]:
    """Return the addresses of nodes that have left the cluster.

    Args:
        nodes: indices in `placement.nodes`.
    """
    alive = {found["NodeID"] for found in ray.nodes() if found["Alive"]}
    chosen = [placement.nodes[index] for index in sorted(set(nodes))]
    return [node.address for node in chosen if node.node_id not in alive]


def placed_within(wait: float, place: Callable[[], Placement]) -> Placement:
    """Return the result of `place`; retry for `wait` seconds while the cluster is too small.

    Raises:
        PlacementError: it is still too small.
    """
    deadline = time.monotonic() + wait
    while True:
        try:
            return place()
        except PlacementError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(NODE_LOOK_S)


def cluster_nodes() -> list[Node]:
    """Return the living nodes of the cluster, the driver's first."""
    own = ray.get_runtime_context().get_node_id()
    nodes = [
        Node(
            found["NodeID"],
            found["NodeManagerAddress"],
            int(found["Resources"].get("CPU", 0)),
            int(found["Resources"].get("GPU", 0)),
        )
        for found in ray.nodes()
        if found["Alive"]
    ]
    return sorted(nodes, key=lambda node: node.node_id != own)


@contextmanager
def reserved(placement: Placement) -> Iterator[PlacementGroup]:
    """Reserve all of a placement or nothing, and release it on the way out. Bundle r belongs to trainer rank
    r; engines that do not share the trainers' have the bundles after those.

    Raises:
        PlacementError: other users of the cluster hold the resources.
    """
    slots = placement.trainers + ([] if placement.colocated else placement.engines)
    bundles = [{"CPU": 1.0} | ({"GPU": float(slot.gpus)} if slot.gpus else {}) for slot in slots]
    labels = [{"ray.io/node-id": placement.nodes[slot.node].node_id} for slot in slots]
    group = placement_group(bundles, strategy="PACK", bundle_label_selector=labels)
    try:
        if not group.wait(RESERVE_TIMEOUT_S):
            free = {
                name: value for name, value in ray.available_resources().items() if name in ("CPU", "GPU")
            }
            raise PlacementError(
                f"the cluster is large enough for {len(placement.trainers)} trainers and "
                f"{len(placement.engines)} engines, but other jobs hold its resources (free: "
                f"{free or 'nothing'}); end those jobs, or wait for them"
            )
        yield group
    finally:
        remove_placement_group(group)
