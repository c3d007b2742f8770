"""The parts of OLMo 2 that Megatron lacks: a layer with norms after its parts, and a norm over all heads."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_pg_rank, get_pg_size, get_tensor_model_parallel_group_if_none
from torch import Tensor

from megatron_ibpo.models.local_modules import wide


class PostNormLayer(TransformerLayer):
    """A layer x + norm(attention(x)), then the same with its MLP."""

    def __init__(self, config: TransformerConfig, *args: Any, norm: Callable[..., Any], **kwargs: Any):
        """`norm` is the class of both norms."""
        super().__init__(config, *args, **kwargs)
        size = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.post_attention_layernorm = norm(config=config, **size)
        self.post_mlp_layernorm = norm(config=config, **size)
        self.self_attn_bda = _norm_and_add(self.post_attention_layernorm)
        self.mlp_bda = _norm_and_add(self.post_mlp_layernorm)


def _norm_and_add(norm: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return Megatron's choice of an addition to the residual, with a norm of what is added."""

    def choose(training: bool, fused: bool) -> Callable[..., Tensor]:
        def add_normed(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            x, bias = output
            normed = norm(x if bias is None else x + bias)
            added: Tensor = get_bias_dropout_add(training, fused)((normed, None), residual, dropout)
            return added

        return add_normed

    return choose


class NormOfAllHeads(torch.nn.Module):
    """RMSNorm over all heads of a token together, of which a tensor-parallel rank has its share.

    Maps [N, 1, H, D] to the same. Every rank holds the weight of all heads. Its gradient is of the rank's
    heads, and Megatron adds up those of all ranks, because of the parameter's name (`finalize_model_grads`).
    """

    def __init__(self, heads: int, *, config: TransformerConfig, hidden_size: int, eps: float):
        """`hidden_size` is that of one head."""
        super().__init__()
        self.heads, self.eps = heads, eps
        self.weight = torch.nn.Parameter(torch.empty(heads * hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        group = get_tensor_model_parallel_group_if_none(None)
        ranks, rank = get_pg_size(group), get_pg_rank(group)
        first = rank * self.heads // ranks  # ranks may share a head
        weight_HD = self.weight.view(self.heads, -1)[first : first + x.shape[-2]]
        squares = wide(x).square().mean((-2, -1), keepdim=True)
        # ranks hold equally many heads, and each head of a token is on equally many ranks
        mean = _added_over_ranks(squares) / ranks
        return (weight_HD * (wide(x) * torch.rsqrt(mean + self.eps))).to(x.dtype)


def _added_over_ranks(x: Tensor) -> Tensor:
    """Return the sum over tensor-parallel ranks, each of which depends on it: gradients are added up too."""
    return copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(x))
