"""Cost of Llama's layers: attention in all of them."""

from megatron_ibpo.models.cost import MixerCost, attention_cost
from megatron_ibpo.models.shape import ModelShape


def mixer_cost(shape: ModelShape, layer: int) -> MixerCost:
    return attention_cost(shape)
