"""Llama 2 and 3 (https://huggingface.co/meta-llama), the many models of their form, such as SmolLM2, and
Qwen2 to 3, dense (https://huggingface.co/Qwen/Qwen3-32B) or with a mixture of experts in every layer
(Qwen3-30B-A3B).

"The Llama 3 Herd of Models", 2024; Qwen Team, "Qwen2.5 Technical Report", 2024, "Qwen3 Technical Report",
2025.
"""

from megatron_ibpo.models import shared_entries, spec
from megatron_ibpo.models.shape import Fields, ModelShape, common_fields, expert_fields
from megatron_ibpo.models.weight_map import Entry

LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
QWEN2 = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768,
}  # fmt: skip
QWEN3_MOE = {
    "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "moe_intermediate_size": 768,
    "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False,
}  # fmt: skip
DEFAULTS = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": {**QWEN2, "head_dim": 128}, "qwen3_moe": QWEN3_MOE}
"""Defaults of `transformers`' configuration classes. Without `num_key_value_heads` there are as many as query
heads; without `head_dim` a head has hidden_size / num_attention_heads elements."""


def read(fields: Fields) -> ModelShape:
    family = fields.raw["model_type"]
    fields = fields.or_default(DEFAULTS[family])
    common = common_fields(fields, may_have_biases=family == "llama")
    if family == "qwen3_moe":
        return ModelShape(**common, **expert_fields(fields))
    common["ffn_hidden_size"] = fields.count("intermediate_size")
    if family == "qwen3":
        return ModelShape(**common)
    if family == "qwen2":
        return ModelShape(**common, query_key_norms=False, qkv_bias=True)
    attention_bias = fields.flag("attention_bias", False)
    return ModelShape(
        **common,
        query_key_norms=False,
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def layer_entries(shape: ModelShape, layer: int) -> list[Entry]:
    return [*shared_entries.attention(shape), *shared_entries.mlp(shape)]


def layer_spec(shape: ModelShape, layer: int, backend: spec.Backend) -> spec.LayerSpec:
    mixer = spec.attention(backend, norms=shape.query_key_norms, output_bias=shape.attention_output_bias)
    return spec.transformer_layer(mixer, spec.mlp(shape, backend))
