"""Weights between Hugging Face checkpoints, the trainer's ranks and the engines.

Nothing here imports Megatron or vLLM when it is imported: both sides use this room.
"""

from __future__ import annotations

from megatron_ibpo.weights.errors import CheckpointError
from megatron_ibpo.weights.export import HFExport
from megatron_ibpo.weights.files import DiskSpaceError
from megatron_ibpo.weights.load import load_hf
from megatron_ibpo.weights.save import save_hf
from megatron_ibpo.weights.source import TensorMeta, WeightSource

__all__ = [
    "CheckpointError",
    "DiskSpaceError",
    "HFExport",
    "TensorMeta",
    "WeightSource",
    "load_hf",
    "save_hf",
]
