"""vLLM's engine as this package uses it, under a faked H100: what can be had of it without a GPU.

Run by rehearsal.py in an environment with CUDA's torch. No kernel is launched: an engine ends where it needs
the device.

    python faked_h100.py imports | engine MODEL | model MODEL       prints one line of JSON
"""

import importlib
import json
import os
import pkgutil
import sys
import traceback
from collections import Counter
from contextlib import redirect_stdout
from importlib import metadata
from types import SimpleNamespace

import torch

NAME, MEMORY_BYTES, CAPABILITY = "NVIDIA H100 80GB HBM3", 80 * 2**30, (9, 0)
PROPERTIES = {
    "name": NAME, "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": MEMORY_BYTES,
    "shared_memory_per_block_optin": 232448, "warp_size": 32,
}  # fmt: skip
OUR_PACKAGES = ("megatron_ibpo.engines.vllm", "megatron_ibpo.weights.transfer")
VLLM_MODULES = """
engine.arg_utils v1.engine.core v1.engine.core_client v1.engine.llm_engine v1.engine.async_llm
v1.executor.uniproc_executor v1.executor.multiproc_executor
v1.worker.gpu_worker v1.worker.gpu_model_runner v1.worker.gpu.model_runner v1.worker.gpu.cudagraph_utils
v1.worker.gpu.attn_utils v1.worker.gpu.block_table v1.worker.gpu.input_batch
v1.worker.gpu.sample.sampler v1.worker.gpu.sample.logprob v1.worker.gpu.sample.gumbel
v1.sample.sampler v1.sample.rejection_sampler v1.sample.ops.topk_topp_sampler
v1.attention.backends.triton_attn v1.attention.backends.flash_attn v1.attention.backends.flex_attention
v1.attention.backends.gdn_attn v1.attention.backends.mamba_attn v1.attention.backends.linear_attn
v1.attention.backends.fa_utils vllm_flash_attn
model_executor.models.qwen3 model_executor.models.qwen3_moe model_executor.models.qwen3_next
model_executor.models.qwen3_5 model_executor.models.gpt_oss model_executor.models.llama
model_executor.layers.fused_moe model_executor.layers.fused_moe.fused_moe
model_executor.layers.fused_moe.layer
model_executor.layers.mamba.mamba_mixer2 model_executor.layers.mamba.gdn.qwen_gdn_linear_attn
model_executor.layers.mamba.ops.causal_conv1d model_executor.model_loader.reload
distributed.weight_transfer.base distributed.weight_transfer.ipc_engine
distributed.weight_transfer.nccl_engine distributed.weight_transfer.factory
device_allocator.cumem _custom_ops compilation.backends compilation.decorators
"""
OPERATORS = {  # that vLLM's libraries must register, and where sampling in bf16 calls them
    "_C": ("rms_norm", "fused_add_rms_norm", "rotary_embedding", "silu_and_mul"),
    "_C_cache_ops": ("reshape_and_cache", "reshape_and_cache_flash"),
    "_moe_C": ("topk_softmax", "moe_align_block_size", "moe_sum"),
}


def main(action, *model):
    with redirect_stdout(sys.stderr):  # the JSON alone is for the other process
        pretend_an_h100()
        facts = {"imports": imports, "engine": engine, "model": build_model}[action](*model)
    print(json.dumps(facts))


def pretend_an_h100():
    """Let torch, NVML and Triton answer as if there were one."""
    import vllm.third_party.pynvml as nvml
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda *device: CAPABILITY
    torch.cuda.get_device_name = lambda *device: NAME
    memory = SimpleNamespace(total=MEMORY_BYTES, free=MEMORY_BYTES - 2**30, used=2**30)
    for name, value in {
        "Init": None, "Shutdown": None, "DeviceGetCount": 1, "DeviceGetHandleByIndex": 0,
        "DeviceGetCudaComputeCapability": CAPABILITY, "DeviceGetName": NAME, "DeviceGetMemoryInfo": memory,
        "DeviceGetUUID": "GPU-0", "DeviceGetNumaNodeId": 0,
    }.items():  # fmt: skip
        setattr(nvml, f"nvml{name}", lambda *arguments, value=value, **named: value)
    shared = {"max_shared_mem": PROPERTIES["shared_memory_per_block_optin"], "multiprocessor_count": 132}
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_active_torch_device=lambda: torch.device("cuda", 0),
            utils=SimpleNamespace(get_device_properties=lambda device: shared),
        )
    )


