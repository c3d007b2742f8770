"""The families of models that can be trained: one line each, with the package of what is special to it."""

from importlib import import_module
from typing import Any, Literal

FAMILIES = {
    "llama": "megatron_ibpo.models.llama",
    "qwen2": "megatron_ibpo.models.qwen2",
    "qwen3": "megatron_ibpo.models.qwen3",
    "qwen3_moe": "megatron_ibpo.models.qwen3",
    "qwen3_next": "megatron_ibpo.models.qwen3_next",
    "qwen3_5": "megatron_ibpo.models.qwen3_5",
    "qwen3_5_text": "megatron_ibpo.models.qwen3_5",
    "qwen3_5_moe": "megatron_ibpo.models.qwen3_5",
    "qwen3_5_moe_text": "megatron_ibpo.models.qwen3_5",
    "glm4_moe": "megatron_ibpo.models.glm4_moe",
    "gpt_oss": "megatron_ibpo.models.gpt_oss",
}
"""`model_type` of config.json → the family's package."""

Part = Literal["shape", "cost", "weight_map", "spec"]


def family_part(family: str, part: Part) -> Any:
    """Return a module of a family's package, imported at its first use.

    | module       | imports  | gives                                                                     |
    |--------------|----------|---------------------------------------------------------------------------|
    | `shape`      | –        | `read(fields) -> ModelShape`                                              |
    | `cost`       | –        | `mixer_cost(shape, layer) -> MixerCost`                                   |
    | `weight_map` | torch    | `layer_entries(shape, layer) -> list[Entry]`, and `mtp_entries` alike     |
    |              |          | where checkpoints hold multi-token prediction layers                      |
    | `spec`       | Megatron | `layer_spec(shape, layer, backend) -> ModuleSpec`,                        |
    |              |          | `config_fields(shape)` for Megatron's TransformerConfig, and              |
    |              |          | `mtp_layer_spec(shape, backend)` beside `mtp_entries`                     |
    """
    return import_module(f"{FAMILIES[family]}.{part}")
