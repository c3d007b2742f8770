"""Predict a published run by the planner's roofline, adjusted for what its system does differently.

The roofline describes this project: Megatron-core's distributed optimizer and vLLM. Three differences are
added for rows that have them, as constants outside any fit: weights that FSDP gathers in every pass,
FlashAttention 2, and TensorRT-LLM's prompts.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from published_runs import shape_of

from megatron_ibpo.models import ModelShape
from megatron_ibpo.plan.hardware import Hardware, read_hardware
from megatron_ibpo.plan.prediction import Setting
from megatron_ibpo.plan.roofline import collective_seconds, engine_slots, pass_time, sample, update_seconds
from megatron_ibpo.plan.workload import (
    Basis,
    Batch,
    Coefficients,
    Engine,
    Layout,
    PassTime,
    Task,
    log_normal,
    stand_ins,
)

POINTS = 256
"""Quantiles that stand for the lengths of a step."""
FLASH_ATTENTION_2 = 0.6
"""Its speed relative to FlashAttention 3, which is 1.5 to 2 times as fast (arXiv 2407.08608)."""
TENSORRT_PROMPTS = 1.25
"""Share of the peak that TensorRT-LLM's products reach, relative to vLLM's and SGLang's, by an earlier
fit."""


def predict(
    facts: Mapping[str, Any], kind: str, measured: Mapping[str, float], reached: Coefficients
) -> dict[str, float]:
    """Return the prediction of each measured figure."""
    shape = shape_of(facts["model"])
    assert shape is not None
    by_kind = {"training": _training, "generation": _generation, "step": _step, "update": _update}
    predictions = by_kind[kind](facts, basis_of(facts, shape, reached))
    return {name: float(predictions[name]) for name in measured if name in predictions}


def basis_of(facts: Mapping[str, Any], shape: ModelShape, reached: Coefficients) -> Basis:
    """Return the basis of a row's time."""
    if facts.get("attention", 3) < 3:
        reached = replace(reached, attention=reached.attention * FLASH_ATTENTION_2)
    if facts.get("engine") == "tensorrt":
        reached = replace(reached, prefill=reached.prefill * TENSORRT_PROMPTS)
    return Basis(shape=shape, hardware=hardware_of(facts), reached=reached)


def hardware_of(facts: Mapping[str, Any]) -> Hardware:
    """Return the data sheet, with the row's own facts about its GPUs."""
    hardware = replace(read_hardware(facts["hardware"]), **facts.get("changed", {}))
    share = facts.get("peak_share", 1.0)
    return replace(hardware, peak_bf16=hardware.peak_bf16 * share, peak_fp8=hardware.peak_fp8 * share)


def layout_of(facts: Mapping[str, Any]) -> Layout:
    """Return the trainer's layout."""
    names = (
        "tensor", "pipeline", "context", "expert", "chunks", "precision", "recompute", "offload_optimizer",
    )  # fmt: skip
    settings = {name: facts[name] for name in names if name in facts}
    micro_batch = facts.get("micro_batch_tokens") or facts["micro_batch"] * facts["sequence"]
    return Layout(gpus=facts.get("training_gpus", facts.get("gpus")), micro_batch=micro_batch, **settings)


def engine_of(facts: Mapping[str, Any], tensor: int) -> Engine:
    """Return the row's engine."""
    return Engine(
        tensor=tensor,
        weight_bytes=facts.get("weight_bytes", 2.0 if facts["precision"] == "bf16" else 1.0),
        cache_bytes=facts.get("cache_bytes", 2.0),
        memory_share=facts.get("memory_share", 0.9),
        most_running=facts.get("running") or (256 if facts["hardware"] == "a100" else 1024),
    )


def _training(facts: Mapping[str, Any], basis: Basis) -> dict[str, float]:
    layout = layout_of(facts)
    batch = Batch.of([facts["sequence"]], facts["batch"])
    times = pass_time(basis, layout, batch)
    if facts.get("fsdp"):
        times = replace(times, data=sharded_seconds(basis, layout, batch, times))
    return {"tokens_per_gpu_second": batch.tokens / times.total / layout.gpus, "step_seconds": times.total}


def sharded_seconds(basis: Basis, layout: Layout, batch: Batch, times: PassTime) -> float:
    """Return the seconds in which FSDP gathers weights in every pass and reduces gradients, beyond the part
    hidden by computation. Pipeline stages gather them once per step and keep them."""
    micro_batches = max(1.0, batch.tokens / layout.data / layout.micro_batch)
    gathers = micro_batches if layout.pipeline == 1 else 1
    sending = (2 + 2 + 4) * gathers * collective_seconds(basis, layout)
    return max(0.0, sending - times.products - times.attention - times.memory)


def _generation(facts: Mapping[str, Any], basis: Basis) -> dict[str, float]:
    engine = engine_of(facts, facts["tensor"])
    mean, count, prompt = facts["response"], facts["prompts"], facts["prompt"]
    quantiles = {
        "fixed": lambda: np.full(POINTS, float(mean)),
        "uniform": lambda: np.linspace(1, 2 * mean - 1, POINTS),
        "lognormal": lambda: log_normal(mean, 8 * mean, POINTS),
    }[facts["lengths"]]()
    concurrency = facts["concurrency"]
    if share := facts.get("cache_share"):
        room = engine_slots(basis, replace(engine, most_running=1 << 30), prompt + mean)
        concurrency = max(1, min(concurrency, int(share * room)))
    lengths, times = stand_ins(quantiles, count)
    done = sample(basis, engine, lengths, times=times, prompt=prompt, concurrency=concurrency)
    tokens = done.tokens + (count * prompt if facts.get("counts_prompt") else 0)
    return {"output_tokens_per_second": tokens / done.seconds}


def _step(facts: Mapping[str, Any], basis: Basis) -> dict[str, float]:
    prompt = facts.get("prompt", 0)
    longest = facts["longest"] - prompt
    mean = min(facts["mean_length"] - prompt, longest * 0.98)
    task = Task(
        responses=log_normal(mean, longest, POINTS, facts.get("sigma", 1.0)),
        count=facts["sequences"],
        prompt=prompt,
        group=16,
        updates=facts.get("updates", 1),
        passes_without_gradient=facts["passes_without_gradient"],
        staleness=facts["staleness"],
    )
    setting = Setting(
        basis=basis,
        layout=layout_of(facts),
        engine=engine_of(facts, facts["engine_tensor"]),
        task=task,
        engine_gpus=facts["engine_gpus"],
        colocated=facts["colocated"],
        transport=None if facts["colocated"] else "resharded",
    )
    times = setting.times()
    return {
        "step_seconds": times.total,
        "generation_seconds": times.sampling,
        "logprob_seconds": times.log_probs,
        "update_seconds": times.update,
        "training_seconds": times.log_probs + times.update,
    }


def _update(facts: Mapping[str, Any], basis: Basis) -> dict[str, float]:
    gpus = facts["training_gpus"] + facts["engine_gpus"]
    seconds = update_seconds(basis, facts["transport"], engine_tensor=facts["engine_tensor"], gpus=gpus)
    return {"update_seconds": seconds}
