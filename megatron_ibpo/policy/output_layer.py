"""Parts of the output layer of a model's last stage, for code that needs its weight and not its logits."""

from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor


def whole_hidden_states(*, hidden_states: Tensor, output_layer: Any, **_: Any) -> Tensor:
    """Act as GPTModel's `output_processor`: return [1, N, H], every row on every tensor-parallel rank.

    As in the output layer, the backward pass sums the gradients of the ranks' columns.
    """
    if output_layer.sequence_parallel:
        return gather_from_sequence_parallel_region(hidden_states).transpose(0, 1)
    return copy_to_tensor_model_parallel_region(hidden_states).transpose(0, 1)


def head_weight(model: Any) -> Tensor:
    """Return [V / TP, H], this rank's rows of the output layer of a GPTModel's last stage, tied or not."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def own_vocabulary(width: int, vocab_size: int) -> dict[str, Any]:
    """Return this rank's columns of the vocabulary as arguments for the functions of `megatron_ibpo.loss`;
    `width` counts its columns with padding."""
    start = parallel_state.get_tensor_model_parallel_rank() * width
    return {
        "tp_group": parallel_state.get_tensor_model_parallel_group(),
        "vocab_range": (start, min(start + width, vocab_size)),
    }
