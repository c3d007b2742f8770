"""flash-linear-attention's gated delta rule beside ours, in bf16: milliseconds, and errors against fp64."""

import importlib.util
import os
import statistics
import time

import torch
import torch.nn.functional as F
from job import Skipped, check

from megatron_ibpo.models.delta_net.layer import gated_delta_rule
from support.delta_net_kernels import rule_token_by_token

SHORT = (5, 70, 130, 1, 33, 64)  # below, at and across the chunks of 64
LONG = (4096, 2048, 2048, 4096, 3000, 1000)
NAMES = ("query", "key", "value", "decay", "beta")
OURS_BOUND = 1e-2  # relative, in the Euclidean norm; bf16 inputs and outputs, fp32 inside
FLA_BOUND = 3e-2  # the same with bf16 products inside


def run(job):
    os.environ.setdefault("FLA_TILELANG", "0")
    inputs, exact = short_inputs(job)
    ours = errors(with_gradients(gated_delta_rule, inputs), exact)
    job.note(ours_errors=ours)
    check(max(ours.values()) <= OURS_BOUND, f"ours in bf16: {ours}")
    job.note(summary=f"ours {max(ours.values()):.1e}")
    if not job.on_gpu:
        return
    large = long_inputs(job)
    ours_ms = milliseconds(gated_delta_rule, large, repeats=1 if job.quick else 2)
    job.note(tokens=len(large["value"]), ours_ms=ours_ms)
    if importlib.util.find_spec("fla") is None:
        raise Skipped("flash-linear-attention is not installed; ours alone was run")
    # its forward pass, and then its gradients, which it refuses with some versions of Triton
    with torch.no_grad():
        output = fla_rule(*inputs.values())
    job.note(fla_forward_error=errors({"output": output}, {"output": exact["output"]})["output"])
    try:
        theirs = errors(with_gradients(fla_rule, inputs), exact)
    except RuntimeError as error:
        raise Skipped(f"flash-linear-attention gives no gradient here: {error}") from error
    job.note(fla_errors=theirs, fla_ms=milliseconds(fla_rule, large, repeats=2 if job.quick else 5))
    job.note(summary=f"errors: ours {max(ours.values()):.1e}, FLA {max(theirs.values()):.1e}")
    check(max(theirs.values()) <= FLA_BOUND, f"FLA in bf16: {theirs}")


def short_inputs(job):
    """In bf16; and what is exact for them."""
    lengths, heads = (SHORT, (4, 8)) if job.on_gpu else (SHORT[:3], (2, 4))
    inputs = draw(lengths, job.device, heads)
    doubled = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    return inputs, with_gradients(rule_token_by_token, doubled)


def long_inputs(job):
    return draw(LONG[:1] if job.quick else LONG, job.device, heads=(16, 32))


def draw(lengths, device, heads, dim=128):
    """Draw inputs as the layers of Qwen3-Next give them: unit keys come from the rule itself."""
    drawn_by = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    tokens, (keys, values) = sum(lengths), heads
    shapes = ((keys, dim), (keys, dim), (values, dim), (values,), (values,))
    query, key, value, decay, beta = (torch.randn(tokens, *shape, **drawn_by) for shape in shapes)
    low = (query.bfloat16(), key.bfloat16(), value.bfloat16())
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    of_layer = (*low, -F.softplus(decay), beta.sigmoid().bfloat16(), bounds)  # decay stays in fp32
    return dict(zip((*NAMES, "cu_seqlens"), of_layer, strict=True))


def fla_rule(query, key, value, decay, beta, bounds):
    """Call it as megatron-core does: [1, N, heads, …], key heads repeated, normed inside."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    repeats = value.shape[1] // key.shape[1]
    output, _ = chunk_gated_delta_rule(
        query.repeat_interleave(repeats, 1)[None], key.repeat_interleave(repeats, 1)[None], value[None],
        g=decay[None], beta=beta[None], initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=True, cu_seqlens=bounds.long(),
    )  # fmt: skip
    return output[0]


def with_gradients(rule, inputs):
    """The output, and the gradients of a fixed random product with it."""
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in NAMES}
    output = rule(*leaves.values(), inputs["cu_seqlens"])
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.device)
    (output.double() * weight.double()).sum().backward()
    return {"output": output.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def errors(found, exact):
    return {name: ((found[name].double() - exact[name]).norm() / exact[name].norm()).item() for name in exact}


def milliseconds(rule, inputs, repeats):
    seconds = []
    for _ in range(repeats + 1):
        leaves = [inputs[name].detach().requires_grad_() for name in NAMES]
        torch.cuda.synchronize()
        started = time.perf_counter()
        rule(*leaves, inputs["cu_seqlens"]).sum().backward()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {"first": seconds[0] * 1e3, "median": statistics.median(seconds[1:]) * 1e3}
