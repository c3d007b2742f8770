"""Where `support.fused_kernels` saves what it counted, whether that still holds, and what follows from it."""

import hashlib
import inspect
import json

from support.paths import ROOT

RECORD = ROOT / "tools/results/fused_kernels.json"

MEASURED = ROOT / "tools/results/gpu_h200_2026-11-26_traced.json"
"""Of the step without fused parts."""
LAYERS, PEAK_FLOPS = 28, 989e12  # of Qwen3-0.6B; bf16 of an H200
MEASURED_ATTENTION_BYTES = 191634.63414634147
"""Bytes per token of plain attention in that step, whose rectangles had more padding and one more copy."""


def sources_hash():
    """Hash of the functions that torch compiles."""
    from megatron_ibpo.models import fusion, local_modules

    functions = (local_modules.wide, local_modules.rms_norm, local_modules.rotate, fusion.Compiled)
    return hashlib.sha256("".join(map(inspect.getsource, functions)).encode()).hexdigest()


def expected(parts):
    """What an H200 is expected to need for a step whose parts move these bytes. Only time for bytes is saved:
    products, launches and everything else take as long as measured."""
    measured = json.loads(MEASURED.read_text())["parts"]
    step, bandwidth = measured["trainer-qwen3"], measured["machine"]["copy_bytes_per_s"]
    seconds = {}
    for way in ("plain", "fused"):
        moved = {part["part"]: part["per_layer"] * part[way]["bytes_per_token"] for part in parts}
        if way == "plain":
            moved["attention"] = MEASURED_ATTENTION_BYTES
        per_token = LAYERS * sum(moved.values())
        seconds[way] = per_token * step["tokens_per_step"] / bandwidth
    step_seconds = step["seconds_per_step"] - seconds["plain"] + seconds["fused"]
    return {
        "plain_parts_s": seconds["plain"], "fused_parts_s": seconds["fused"], "step_s": step_seconds,
        "measured_step_s": step["seconds_per_step"],
        "products_s": step["flops_per_step"] / measured["machine"]["matmul_flops_per_s"],
        "mfu": step["flops_per_step"] / step_seconds / PEAK_FLOPS,
    }  # fmt: skip
