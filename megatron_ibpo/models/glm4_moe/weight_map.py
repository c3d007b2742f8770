"""GLM-4.5's tensors."""

import torch

from megatron_ibpo.models.shape import ModelShape
from megatron_ibpo.models.shared_entries import attention, dense_mlp, moe
from megatron_ibpo.models.weight_map import EXPERT_BIAS, Entry, Piece


def layer_entries(shape: ModelShape, layer: int) -> list[Entry]:
    if not shape.has_experts(layer):
        return [*attention(shape), *dense_mlp(shape)]
    bias = Piece("mlp.gate.e_score_correction_bias", (shape.num_experts,))
    return [
        *attention(shape),
        *moe(shape, shared="mlp.shared_experts"),
        Entry(EXPERT_BIAS, (bias,), dtype=torch.float32),
    ]