def imports():
    """Import every module of the engine's path; return how each ended, and what was not really there."""
    import sitecustomize

    outcomes = {
        name: outcome(name) for name in [*(f"vllm.{name}" for name in VLLM_MODULES.split()), *our_modules()]
    }
    owners = metadata.packages_distributions()
    packages = {name.partition(".")[0] for name in sys.modules}
    absent = [
        f"{library}.{name}" for library, names in OPERATORS.items() for name in names
        if not hasattr(getattr(torch.ops, library), name)
    ]  # fmt: skip
    return {
        "modules": outcomes,
        "stand_ins": sorted(packages & sitecustomize.PACKAGES),
        "distributions": sorted({owner for package in packages for owner in owners.get(package, ())}),
        "absent_operators": absent,
        "versions": {name: metadata.version(name) for name in ("torch", "triton", "transformers", "vllm")},
    }


def our_modules():
    """Return our modules that an engine's process or its owner imports, stand-ins for CPUs aside."""
    for package in OUR_PACKAGES:
        yield package
        paths = importlib.import_module(package).__path__
        yield from sorted(info.name for info in pkgutil.iter_modules(paths, f"{package}."))


def outcome(module):
    try:
        importlib.import_module(module)
    except BaseException as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"[:300]
    return "ok"


def engine(model):
    """Configure an engine and start it; return vLLM's choices, and where it first needs a device."""
    from megatron_ibpo.engines.vllm import engine_process

    settings, config = configured(model)
    choices = {
        "architecture": config.model_config.architecture, "dtype": str(config.model_config.dtype),
        "runner_v2": bool(config.use_v2_model_runner), "worker": config.parallel_config.worker_cls,
        "executor": str(config.parallel_config.distributed_executor_backend),
        "custom_ops": config.compilation_config.custom_ops,
    }  # fmt: skip
    try:
        engine_process.SamplingEngine(settings)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)
        ours = next(frame for frame in reversed(last) if f"{os.sep}vllm{os.sep}" in frame.filename)
        return choices | {"stops": str(error).partition("\n")[0], "in": ours.name}
    return choices | {"stops": None}


def configured(model):
    from megatron_ibpo.engines.protocol import EngineSettings
    from megatron_ibpo.engines.vllm import engine_process

    settings = EngineSettings(
        model=model, eos_token_ids=(2,), device="cuda", gpus=(0,), tensor_parallel_size=1, num_threads=1,
        transport="ipc", dtype="bfloat16", max_model_len=512, max_num_seqs=64, kv_cache_bytes=2**30,
        gpu_memory_utilization=0.5, enforce_eager=True, sleep_mode=True, prefix_caching=False,
        recompute_kv_after_update=False, stall_timeout=300,
    )  # fmt: skip
    return settings, engine_process._engine_args(settings).create_engine_config()


def build_model(model):
    """Build the model on the CPU; return how many layers of which kind compute by which method."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader.utils import initialize_model

    _, config = configured(model)
    no_stream = type("Stream", (), {"__init__": lambda self, *arguments, **named: None})
    torch.cuda.Stream = torch.cuda.Event = no_stream  # type: ignore[misc]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[return-value]
    torch.cuda.set_device = torch.cuda.synchronize = lambda *arguments: None
    torch.cuda.get_device_properties = lambda *device: SimpleNamespace(**PROPERTIES)
    store = f"file://{os.environ['TMPDIR']}/store"
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, store, 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1, backend="gloo")
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cpu"):
            built = initialize_model(config)
    layers = Counter(description for module in built.modules() if (description := described(module)))
    return {"layers": dict(sorted(layers.items())), "parameters": sum(p.numel() for p in built.parameters())}


def described(module):
    """Return a layer's kind and what vLLM chose for it; empty if it chose nothing."""
    method = getattr(getattr(module, "_forward_method", None), "__name__", "")
    chosen = [getattr(module, name, None) for name in ("attn_backend", "impl", "quant_method")]
    kinds = [kind if isinstance(kind, type) else type(kind) for kind in chosen if kind is not None]
    choices = [*filter(None, [method]), *(kind.__name__ for kind in kinds)]
    return " ".join([type(module).__name__, *choices]) if choices else ""


if __name__ == "__main__":
    main(*sys.argv[1:])
