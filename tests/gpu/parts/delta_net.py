"""flash-linear-attention's gated delta rule beside ours, in bf16: milliseconds, and errors against fp64."""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from job import Job, Skipped, check
from torch import Tensor

from megatron_ibpo.models.delta_net.layer import gated_delta_rule
from support.delta_net_kernels import rule_token_by_token

SHORT = (5, 70, 130, 1, 33, 64)  # below, at and across the chunks of 64
LONG = (4096, 2048, 2048, 4096, 3000, 1000)
NAMES = ("query", "key", "value", "decay", "beta")
OURS_BOUND = 1e-2  # relative, in the Euclidean norm; bf16 inputs and outputs, fp32 inside
FLA_BOUND = 3e-2  # the same with bf16 products inside


def run(job: Job) -> None:
    os.environ.setdefault("FLA_TILELANG", "0")
    dtype = torch.bfloat16
    inputs = short_inputs(job)
    exact = with_gradients(rule_token_by_token, doubled(inputs))
    ours = errors(with_gradients(gated_delta_rule, cast(inputs, dtype)), exact)
    job.note(ours_errors=ours)
    check(max(ours.values()) <= OURS_BOUND, f"ours in bf16: {ours}")
    if job.on_gpu:
        large = long_inputs(job)
        ours_ms = milliseconds(gated_delta_rule, large, repeats=1 if job.quick else 2)
        job.note(tokens=len(large["value"]), ours_ms=ours_ms)
    job.note(summary=f"ours {max(ours.values()):.1e}")
    if importlib.util.find_spec("fla") is None:
        if job.on_gpu:
            raise Skipped("flash-linear-attention is not installed; ours alone was run")
        return
    if job.on_gpu:
        compare_fla(job, cast(inputs, dtype), large, exact)


def compare_fla(job: Job, inputs: Inputs, large: Inputs, exact: dict[str, Tensor]) -> None:
    """Compare its forward pass, and then its gradients, which it refuses with some versions of Triton."""
    with torch.no_grad():
        output = fla_rule(*(inputs[name] for name in (*NAMES, "cu_seqlens")))
    forward = errors({"output": output}, {"output": exact["output"]})
    job.note(fla_forward_error=forward["output"])
    try:
        theirs = errors(with_gradients(fla_rule, inputs), exact)
    except RuntimeError as error:
        raise Skipped(f"flash-linear-attention gives no gradient here: {error}") from error
    job.note(fla_errors=theirs, fla_ms=milliseconds(fla_rule, large, repeats=2 if job.quick else 5))
    ours = max(job.found["ours_errors"].values())
    job.note(summary=f"errors: ours {ours:.1e}, FLA {max(theirs.values()):.1e}")
    check(max(theirs.values()) <= FLA_BOUND, f"FLA in bf16: {theirs}")


Inputs = dict[str, Any]


def short_inputs(job: Job) -> Inputs:
    lengths, heads = (SHORT, (4, 8)) if job.on_gpu else (SHORT[:3], (2, 4))
    return draw(lengths, job.device, heads=heads)


def long_inputs(job: Job) -> Inputs:
    lengths = LONG[:1] if job.quick else LONG
    return cast(draw(lengths, job.device, heads=(16, 32)), torch.bfloat16)


def draw(lengths: tuple[int, ...], device: str, heads: tuple[int, int], dim: int = 128) -> Inputs:
    """Draw inputs as the layers of Qwen3-Next give them: unit keys come from the rule itself."""
    generator = torch.Generator(device).manual_seed(0)
    tokens, (keys, values) = sum(lengths), heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=generator, device=device)

    return {
        "query": normal(keys, dim), "key": normal(keys, dim), "value": normal(values, dim),
        "decay": -F.softplus(normal(values)), "beta": normal(values).sigmoid(),
        "cu_seqlens": torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device),
    }  # fmt: skip


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Decay stays in fp32, as the layer keeps it."""
    return {n: x.to(dtype) if n in ("query", "key", "value", "beta") else x for n, x in inputs.items()}


def doubled(inputs: Inputs) -> Inputs:
    rounded = cast(inputs, torch.bfloat16)
    return {n: x.double() if x.is_floating_point() else x for n, x in rounded.items()}


def fla_rule(query, key, value, decay, beta, bounds) -> Tensor:
    """Call it as megatron-core does: [1, N, heads, …], key heads repeated, normed inside."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    repeats = value.shape[1] // key.shape[1]
    output, _ = chunk_gated_delta_rule(
        query.repeat_interleave(repeats, 1)[None], key.repeat_interleave(repeats, 1)[None], value[None],
        g=decay[None], beta=beta[None], initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=True, cu_seqlens=bounds.long(),
    )  # fmt: skip
    return output[0]


def with_gradients(rule: Callable[..., Tensor], inputs: Inputs) -> dict[str, Tensor]:
    """The output, and the gradients of a fixed random product with it."""
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in NAMES}
    output = rule(*leaves.values(), inputs["cu_seqlens"])
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(output.shape, generator=generator).to(output.device)
    (output.double() * weight.double()).sum().backward()
    return {"output": output.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: ((found[name].double() - exact[name]).norm() / exact[name].norm()).item() for name in exact}


def milliseconds(rule: Callable[..., Tensor], inputs: Inputs, repeats: int) -> dict[str, float]:
    seconds = []
    for _ in range(repeats + 1):
        leaves = [inputs[name].detach().requires_grad_() for name in NAMES]
        torch.cuda.synchronize()
        started = time.perf_counter()
        rule(*leaves, inputs["cu_seqlens"]).sum().backward()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {"first": seconds[0] * 1e3, "median": statistics.median(seconds[1:]) * 1e3}
