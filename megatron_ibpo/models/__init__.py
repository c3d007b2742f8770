"""The models that can be trained. Each family has a folder with what is special to it; the modules here are
common.

Importing this package imports neither torch nor Megatron: weight maps import torch, layer specs Megatron.
"""

from megatron_ibpo.models.cost import forward_flops
from megatron_ibpo.models.families import FAMILIES
from megatron_ibpo.models.layout import check_layout, padded_vocab_size, pipeline_layers
from megatron_ibpo.models.shape import ModelConfigError, ModelShape, read_hf_config

__all__ = [
    "FAMILIES",
    "ModelConfigError",
    "ModelShape",
    "check_layout",
    "forward_flops",
    "padded_vocab_size",
    "pipeline_layers",
    "read_hf_config",
]
