"""Hidden states instead of logits from Megatron's GPTModel, for the loss that has the LM head fused in."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

__all__ = ["head_weight", "whole_hidden_states"]


def whole_hidden_states(*, hidden_states: Tensor, output_layer: Any, **_: Any) -> Tensor:
    """GPTModel's `output_processor`: [1, N, H], every row on every tensor-parallel rank.

    What the output layer would do to its input: the backward pass sums the gradients of the ranks' columns.
    """
    if output_layer.sequence_parallel:
        return gather_from_sequence_parallel_region(hidden_states).transpose(0, 1)
    return copy_to_tensor_model_parallel_region(hidden_states).transpose(0, 1)


def head_weight(model: Any) -> Tensor:
    """[V / TP, H] this rank's rows of the output layer of a GPTModel's last stage, tied or not."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight
