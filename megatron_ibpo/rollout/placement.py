"""Which rank owns which engine, and on which GPUs it runs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EnginePlace", "place_engines"]


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """One engine: started, fed and stopped by trainer rank `owner`, on the owner's machine."""

    index: int
    owner: int
    gpus: tuple[int, ...]
    """Local GPU numbers, one for each tensor-parallel rank of the engine; empty on CPUs."""


def place_engines(
    world_size: int, tensor_parallel_size: int, *, local_world_size: int, colocate: bool, on_gpu: bool
) -> list[EnginePlace]:
    """One engine for each `tensor_parallel_size` consecutive trainer ranks, owned by the first of them.

    Colocated engines take the GPUs of their ranks; others those that follow the trainers' on the same
    machine, so that a machine has twice as many GPUs as trainers.

    Raises:
        ValueError: the engines' size does not divide the ranks of one machine.
    """
    if local_world_size % tensor_parallel_size or world_size % local_world_size:
        raise ValueError(
            f"--rollout-num-gpus-per-engine {tensor_parallel_size}: an engine must lie within one machine, "
            f"and that does not divide its {local_world_size} trainer ranks"
        )
    places = []
    for owner in range(0, world_size, tensor_parallel_size):
        first = owner % local_world_size + (0 if colocate else local_world_size)
        gpus = tuple(range(first, first + tensor_parallel_size)) if on_gpu else ()
        places.append(EnginePlace(owner // tensor_parallel_size, owner, gpus))
    return places
