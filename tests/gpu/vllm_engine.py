"""Our vLLM engine, started as a run starts it for a trainer on the same device. Not run on GPUs."""

import importlib.util
import json
import os
import time
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch
from job import Skipped
from references import free_memory
from training import EXAMPLES, QWEN3, QWEN3_NEXT, make_random_model

from megatron_ibpo.basics.records import SampleRequest, TrainSequence, token_ids
from megatron_ibpo.config import Config, ModelConfig, OptimizerConfig, RolloutConfig
from megatron_ibpo.engines import EngineError
from megatron_ibpo.engines.registry import VLLM, choose_transport, engine_settings, on_device, start_engine
from megatron_ibpo.models import read_hf_config

TIMEOUT_S = 120.0  # of anything that an engine is asked
START_S, COMPILE_S, CPU_START_S = 75.0, 90.0, 600.0  # an engine may take to start; to compile in addition
LEARNING_RATE = 1e-3  # one step of it moves a random model's log-probs far beyond what a precision rounds
VOCABULARY = 512  # of the models for CPUs
FIRST_WORD = 3  # ids below are special in some models
TRITON_ATTENTION = ("attention_backend=TRITON_ATTN",)
TORCH_OPERATIONS = ('compilation_config={"custom_ops":["none"]}',)
NO_COMPILATION = ('compilation_config={"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}',)
WAYS = {  # name → (arguments of vLLM, environment); the first is what users have
    "default": ((), {}),
    "TRITON_ATTN": (TRITON_ATTENTION, {}),
    "V1 model runner": ((), {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "V1 model runner, TRITON_ATTN": (TRITON_ATTENTION, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "TRITON_ATTN, torch's operations": ((*TRITON_ATTENTION, *TORCH_OPERATIONS), {}),
}
TELLING = ("Model Runner", "attention backend", "FlashAttention version", "CUDA graph", "torch.compile took")

QWEN3_MOE = json.loads((EXAMPLES / "models/qwen3_30b_a3b/config.json").read_text()) | {
    "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "moe_intermediate_size": 256, "num_experts": 32, "num_experts_per_tok": 4,
}  # fmt: skip
TINY = {
    "num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 512, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.05,
}  # fmt: skip
TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
TINY_DELTA_NETS = {
    "num_hidden_layers": 4, "shared_expert_intermediate_size": 64, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
SHAPES = {  # family → (for GPUs, what differs for CPUs)
    "qwen3": (QWEN3, TINY | {"intermediate_size": 192}),
    "qwen3_moe": (QWEN3_MOE, TINY | TINY_EXPERTS),
    "qwen3_next": (QWEN3_NEXT, TINY | TINY_EXPERTS | TINY_DELTA_NETS),
}


def make_model(job, family, name="model"):
    """Write a random model of a family: of a real size on a GPU, tiny on CPUs."""
    large, tiny = SHAPES[family]
    dtype = torch.bfloat16 if job.on_gpu else torch.float32
    path = make_random_model(job.scratch / name, large if job.on_gpu else large | tiny, job.device, dtype)
    free_memory()
    return path


def config_of(job, family, *, graphs=False, name="model"):
    """Return settings of a run that trains and samples on the same device."""
    path = make_model(job, family, name)
    context = 1024 if job.on_gpu else 512
    settings = RolloutConfig(
        rollout_max_response_len=context // 2, rollout_max_context_len=context,
        parameters={
            "vllm_enforce_eager": not graphs, "vllm_gpu_memory_utilization": 0.3,
            "vllm_kv_cache_bytes": cache_bytes(job),
        },
        update_weight_timeout=TIMEOUT_S, check_weight_update_equal=True,
    )  # fmt: skip
    model = ModelConfig(hf_checkpoint=path, bf16=job.on_gpu, max_tokens_per_gpu=8192)
    model.allow_local_modules = True
    optimizer = OptimizerConfig(lr=LEARNING_RATE, lr_decay_style="constant", lr_warmup_fraction=0)
    config = Config(model=model, optimizer=optimizer, rollout=settings)
    return on_device(config, read_hf_config(path), on_gpu=job.on_gpu)


def cache_bytes(job):
    if not job.on_gpu:
        return 128 * 2**20
    return (8 if job.is_large else 2) * 2**30


def transport_of(job):
    return choose_transport(on_gpu=job.on_gpu, colocate=True)


@contextmanager
def open_engine(job, config, ways=None):
    """Start an engine that samples to the requested length, and end it on the way out.

    If it does not start, or writes nothing, it is started in the next of `ways`. Which of them held is noted
    as `way`, and what vLLM said of itself as `vllm`.
    """
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vllm is not installed; WHEELS=DIR gives it (docs/gpu_report.md)")
    engine = first_that_holds(job, ways or WAYS, lambda *way: _started(job, config, *way))
    try:
        yield engine
    finally:
        engine.close()


def first_that_holds(job, ways, attempt):
    """Return what `attempt(name, arguments, environment)` returns in the first of `ways` in which it does not
    fail. Parts begin with the one that an earlier part ended with ($IBPO_ENGINE_WAY)."""
    names, failed = list(ways), dict(job.found.get("failed_ways", {}))
    known = os.environ.get("IBPO_ENGINE_WAY")
    for name in names[names.index(known) if known in names else 0 :]:
        try:
            outcome = attempt(name, *ways[name])
        except (EngineError, AssertionError) as error:
            print(f"{name}: {error}", flush=True)
            failed[name] = f"{str(error)[:300]} … {str(error)[-1500:]}"
            job.note(failed_ways=failed)
        else:
            job.note(way=name, users_get_it=name == names[0])
            return outcome
    raise AssertionError(f"no way holds: {', '.join(failed)}")


def start_seconds(job, settings):
    return START_S + (0 if settings.enforce_eager else COMPILE_S) if job.on_gpu else CPU_START_S


def only_with(job):
    """Return what to add to a summary where the engine does not run as users have it."""
    return "" if job.found["users_get_it"] else f"; only with {job.found['way']}"


def _started(job, config, name, arguments, environment):
    before = config.rollout.parameters
    parameters = before | {"vllm_arg": (*before.get("vllm_arg", ()), *arguments)}
    rollout = replace(config.rollout, parameters=parameters)
    hf_dir, gpus = config.model.hf_checkpoint, (0,) if job.on_gpu else ()
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    shape = read_hf_config(hf_dir)
    settings = engine_settings(rollout, hf_dir, shape, transport_of(job), gpus=gpus, num_threads=threads)
    log = job.scratch / f"engine{len(list(job.scratch.glob('engine*.log')))}.log"
    started = time.perf_counter()
    with patch.dict(os.environ, environment):
        engine = start_engine(VLLM, replace(settings, eos_token_ids=()), log, is_restart=False)
    try:
        engine.wait_ready(start_seconds(job, settings))
        ready = time.perf_counter() - started
        engine.generate(requests_of(config.model.hf_checkpoint, 2, 4), version=0, timeout=TIMEOUT_S)
    except BaseException:
        engine.close()
        raise
    said = log.read_text(errors="replace").splitlines()
    runner = "V2" if any("Using V2 Model Runner" in line for line in said) else "V1"
    told = [line.partition("] ")[2] or line for line in said if any(word in line for word in TELLING)]
    job.note(vllm={"model_runner": runner, "start_seconds": ready, "told": told[-12:]})
    return engine


def requests_of(model, count, tokens, *, seed=0, temperature=1.0, top_k=-1):
    """Return requests for prompts of random tokens."""
    draw, vocabulary = np.random.default_rng(seed), read_hf_config(model).vocab_size
    requests = []
    for number in range(count):
        prompt = token_ids(draw.integers(FIRST_WORD, vocabulary, size=draw.integers(8, 64)))
        requests.append(SampleRequest(prompt, seed * count + number, tokens, temperature, top_k=top_k))
    return requests


def sequences_of(samples):
    """Return the samples for the trainer, every second one with a positive advantage."""
    return [
        TrainSequence(
            sample.prompt_token_ids, sample.token_ids, sample.loss_mask,
            advantage=1.0 if number % 2 else -1.0, weight=1.0 / len(samples), prompt_index=number // 2,
            group=number // 2, index=number % 2, temperature=sample.temperature,
            rollout_logprobs=sample.logprobs,
        )
        for number, sample in enumerate(samples)
    ]  # fmt: skip


def free_bytes(job):
    """Return the bytes that are free on the whole device."""
    if not job.on_gpu:
        return 0
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]
