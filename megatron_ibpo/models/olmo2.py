"""OLMo 2, dense (https://huggingface.co/allenai/OLMo-2-1124-7B). Team OLMo, "2 OLMo 2 Furious", 2025
(arXiv:2501.00656).

Norms follow attention and MLP, before the residual is added, and none precede them. Queries and keys have one
norm each over all heads. Megatron has neither part: `olmo2_layers` does.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from megatron_ibpo.models import shared_entries, spec
from megatron_ibpo.models.shape import Fields, ModelShape, common_fields
from megatron_ibpo.models.weight_map import Entry, Piece

DEFAULTS = {
    "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Defaults of `transformers`\' Olmo2Config; there are as many key/value heads as query heads."""


def read(fields: Fields) -> ModelShape:
    fields = fields.or_default(DEFAULTS)
    attention_bias = fields.flag("attention_bias", False)
    return ModelShape(
        **common_fields(fields, may_have_biases=True),
        ffn_hidden_size=fields.count("intermediate_size"),
        query_key_norms=False,  # of each head
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
    )


def layer_entries(shape: ModelShape, layer: int) -> list[Entry]:
    shared = [*shared_entries.attention(shape), *shared_entries.dense_mlp(shape)]
    norms = {
        "self_attention.q_layernorm": ("self_attn.q_norm", shape.num_attention_heads * shape.head_dim),
        "self_attention.k_layernorm": ("self_attn.k_norm", shape.num_key_value_heads * shape.head_dim),
        "post_attention_layernorm": ("post_attention_layernorm", shape.hidden_size),
        "post_mlp_layernorm": ("post_feedforward_layernorm", shape.hidden_size),
    }
    return [
        *(entry for entry in shared if not entry.name.endswith("layer_norm_weight")),
        *(
            Entry(f"{megatron}.weight", (Piece(f"{hf}.weight", (size,)),))
            for megatron, (hf, size) in norms.items()
        ),
    ]


def layer_spec(shape: ModelShape, layer: int, backend: spec.Backend) -> spec.LayerSpec:
    from megatron_ibpo.models.olmo2_layers import NormOfAllHeads, PostNormLayer

    plain = replace(backend, norm_column_linear=backend.column_linear)
    attention = spec.attention(plain, norms=False, output_bias=shape.attention_output_bias)
    attention.submodules.q_layernorm = partial(NormOfAllHeads, shape.num_attention_heads)
    attention.submodules.k_layernorm = partial(NormOfAllHeads, shape.num_key_value_heads)
    layers = spec.transformer_layer(attention, spec.dense_mlp(plain))
    return replace(layers, module=PostNormLayer, params={"norm": backend.norm})


def megatron_fields(shape: ModelShape) -> dict[str, Any]:
    return {"qk_layernorm": True}
