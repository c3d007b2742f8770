"""Qwen3-Next's dimensions."""

from megatron_ibpo.models.delta_net.shape import DeltaNetShape, delta_net_fields
from megatron_ibpo.models.shape import Fields, expert_fields


def read(fields: Fields) -> DeltaNetShape:
    return DeltaNetShape(
        **delta_net_fields(fields),
        **expert_fields(fields, normalized=True),
        shared_expert_hidden_size=fields.count("shared_expert_intermediate_size"),
    )
