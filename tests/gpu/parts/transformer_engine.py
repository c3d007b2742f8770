"""A layer of Transformer Engine beside the local one, from the same weights; then a trainer with it.

NOT RUN: no GPU has run Transformer Engine here. On CPUs, where it cannot, the local layer takes its place.
"""

import importlib.util
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from job import Skipped, apart, check
from parts import trainer
from training import QWEN3, make_random_model

ROUNDINGS = 2.0
"""Allowed error of Transformer Engine's layer, over that of the local one in bf16 from itself in float32.
Both round activations and products to bf16; they differ in which intermediate results they round as well."""
LENGTHS = (5, 70, 130, 1, 33, 512)  # of packed sequences
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"head_dim": 16, "vocab_size": 512}


def run(job):
    if job.on_gpu and importlib.util.find_spec("transformer_engine") is None:
        raise Skipped("Transformer Engine is not installed; WHEELS=DIR gives it (docs/gpu_report.md)")
    shape = QWEN3 | {"num_hidden_layers": 1} | ({} if job.on_gpu else TINY)
    path = make_random_model(job.scratch / "layer", shape, job.device, torch.bfloat16)
    exact = apart(passes, path, job.device, bf16=False, has_engine=False)
    errors = {}
    for name, has_engine in (("local", False), ("engine", job.on_gpu)):
        rounded = apart(passes, path, job.device, bf16=True, has_engine=has_engine)
        errors[name] = {tensor: distance(rounded[tensor], exact[tensor]) for tensor in exact}
        job.note(layer_errors=errors, roundings=ROUNDINGS)
    ratios = {name: errors["engine"][name] / errors["local"][name] for name in exact}
    worst = max(ratios, key=lambda name: ratios[name])
    layer = f"the layer is {ratios[worst]:.2f} times as far from float32 as the local one ({worst})"
    job.note(summary=layer)
    check(ratios[worst] <= ROUNDINGS, f"{layer}; {ROUNDINGS} is allowed")
    trainer.run(replace(job, variant="qwen3"))
    job.note(summary=f"{layer}; {job.found['summary']}")
    libraries = {library for library, _ in job.found["layers"].values()}
    check("torch" not in libraries or not job.on_gpu, f"layers were computed by {libraries}")


def passes(path, device, *, bf16, has_engine):
    """Return the logits of packed random tokens and all gradients of their likelihood, in a world of one."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_ibpo.basics.distributed import start_world
    from megatron_ibpo.config import ModelConfig
    from megatron_ibpo.models.backends import Backends
    from support.model_passes import gradients_of, loaded

    world, logits = start_world(), []
    libraries = Backends(transformer_engine=has_engine, flash_linear_attention=False)
    model = ModelConfig(bf16=bf16, allow_local_modules=True)
    (chunk,), shape = loaded(world, path, model=model, device=device, libraries=libraries)
    generator = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(shape.vocab_size, (2, sum(LENGTHS)), generator=generator).to(device)
    ends = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in LENGTHS])
    packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS))

    def loss_of(logits_1NV):
        rows_NV = logits_1NV[0, :, : shape.vocab_size].float()
        logits.append(rows_NV.detach().cpu().numpy())
        return F.cross_entropy(rows_NV, targets), {}

    def forward(batches, chunk):
        return chunk(next(batches)[None], positions[None], None, packed_seq_params=packed), loss_of

    gradients = gradients_of(chunk, shape, forward, [ids])
    world.close()
    return {"logits": logits[0]} | {name: grad.float().cpu().numpy() for name, grad in gradients.items()}


def distance(ours, theirs):
    """Return the relative difference of two arrays, in norm."""
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
