"""The families of models that can be trained: a line for each, with the module of what is special to it."""

from importlib import import_module
from types import ModuleType

FAMILIES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3_moe"), "megatron_ibpo.models.llama"),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        "megatron_ibpo.models.qwen3_next",
    ),
    "glm4_moe": "megatron_ibpo.models.glm4_moe",
    "gpt_oss": "megatron_ibpo.models.gpt_oss",
    "olmo2": "megatron_ibpo.models.olmo2",
}
"""`model_type` of config.json → the module with everything that is special to the family."""


def family_module(family: str) -> ModuleType:
    """Return a family's module, imported when it is first asked for. It defines, in this order:

    | function                            | returns                                                         |
    |-------------------------------------|-----------------------------------------------------------------|
    | `read(fields)`                      | ModelShape                                                      |
    | `mixer_cost(shape, layer)`          | MixerCost; only where some layers are not softmax attention     |
    | `layer_entries(shape, layer)`       | list[Entry] of the weight map                                   |
    | `mtp_entries(shape, layer)`         | the same, only where checkpoints hold multi-token prediction    |
    | `layer_spec(shape, layer, backend)` | LayerSpec, which is Megatron's ModuleSpec                       |
    | `megatron_fields(shape)`            | dict of further fields for TransformerConfig; only if there are |
    | `mtp_layer_spec(shape, backend)`    | LayerSpec, beside `mtp_entries`                                 |

    Only the functions that build something may import torch and Megatron, inside.
    """
    return import_module(FAMILIES[family])
