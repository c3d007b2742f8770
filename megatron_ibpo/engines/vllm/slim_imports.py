"""Packages that an engine on CPUs starts without: they take two fifths of the processor time of its start.

vLLM imports torch's compiler, and packages for audio, traces, clusters and training. An engine of this
project on CPUs runs eagerly in one process and reads token ids, so nothing of them would run.
"""

import sys
from types import ModuleType
from typing import Any

from megatron_ibpo.basics.compiler_stand_ins import stand_in_for_compiler, unchanged
from megatron_ibpo.engines.settings import EngineSettings
from megatron_ibpo.engines.vllm.model_runner import uses_second_runner

OPTIONAL = ("scipy", "opentelemetry", "ray", "accelerate", "networkx", "triton")
"""Packages whose absence torch, transformers and vLLM handle."""
OF_COMPILER = "vllm.env_override"
"""Module of vLLM that changes torch's compiler."""


def slim_imports(settings: EngineSettings) -> None:
    """Have this process import vLLM without what an engine with these settings does not run. Call it before
    torch is imported. For other engines it does nothing."""
    has_one_process = settings.device == "cpu" and settings.tensor_parallel_size == 1
    if not has_one_process or not settings.enforce_eager or uses_second_runner("cpu"):
        return
    for package in OPTIONAL:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]
    sys.modules.setdefault(OF_COMPILER, ModuleType(OF_COMPILER))
    stand_in_for_compiler()
    import torch

    compiler: Any = torch
    compiler.compile = unchanged  # as TORCH_COMPILE_DISABLE has it
