"""The trainers: one process per rank of Megatron's world."""

import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from megatron_ibpo.basics.rendezvous import STORE_DESCRIPTOR
from megatron_ibpo.cluster.actor import Host, Location, gather, in_bundle, result
from megatron_ibpo.cluster.placement import Placement
from megatron_ibpo.cluster.reservation import NodeLostError, lost_nodes
from megatron_ibpo.config import user_directory
from megatron_ibpo.policy import process_start

START_TIMEOUT_S = 300.0
"""Seconds for a process to start, before it imports anything large."""
FACTORY = "megatron_ibpo.policy.process_start:trainer_rank"


class Trainers:
    """All trainer ranks, as the driver controls them. Their exceptions are raised here."""

    def __init__(self, group: PlacementGroup, placement: Placement) -> None:
        """Start the processes, without waiting."""
        self._environment = {
            "IBPO_CWD": str(user_directory()),  # where the user's own import paths are looked up
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # ranks share the cores of a node
            # the user's settings here apply on every node
            **{name: os.environ[name] for name in process_start.DEFAULTS if name in os.environ},
        }
        self._group, self._placement = group, placement
        self.hosts = self._launched()
        self.locations: list[Location] = []

    def restart(self, *arguments: Any) -> None:
        """End the remaining processes, and build the model in new ones. Raises ProcessDiedError as `build`,
        and NodeLostError if a node that had some of them has left the cluster."""
        self.close()
        if lost := lost_nodes(self._placement, (slot.node for slot in self._placement.trainers)):
            raise NodeLostError(f"trainers were lost with {', '.join(lost)}")
        self.hosts, self.locations = self._launched(), []
        self.build(*arguments)

    def locate(self) -> None:
        """Find out where the processes are, before they take any memory of their GPUs. Raises
        ProcessDiedError if one did not start."""
        self.locations = gather([host.location() for host in self.hosts], self._names, START_TIMEOUT_S)

    def main_memory(self) -> dict[int, int]:
        """Return the bytes on each node with trainers, by its index in the placement; call after `locate`."""
        slots = self._placement.trainers
        return {slot.node: place.memory for slot, place in zip(slots, self.locations, strict=True)}

    def build(self, *arguments: Any) -> None:
        """Build the model on every rank. Raises ProcessDiedError if a process did not start, or died."""
        if not self.locations:
            self.locate()
        address = self.locations[0].address
        port, descriptor = result(self.hosts[0].listen(), "trainer 0", START_TIMEOUT_S)
        world = {"WORLD_SIZE": str(len(self.hosts)), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        rank_environments = [self._local(rank) for rank in range(len(self.hosts))]
        rank_environments[0][STORE_DESCRIPTOR] = str(descriptor)
        pairs = zip(self.hosts, rank_environments, strict=True)
        gather([host.build(FACTORY, world | local, *arguments) for host, local in pairs], self._names)

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` on every rank with its own arguments; return the results by rank."""
        pairs = zip(self.hosts, arguments, strict=True)
        return gather([host.call(method, *rank_arguments) for host, rank_arguments in pairs], self._names)

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call `method` on every rank with the same arguments; return the results by rank."""
        return self.call_each(method, [arguments] * len(self.hosts))

    def share(self, value: Any) -> Any:
        """Return an argument for several ranks that is sent to each node only once."""
        return ray.put(value)

    def gpus(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return the GPUs of these ranks, as named in CUDA_VISIBLE_DEVICES."""
        return tuple(gpu for rank in ranks for gpu in self.locations[rank].gpus)

    def close(self) -> None:
        """End the processes at once; everything worth keeping has been saved."""
        for host in self.hosts:
            host.kill()

    def _launched(self) -> list[Host]:
        return [
            Host(
                f"trainer {rank}", in_bundle(self._group, rank), gpus=slot.gpus, environment=self._environment
            )
            for rank, slot in enumerate(self._placement.trainers)
        ]

    @property
    def _names(self) -> list[str]:
        return [host.name for host in self.hosts]

    def _local(self, rank: int) -> dict[str, str]:
        """Return the variables that torchrun would set for a rank on its node. A rank sees the one GPU that
        Ray gave it, as number 0."""
        slots = self._placement.trainers
        node = slots[rank].node
        peers = [peer for peer, slot in enumerate(slots) if slot.node == node]
        local = 0 if slots[rank].gpus else peers.index(rank)
        return {"RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(len(peers))}
