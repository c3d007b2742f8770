"""Qwen3, dense (https://huggingface.co/Qwen/Qwen3-32B) and with a mixture of experts in every layer
(https://huggingface.co/Qwen/Qwen3-30B-A3B). Qwen Team, "Qwen3 Technical Report", 2025."""

from typing import Any

from megatron_ibpo.models import shared_entries, spec
from megatron_ibpo.models.qwen2 import DEFAULTS as QWEN2_DEFAULTS
from megatron_ibpo.models.shape import Fields, ModelShape, common_fields, expert_fields
from megatron_ibpo.models.weight_map import Entry

MOE_DEFAULTS = {
    "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "moe_intermediate_size": 768,
    "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False,
}  # fmt: skip
"""Defaults of `transformers`\' Qwen3MoeConfig; a head has hidden_size / num_attention_heads elements."""


def read(fields: Fields) -> ModelShape:
    if fields.raw["model_type"] == "qwen3_moe":
        fields = fields.or_default(MOE_DEFAULTS)
        return ModelShape(**common_fields(fields), **expert_fields(fields))
    fields = fields.or_default({**QWEN2_DEFAULTS, "head_dim": 128})
    return ModelShape(**common_fields(fields), ffn_hidden_size=fields.count("intermediate_size"))


def layer_entries(shape: ModelShape, layer: int) -> list[Entry]:
    return [*shared_entries.attention(shape), *shared_entries.mlp(shape)]


def layer_spec(shape: ModelShape, layer: int, backend: spec.Backend) -> spec.LayerSpec:
    return spec.transformer_layer(spec.attention(backend), spec.mlp(shape, backend))


def megatron_fields(shape: ModelShape) -> dict[str, Any]:
    return {}
