"""The trainer of Qwen3-0.6B with local layers: each part fused alone, all of them, and none."""

import sys
import time
from dataclasses import replace

from job import apart, check

PARTS = ("norm", "rotary", "activation", "attention")
LEVERS = {"none": (), **{part: (part,) for part in PARTS}, "all": PARTS, "none again": ()}
"""The first is repeated at the end: what differs between the two is no lever."""
NUMBERS = ("seconds", "seconds_per_step", "tokens_per_second", "memory_bytes", "layers", "steps")


def run(job):
    rows = {}
    levers = LEVERS if job.on_gpu else {"none": (), "all": PARTS}  # nothing is fused on a CPU
    for lever, parts in levers.items():
        rows[lever] = apart(train, replace(job, scratch=job.scratch / lever, found={}), parts)
        job.note(levers=rows)
    job.note(errors=apart(errors, job.scratch / "none" / "model", job.device))
    speeds = {lever: row["tokens_per_second"] for lever, row in rows.items()}
    job.note(summary=", ".join(f"{lever} {speed:,.0f}" for lever, speed in speeds.items()) + " tokens/s")
    plain = rows["none"]["steps"][0]
    for lever, row in rows.items():
        check(not row["failures"], f"{lever}: left out: {row['failures']}")
        norm = row["steps"][0]["grad_norm"]
        check(abs(norm / plain["grad_norm"] - 1) < 0.05, f"{lever}: gradient norm {norm}: {plain}")


def train(job, parts):
    """Five steps in this process, with only these parts fused."""
    sys.modules["transformer_engine"] = None  # as if it were not installed
    from parts import trainer

    from megatron_ibpo.models import fusion

    job.scratch.mkdir()
    fusion.FUSIONS = frozenset(parts)
    started = time.perf_counter()
    trainer.run(replace(job, variant="qwen3"))
    job.note(seconds=time.perf_counter() - started)  # compiling included
    peak = trainer.peak_flops() if job.on_gpu else None
    mfu = job.found["flops_per_second"] / peak if peak else None
    return {name: job.found[name] for name in NUMBERS} | {"mfu": mfu, "failures": dict(fusion.FAILURES)}


def errors(model, device):
    """Largest errors from float64 of results and gradients: fused, plain, and the largest value."""
    import torch

    from megatron_ibpo.models import read_hf_config
    from megatron_ibpo.policy import cpu

    cpu.activate()
    from megatron_ibpo.models import fusion_check

    examples = fusion_check.examples(read_hf_config(model), torch.bfloat16, device)
    if device == "cpu":
        del examples["attention"]  # flash attention needs a GPU
    return {
        part: [fusion_check.errors(*example) for example in part_examples]
        for part, part_examples in examples.items()
    }
