"""Loads Megatron's models, and runs forward and backward passes as its schedule does."""

import json
from dataclasses import replace

import torch

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.config import Config, ModelConfig, ParallelConfig
from support.trainers import built, weights_of

ALONE = World(0, 1, torch.device("cpu"), None)


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def loaded(world, hf_dir, parallel_config=None, model=None, *, pieces=1, **how):
    """Start Megatron's groups; return this rank's part of a model, in so many pieces, and its shape."""
    model = model or ModelConfig()
    if pieces > 1:
        model = replace(model, model_override=(f"virtual_pipeline_model_parallel_size={pieces}",))
    return built(world, hf_dir, Config(model=model, parallel=parallel_config or ParallelConfig()), **how)


def gradients_of(chunk, shape, forward, batches):
    """Return the gradients that a model ends with, by name in its checkpoint, on rank 0. `forward(batches,
    model)` gives (output, loss of it), as Megatron asks for. The groups end."""
    from megatron.core import distributed
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    from megatron_ibpo.policy import parallel
    from megatron_ibpo.weights.layout.export import HFExport

    core = get_model_config(chunk)
    in_fp32 = next(chunk.parameters()).dtype != torch.float64
    reduced = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=in_fp32)
    model = distributed.DistributedDataParallel(core, reduced, chunk)
    core.finalize_model_grads_func = distributed.finalize_model_grads
    model.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward, data_iterator=iter(batches), model=[model], num_microbatches=len(batches),
        seq_length=1, micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.main_grad)
    gradients = weights_of(HFExport([model], shape))
    parallel.destroy()
    return gradients
