"""Five steps of a trainer: do they train, how fast, in how much memory beside what is predicted."""

import math
import statistics
import sys
import time
from dataclasses import asdict

import torch
from job import apart, check
from training import set_up, start_policy

from megatron_ibpo.config import LossConfig
from megatron_ibpo.models import forward_flops, read_hf_config

PEAK_FLOPS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12,
}  # fmt: skip
"""bf16 without sparsity, from the makers' data sheets, by what a device's name contains."""


def run(job):
    family, _, special = job.variant.partition("/")
    if special == "torch":
        sys.modules["fla"] = None  # as if it were not installed
    loss = LossConfig(fuse_lm_head=special == "fused")
    load, config, sequences = set_up(job, family, slow=special == "torch", loss=loss)
    shape = read_hf_config(config.model.hf_checkpoint)
    job.note(model=family, load=vars(load))
    policy, rank = start_policy(config)
    job.note(**asdict(rank.about()), built_bytes=memory(job))
    before = gap(policy, sequences)
    policy.take_passes()
    steps = []
    for _ in range(5):
        if job.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        metrics = policy.update(sequences)
        if job.on_gpu:
            torch.cuda.synchronize()
        steps.append(metrics | {"seconds": time.perf_counter() - started})
        job.note(steps=steps, memory_bytes=memory(job))
    passes = policy.take_passes()[0]
    flops = count_flops(shape, passes, load.prompt)
    after = gap(policy, sequences)
    job.note(logprob_gap_before=before, logprob_gap_after=after, flops_per_step=flops)
    note_speed(job, [step["seconds"] for step in steps[1:]], sum(passes.updates), flops)
    total = torch.cuda.get_device_properties(0).total_memory if job.on_gpu else 80 * 2**30
    job.note(predicted_bytes=apart(predict, config, total))
    for step in steps:
        check(step["updates_skipped"] == 0 and math.isfinite(step["grad_norm"]), f"a step was lost: {step}")
    check(after > before, f"five steps did not raise what they should: gap {before} -> {after}")


def count_flops(shape, passes, prompt):
    """Operations of the model's products. The LM head's leave out prompts."""
    of_prompt = 2 * shape.hidden_size * shape.vocab_size * prompt
    forward, updates = (
        sum(forward_flops(shape, length) - of_prompt for length in lengths)
        for lengths in (passes.forward, passes.updates)
    )
    return forward + 3 * updates


def gap(policy, sequences):
    """Mean log-prob of tokens with a positive advantage, less that of the others."""
    means = {True: [], False: []}
    for own, sequence in zip(policy.logprobs(sequences), sequences, strict=True):
        means[sequence.advantage > 0].append(float(own.mean()))
    return statistics.fmean(means[True]) - statistics.fmean(means[False])


def note_speed(job, seconds, tokens, flops):
    median = statistics.median(seconds)
    peak = peak_flops() if job.on_gpu else None
    local = "torch" in {library for library, _ in job.found["layers"].values()}
    mfu = None if peak is None else flops / median / peak
    share = ("" if mfu is None else f", MFU {mfu:.1%}") + (" (local modules)" if local else "")
    used = f", {memory(job)['peak_reserved'] / 2**30:.1f} GiB" if job.on_gpu else ""
    job.note(
        seconds_per_step=median, tokens_per_step=tokens, tokens_per_second=tokens / median, mfu=mfu,
        flops_per_second=flops / median, summary=f"{tokens / median:,.0f} tokens/s{share}{used}",
    )  # fmt: skip


def peak_flops():
    """The GPU's bf16 rate by its data sheet; None for an unknown GPU."""
    name = torch.cuda.get_device_name(0)
    return next((value for part, value in PEAK_FLOPS.items() if part in name), None)


def memory(job):
    if not job.on_gpu:
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.memory_allocated(), "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(), "used": total - free,
    }  # fmt: skip


def predict(config, total):
    from megatron_ibpo.plan.feasibility import make_plan

    config.run.dry_run_gpu_memory_gib = total / 2**30
    config.run.dry_run_gpus_per_node = 1
    stage = make_plan(config, 1).stages[0]
    named = vars(stage) | {"resident": stage.resident, "training": stage.training}
    return {name: int(value) for name, value in named.items()}
