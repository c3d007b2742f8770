"""Weights between Hugging Face checkpoints, the trainer's ranks and the engines.

Nothing here imports Megatron or vLLM when it is imported: both sides use this room.
"""

from __future__ import annotations

from megatron_ibpo.weights.errors import CheckpointError
from megatron_ibpo.weights.formats.directories import DiskSpaceError
from megatron_ibpo.weights.formats.load import load_hf
from megatron_ibpo.weights.formats.save import save_hf
from megatron_ibpo.weights.layout.export import HFExport
from megatron_ibpo.weights.layout.weight_source import TensorMeta, WeightSource

__all__ = [
    "CheckpointError",
    "DiskSpaceError",
    "HFExport",
    "TensorMeta",
    "WeightSource",
    "load_hf",
    "save_hf",
]
