"""Models that vLLM's CPU kernels cannot compute. Importing this loads no vLLM."""

from megatron_ibpo.config import RolloutConfig
from megatron_ibpo.models import ModelShape
from megatron_ibpo.models.delta_net.shape import DeltaNetShape

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM 0.32's CPU attention (`CPUAttentionBackend.get_supported_head_sizes`)."""
DELTA_NET_MULTIPLE = 32
"""The head size of delta nets must be a multiple of this (vLLM 0.32's `chunk_gated_delta_rule_cpu`)."""


def cpu_problems(rollout: RolloutConfig, shape: ModelShape) -> list[str]:
    """Return what vLLM cannot compute of a model on CPUs, one line each.

    Args:
        rollout: settings with the precision resolved (`config.on_device`).
    """
    problems = []
    if any(shape.full_attention) and shape.head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        problems.append(
            f"head_dim {shape.head_dim} in config.json: vLLM's attention on CPUs supports only heads of "
            f"{sizes}; take a model with one of these, or sample on GPUs"
        )
    if isinstance(shape, DeltaNetShape) and shape.is_recurrent:
        key, value = shape.gdn_key_dim, shape.gdn_value_dim
        if key != value or key % DELTA_NET_MULTIPLE:
            problems.append(
                f"linear_key_head_dim {key} and linear_value_head_dim {value} in config.json: vLLM's CPU "
                f"kernels for delta nets need equal sizes that are multiples of {DELTA_NET_MULTIPLE}; take a "
                "model with such sizes, or sample on GPUs"
            )
        if rollout.vllm_dtype == "float32":
            problems.append(
                f"--vllm-dtype float32: vLLM's CPU kernels for the delta nets of {shape.family} support "
                "bfloat16 only; leave the flag out"
            )
    return problems
