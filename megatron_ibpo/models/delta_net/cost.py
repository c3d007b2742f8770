"""Cost of a layer's mixer: attention, or the gated delta net."""

from megatron_ibpo.models.cost import MixerCost, attention_cost
from megatron_ibpo.models.delta_net.shape import DeltaNetShape

CHUNK = 64
"""Tokens between two states that flash-linear-attention stores for the backward pass."""


def mixer_cost(shape: DeltaNetShape, layer: int) -> MixerCost:
    return attention_cost(shape, layer) if shape.full_attention[layer] else delta_net_cost(shape)


def delta_net_cost(shape: DeltaNetShape) -> MixerCost:
    """Return the cost of a gated delta net. For every token the state is decayed and read for the old value,
    written, and read for the output."""
    key, value = shape.gdn_keys, shape.gdn_values
    state = value * shape.gdn_key_dim
    projected = 2 * key + 2 * value + 2 * shape.gdn_value_heads
    convolved = 2 * key + value
    repeated = 2 * shape.gdn_value_heads * shape.gdn_key_dim
    output = 3 * value
    return MixerCost(
        weights=shape.hidden_size * (projected + value),
        flops_per_token=6 * state,
        kept=projected + convolved + repeated + output + state // CHUNK,
        # additions of the state before a chunk: values and outputs as wide as keys, and their states
        kept_with_states=(2 + shape.gdn_key_dim // CHUNK) * shape.gdn_value_heads * shape.gdn_key_dim,
        exchanged=projected + value,
        recurrent_state=state,
        convolution_state=convolved * (shape.gdn_conv_kernel - 1),
    )
