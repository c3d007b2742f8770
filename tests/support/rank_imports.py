"""Imported once by the server from which `ranks` forks its processes: what every rank needs."""

import gc
import importlib

for module in (
    "pytest", "safetensors.torch", "torch.distributed", "megatron.core.distributed",
    "megatron.core.fusions.fused_bias_dropout", "megatron.core.models.gpt", "megatron.core.optimizer",
    "megatron_ibpo.models.delta_net.layer", "megatron_ibpo.policy.rank",
):  # fmt: skip
    importlib.import_module(module)
# Megatron collects garbage at every save of a sharded optimizer; ranks need not look through all this again
gc.collect()
gc.freeze()
