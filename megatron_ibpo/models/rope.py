"""Rotary positions beyond the context length of a model's first training."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class RopeScaling:
    """A change of the rotation's frequencies. Fields are named as in config.json."""

    rope_type: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int = 0
    """Positions of the model's first training; 0 for linear scaling, which does not need them."""
    beta_fast: float = 32.0
    """YaRN: turns within those positions above which a frequency is unchanged."""
    beta_slow: float = 1.0
    """YaRN: turns below which it is divided by `factor`."""
    truncate: bool = True
    """YaRN: True to round the bounds of the frequencies between the two to whole ones."""


MEGATRON_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Values hard-coded in megatron-core 0.19.2 (`RotaryEmbedding._apply_scaling`); the published Llama 3.1, 3.2
and 3.3 have these."""


def gpt_arguments(scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the arguments for Megatron's GPTModel."""
    if scaling is None:
        return {"position_embedding_type": "rope"}
    if scaling.rope_type == "linear":
        return {"position_embedding_type": "rope", "seq_len_interpolation_factor": scaling.factor}
    if scaling.rope_type == "llama3":
        return {
            "position_embedding_type": "rope",
            "rope_scaling": True,
            "rope_scaling_factor": scaling.factor,
        }
    return {"position_embedding_type": "yarn"}


def config_attributes(scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the attributes that Megatron reads from a TransformerConfig without having fields for them, as
    its own training script sets them (`megatron.training.argument_utils`)."""
    if scaling is None or scaling.rope_type != "yarn":
        return {}
    return {
        "yarn_rotary_scaling_factor": scaling.factor,
        "yarn_original_max_position_embeddings": scaling.original_max_position_embeddings,
        "yarn_beta_fast": scaling.beta_fast,
        "yarn_beta_slow": scaling.beta_slow,
        # None: cosines and sines grow by 0.1 ln(factor) + 1, as in the paper and in transformers
        "yarn_mscale": None,
        "yarn_mscale_all_dim": None,
        "yarn_correction_range_round_to_int": scaling.truncate,
    }


def takes_fused_rotation(scaling: RopeScaling | None) -> bool:
    """Return whether Transformer Engine's fused rotation can be used; it cannot scale cosines and sines."""
    return scaling is None or scaling.rope_type != "yarn"
