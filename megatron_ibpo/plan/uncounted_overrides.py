"""Settings of --model-override that change a GPU's memory in ways the dry run does not count."""

from collections.abc import Iterator

from megatron_ibpo.config import Config
from megatron_ibpo.models.cost import COUNTED
from megatron_ibpo.policy.overrides import model_overrides, recomputed_modules

_GRAPHS = "what CUDA graphs hold"
_OFFLOADED = "activations that wait in main memory"
_USER_BUFFERS = "buffers for communication beside computation"
_QUANTIZED = "inputs of matrix products in lower precision"
UNCOUNTED = {
    "activation_offload_fraction": _OFFLOADED,
    "cpu_offloading": _OFFLOADED,
    "cuda_graph_impl": _GRAPHS,
    "delay_offload_until_cuda_graph": _OFFLOADED,
    "distribute_saved_activations": "inputs of recomputed layers, cut over tensor-parallel ranks",
    "enable_cuda_graph": _GRAPHS,
    "external_cuda_graph": _GRAPHS,
    "fine_grained_activation_offloading": _OFFLOADED,
    "fp4": _QUANTIZED,
    "fp4_param": "parameters in FP4",
    "fp8": _QUANTIZED,
    "fp8_dot_product_attention": "attention in FP8",
    "fp8_param": "parameters in FP8",
    "moe_enable_deepep": "DeepEP's buffers",
    "moe_paged_stash": _OFFLOADED,
    "moe_shared_expert_overlap": "activations of shared experts during the exchange",
    "moe_token_dispatcher_type": "buffers of the exchange",
    "overlap_moe_expert_parallel_comm": "a second micro-batch in progress",
    "tp_comm_overlap": _USER_BUFFERS,
}
"""Field of TransformerConfig → its memory that is not counted."""


def not_counted(config: Config) -> list[str]:
    """Return each setting of --model-override that changes memory uncounted, with the memory that it
    changes."""
    return list(_not_counted(config))


def _not_counted(config: Config) -> Iterator[str]:
    for name, value in model_overrides(config).items():
        if name in UNCOUNTED and value not in (None, False, "none"):
            yield f"{name} ({UNCOUNTED[name]})"
    if unknown := sorted(recomputed_modules(config) - COUNTED):
        yield f"recompute_modules {', '.join(unknown)}"
