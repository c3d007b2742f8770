"""Weights between Hugging Face checkpoints, the trainer's ranks and the engines.

Nothing here imports Megatron or vLLM when it is imported: both sides use this room.
"""

from __future__ import annotations

from megatron_ibpo.weights.load import CheckpointError, load_hf

__all__ = ["CheckpointError", "load_hf"]
