"""The models that can be trained; what is special to a family lies in its module (`families`). Shapes and
costs are read without torch and Megatron, which are imported where something is built."""

from megatron_ibpo.models.cost import forward_flops
from megatron_ibpo.models.families import FAMILIES
from megatron_ibpo.models.layout import (
    check_layout,
    least_world,
    padded_vocab_size,
    pipeline_layers,
    world_problems,
)
from megatron_ibpo.models.shape import ModelConfigError, ModelShape, read_hf_config

__all__ = [
    "FAMILIES",
    "ModelConfigError",
    "ModelShape",
    "check_layout",
    "forward_flops",
    "least_world",
    "padded_vocab_size",
    "pipeline_layers",
    "read_hf_config",
    "world_problems",
]
