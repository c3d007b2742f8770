"""Where a rank stands in the layout, as far as weights are concerned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.nn import Parameter

from megatron_ibpo.shape import ModelShape
from megatron_ibpo.weights.maps import Entry, global_name

__all__ = ["Place", "my_place", "parameters_by_global_name"]


@dataclass(frozen=True)
class Place:
    """What part of the model a rank holds."""

    tp_rank: int
    tp_size: int
    etp_rank: int
    etp_size: int
    first_layer: int
    layers: int
    first_expert: int
    experts: int
    is_first_stage: bool
    is_last_stage: bool

    def holds(self, entry: Entry) -> bool:
        if entry.layer is None:
            wanted_first = entry.name.startswith("embedding.")
            return self.is_first_stage if wanted_first else self.is_last_stage
        if not self.first_layer <= entry.layer < self.first_layer + self.layers:
            return False
        return entry.expert is None or (self.first_expert <= entry.expert < self.first_expert + self.experts)

    def shard(self, entry: Entry) -> tuple[int, int]:
        """(rank, size) of the group that divides this entry's tensors."""
        if entry.expert is None:
            return self.tp_rank, self.tp_size
        return self.etp_rank, self.etp_size


def my_place(shape: ModelShape) -> Place:
    """This rank's place, from Megatron's groups."""
    from megatron.core import parallel_state as groups

    stages = groups.get_pipeline_model_parallel_world_size()
    layers = shape.num_layers // stages
    experts = shape.num_experts // groups.get_expert_model_parallel_world_size()
    return Place(
        tp_rank=groups.get_tensor_model_parallel_rank(),
        tp_size=groups.get_tensor_model_parallel_world_size(),
        etp_rank=groups.get_expert_tensor_parallel_rank(),
        etp_size=groups.get_expert_tensor_parallel_world_size(),
        first_layer=groups.get_pipeline_model_parallel_rank() * layers,
        layers=layers,
        first_expert=groups.get_expert_model_parallel_rank() * experts,
        experts=experts,
        is_first_stage=groups.is_pipeline_first_stage(),
        is_last_stage=groups.is_pipeline_last_stage(),
    )


def parameters_by_global_name(chunks: list[Any], place: Place) -> Iterator[tuple[str, Parameter]]:
    """This rank's parameters under their names in the whole model."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            yield global_name(name, place.first_layer, place.first_expert), parameter
