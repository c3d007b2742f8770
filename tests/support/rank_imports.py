"""Imported once by the server from which `ranks` forks its processes: what every rank needs."""

import gc

import pytest  # noqa: F401
import safetensors.torch  # noqa: F401
import torch.distributed  # noqa: F401
from megatron.core.distributed import DistributedDataParallel  # noqa: F401
from megatron.core.fusions import fused_bias_dropout  # noqa: F401
from megatron.core.models.gpt import GPTModel  # noqa: F401
from megatron.core.optimizer import get_megatron_optimizer  # noqa: F401

import megatron_ibpo.models.delta_net.layer
import megatron_ibpo.policy.rank  # noqa: F401

# Megatron collects garbage at every save of a sharded optimizer; ranks need not look through all this again
gc.collect()
gc.freeze()
