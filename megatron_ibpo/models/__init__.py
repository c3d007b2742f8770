"""The models that can be trained. What is special to a family lies in the module of its name.

Reading a shape or a cost imports neither torch nor Megatron. Families, weight maps and specs import them
where they build something.
"""

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
