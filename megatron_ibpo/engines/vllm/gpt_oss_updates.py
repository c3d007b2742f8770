"""Fixes, in vLLM's workers, how vLLM 0.32 takes updates of gpt-oss.

An update passes through the loaders that vLLM wraps for it. The model's own loader copies sinks, and the
tensors that hold all experts of a layer, into parameters without those loaders: a first load is right, and an
update of them is silently lost. So experts are passed to it one by one, which it takes by their loader, and
sinks are loaded here.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

from megatron_ibpo.engines.vllm.version_guard import written_for

Weights = Iterable[tuple[str, torch.Tensor]]

EXPERTS = (
    ".experts.gate_up_proj",
    ".experts.gate_up_proj_bias",
    ".experts.down_proj",
    ".experts.down_proj_bias",
)
"""Suffixes of tensors that hold all experts of a layer."""
SINKS = ".self_attn.sinks"


@written_for("0.32")
def take_updates_whole() -> None:
    """Make all of gpt-oss pass through vLLM's loaders."""
    model_class: Any = GptOssForCausalLM
    load_weights = model_class.load_weights

    def load_by_loaders(self: Any, weights: Weights) -> set[str]:
        sinks: set[str] = set()
        return load_weights(self, _split_experts(self, weights, sinks)) | sinks

    model_class.load_weights = load_by_loaders


def _split_experts(model: Any, weights: Weights, loaded: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights with one tensor per expert and without sinks, which are loaded here."""
    for name, tensor in weights:
        if name.endswith(EXPERTS):
            prefix, _, kind = name.rpartition(".")
            for expert in range(tensor.shape[0]):
                yield f"{prefix}.{expert}.{kind}", tensor[expert]
        elif name.endswith(SINKS):
            loaded |= _load_sinks(model, name.replace(".self_attn.", ".attn."), tensor)
        else:
            yield name, tensor


def _load_sinks(model: Any, name: str, sinks_H: torch.Tensor) -> set[str]:
    """Return the parameter that took this worker's heads; none if it belongs to a layer of another worker."""
    parameter = dict(model.named_parameters()).get(name)
    if parameter is None:
        return set()
    heads = parameter.shape[0]
    local_sinks = sinks_H.narrow(0, get_tensor_model_parallel_rank() * heads, heads)
    getattr(parameter, "weight_loader", default_weight_loader)(parameter, local_sinks)
    return {name}
