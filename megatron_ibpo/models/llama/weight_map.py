"""Llama's tensors."""

from megatron_ibpo.models.shape import ModelShape
from megatron_ibpo.models.shared_entries import attention, dense_mlp
from megatron_ibpo.models.weight_map import Entry


def layer_entries(shape: ModelShape, layer: int) -> list[Entry]:
    return [*attention(shape), *dense_mlp(shape)]
