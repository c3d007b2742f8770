"""Packed micro-batches through a Megatron model, and its optimizer: the code that policy and critic share.

The gradient's norm is computed once, with one wait of the host. (Megatron computes it again in its step and,
without Transformer Engine or Apex, waits once for each parameter.)
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.basics.records import ExpertIds, Floats
from megatron_ibpo.config import Config, OptimizerConfig
from megatron_ibpo.policy import packing
from megatron_ibpo.policy.overrides import OPTIMIZER, as_megatron, blaming, optimizer_overrides
from megatron_ibpo.policy.packing import SINGLE_RANK, Context, PackedArrays, PackedBatch
from megatron_ibpo.policy.routing_replay import RoutingReplay

QUANTIZED_ROWS = 128
"""Under fp8 and fp4 a rank's rows are a multiple of this: blocks of scales have 32 or 128 rows."""

UNCALLED = ("conv1d", "core_attention", "output_layer", "shared_experts")
"""Modules whose parameters may be read without a call of the module, by the one around it: the convolution of
a delta net, sinks, the head that the loss takes, the gate of an expert that overlaps with others."""

Values = Callable[[PackedBatch, Tensor], Tensor]
"""(micro-batch, output of the last stage) → [N], one value per row."""
Observed = Mapping[str, Tensor | float]
"""Numbers of a micro-batch by name. Computed ones stay scalars on the device, without a gradient: the host,
which launches the next micro-batch meanwhile, waits for none of them."""
Loss = Callable[[float, PackedBatch, Tensor], tuple[Tensor, Observed]]
"""(scale, micro-batch, output of the last stage) → (loss times scale, observed numbers)."""


def make_trainable(
    chunks: list[Any], config: Config, lr: float, total_updates: int
) -> tuple[list[Any], Any, OptimizerParamScheduler]:
    """Return this rank's part of a model, as `build_model` made it, under data parallelism, its optimizer,
    and the schedule of `total_updates` steps with the peak `lr`. Raises ValueError for settings that
    Megatron's optimizer refuses, and for --overlap-param-gather with CUDA graphs."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        overlap_param_gather=config.parallel.overlap_param_gather,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
    )
    model_config = chunks[0].config
    wrapped = [
        # as in Megatron-LM: only the reduction of a backward pass's last part has nothing to overlap with
        DistributedDataParallel(model_config, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        if config.parallel.overlap_param_gather:
            wait_around(chunk)
        _count_padding(chunk)
    optimizer: Any = get_megatron_optimizer(_optimizer_config(config, lr), wrapped)
    # where only experts have adapters Megatron has one for nothing dense, which steps but cannot be saved
    used = [part for part in optimizer.chained_optimizers if part.optimizer is not None]
    optimizer.chained_optimizers = used
    for part in used:
        _update_in_one_pass(part.optimizer)
    model_config.finalize_model_grads_func = finalize_model_grads
    model_config.grad_scale_func = optimizer.scale_loss
    model_config.no_sync_func = (
        [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    )
    return wrapped, optimizer, _scheduler(optimizer, config.optimizer, lr, total_updates)


def _update_in_one_pass(optimizer: Any) -> None:
    """Have torch's Adam read each parameter on CPUs once per step, in place of ten times. On GPUs it chooses
    by itself."""
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.Adam) else ():
        if all(parameter.device.type == "cpu" for parameter in group["params"]):
            group["fused"] = True


def _count_padding(chunk: Any) -> None:
    """Make Megatron count the padding of buckets as content when it saves a sharded optimizer: its checkpoint
    leaves that out, and then looks for each parameter's state at its place with the padding."""
    for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()


def infer(
    chunks: list[Any],
    packs: Sequence[PackedArrays],
    values: Values,
    device: torch.device,
    processor: Callable[..., Tensor] | None = None,
    routing: RoutingReplay | None = None,
    *,
    records: list[tuple[int, ExpertIds]] | None = None,
) -> list[tuple[int, Floats]]:
    """Return `values` of every response token from a pass without gradients and dropout. Collective.

    Args:
        processor: GPTModel's `output_processor`, in place of its output layer.
        routing: replay for the model's routers, which then choose as the micro-batches say; None: freely.
        records: filled with the routers' choices for each sequence of this rank ([tokens but the last, this
            rank's layers, K], by its index), on every stage; needs `routing`.

    Returns:
        (index in the planned list, one float32 per response token, 0 where the loss mask is False) of each
        sequence of this rank, on ranks of the last stage; empty elsewhere.
    """
    if not packs:
        return []
    batches = _lay_out_all(packs, device, chunks[0].config)

    def output(batch: PackedBatch, result: Tensor) -> tuple[Tensor, Tensor]:
        return result.new_zeros(()), values(batch, result)

    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            outputs = _run(
                chunks, batches, output, processor, routing, forward_only=True, records=records is not None
            )
    finally:
        for chunk in chunks:
            chunk.train()
    if routing is not None and records is not None:
        chosen = zip(packs, routing.recorded(batches), strict=True)
        records += [choice for arrays, ids in chosen for choice in packing.split_choices(arrays, ids)]
    if not parallel_state.is_pipeline_last_stage():
        return []
    pairs = zip(packs, packing.response_values(batches, outputs), strict=True)
    return [values for arrays, values_R in pairs for values in packing.split_sequences(arrays, values_R)]


def accumulate_gradients(
    chunks: list[Any],
    optimizer: Any,
    packs: Sequence[PackedArrays],
    loss: Loss,
    world: World,
    processor: Callable[..., Tensor] | None = None,
    routing: RoutingReplay | None = None,
) -> list[dict[str, float]]:
    """Fill the gradient buffers, whose content is lost, with the gradient of the sum of losses over all
    ranks' micro-batches, one or more. Collective. `routing` as in `infer`.

    Returns the observed numbers of every rank's micro-batches, in the order of ranks and micro-batches, the
    same on every rank. Ranks that share sequences each observe their own rows.
    """
    batches = _lay_out_all(packs, world.device, chunks[0].config)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    # Megatron divides by the micro-batches and averages over data-parallel ranks; the loss is a sum. Ranks
    # that share sequences each have a gradient of their own rows, and Megatron adds those up.
    scale = len(batches) * parallel_state.get_data_parallel_world_size()
    observed = _run(chunks, batches, partial(loss, scale), processor, routing, forward_only=False)
    parts = world.all_gather(_on_host(observed) if _has_own_rows() else [])
    return [piece for part in parts for piece in part]


def _on_host(observed: Sequence[Observed]) -> list[dict[str, float]]:
    """Return the observed values as plain numbers, copied from the device at once."""
    tensors = [value.double() for row in observed for value in row.values() if isinstance(value, Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())
    return [
        {name: next(numbers) if isinstance(value, Tensor) else float(value) for name, value in row.items()}
        for row in observed
    ]


def _lay_out_all(packs: Sequence[PackedArrays], device: torch.device, model: Any) -> list[PackedBatch]:
    """Return this rank's micro-batches as tensors. `model` is Megatron's TransformerConfig."""
    multiple, context = parallel_state.get_tensor_model_parallel_world_size(), SINGLE_RANK
    if (ranks := parallel_state.get_context_parallel_world_size()) > 1:
        rank, group = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_group()
        context = Context(rank, ranks, group)
    if model.fp8 or model.fp4:
        multiple *= QUANTIZED_ROWS
    return [packing.lay_out(arrays, multiple=multiple, device=device, context=context) for arrays in packs]


def _run(
    chunks: list[Any],
    batches: list[PackedBatch],
    output: Callable[[PackedBatch, Tensor], tuple[Tensor, Any]],
    processor: Callable[..., Tensor] | None,
    routing: RoutingReplay | None,
    *,
    forward_only: bool,
    records: bool = False,
) -> list[Any]:
    """Run every micro-batch through the pipeline. `output`: (micro-batch, output of the last stage) → (loss,
    what to keep of it). Returns what was kept of each, on ranks of the last stage."""

    def forward(iterator: Any, model: Any) -> tuple[Tensor, Callable]:
        batch: PackedBatch = next(iterator)
        with nullcontext() if routing is None else routing.forward(batch):
            return _forward(model, batch, processor), partial(output, batch)

    interleaved = len(chunks) > 1
    schedule = get_forward_backward_func(
        parallel_state.get_pipeline_model_parallel_world_size(), len(chunks) if interleaved else None
    )
    with nullcontext() if routing is None else routing.schedule(trains=not forward_only, records=records):
        return schedule(
            forward_step_func=forward,
            data_iterator=[iter(batches) for _ in chunks] if interleaved else iter(batches),
            model=chunks,
            num_microbatches=len(batches),
            seq_length=max(batch.input_ids_1N.shape[1] for batch in batches),
            micro_batch_size=1,
            forward_only=forward_only,
        )


def _forward(model: Any, batch: PackedBatch, processor: Callable[..., Tensor] | None) -> Tensor:
    """Run a micro-batch through this rank's part of the model."""
    return model(
        batch.input_ids_1N,
        batch.position_ids_1N,
        None,
        packed_seq_params=batch.sequences,
        output_processor=processor,
    )


def wait_around(chunk: Any) -> None:
    """Have the modules around `UNCALLED` ones wait for these parameters' new values too. `chunk` is the model
    in Megatron's DistributedDataParallel, built with overlap_param_gather: there a hook on each module waits
    for its own parameters. Raises ValueError if CUDA graphs are in use, which run without hooks."""
    if getattr(chunk.config, "cuda_graph_impl", "none") != "none":
        raise ValueError(
            "--overlap-param-gather: CUDA graphs of the model read weights without waiting for them; "
            "drop the flag, or the graphs"
        )
    wait = chunk._make_forward_pre_hook()
    for name, module in chunk.module.named_modules():
        outer, _, last_name = name.rpartition(".")
        if last_name in UNCALLED:
            around = chunk.module.get_submodule(outer)
            around.register_forward_pre_hook(lambda *_, module=module: wait(module))


def finish_gathers(chunks: Sequence[Any]) -> None:
    """Wait until every rank has all weights, before anything but a forward pass reads them. Collective. Does
    nothing without --overlap-param-gather, or if the weights have arrived."""
    groups = [
        group
        for chunk in chunks
        if chunk.ddp_config.overlap_param_gather
        for chunk_groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups)
        for group in reversed(chunk_groups)  # the order in which forward passes need them
    ]
    for group in groups:
        if not group.param_gather_dispatched:
            group.start_param_sync()
    for group in groups:
        group.finish_param_sync(skip_next_bucket_dispatch=True)


def is_reporting_rank() -> bool:
    """Return whether this rank holds results, as one does for each data-parallel share of the last stage."""
    return _has_own_rows() and parallel_state.get_context_parallel_rank() == 0


def _has_own_rows() -> bool:
    """Return whether this rank is the one that represents its share of the rows of the last stage."""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0


def _optimizer_config(config: Config, lr: float) -> MegatronOptimizerConfig:
    chosen, overrides = config.optimizer, optimizer_overrides(config)
    if chosen.use_precision_aware_optimizer and not (chosen.optimizer_cpu_offload or HAVE_TE):
        raise ValueError(
            "--use-precision-aware-optimizer: needs Transformer Engine, which is not installed; drop it, "
            "or add --optimizer-cpu-offload"
        )
    fields = {
        "optimizer": "adam",
        "lr": lr,
        "min_lr": lr * chosen.min_lr_ratio,
        "weight_decay": chosen.weight_decay,
        "adam_beta1": chosen.adam_beta1,
        "adam_beta2": chosen.adam_beta2,
        "adam_eps": chosen.adam_eps,
        "clip_grad": chosen.clip_grad,
        "bf16": bool(config.model.bf16),
        "params_dtype": torch.bfloat16 if config.model.bf16 else torch.float32,
        "use_distributed_optimizer": config.parallel.use_distributed_optimizer,
        "use_precision_aware_optimizer": chosen.use_precision_aware_optimizer,
        # saved, they would be taken for master weights
        "store_param_remainders": False,
        "optimizer_cpu_offload": chosen.optimizer_cpu_offload,
        "optimizer_offload_fraction": 1.0,
        "overlap_cpu_optimizer_d2h_h2d": chosen.overlap_cpu_optimizer_d2h_h2d,
        "overlap_param_gather": config.parallel.overlap_param_gather,
    }
    with blaming(OPTIMIZER, chosen.optimizer_override):
        return MegatronOptimizerConfig(**fields | as_megatron(overrides, MegatronOptimizerConfig))


def _scheduler(
    optimizer: Any, chosen: OptimizerConfig, lr: float, total_updates: int
) -> OptimizerParamScheduler:
    warmup = min(int(chosen.lr_warmup_fraction * total_updates), total_updates - 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=lr * chosen.min_lr_ratio,
        lr_warmup_steps=warmup,
        lr_decay_steps=total_updates,
        lr_decay_style=chosen.lr_decay_style,
        start_wd=chosen.weight_decay,
        end_wd=chosen.weight_decay,
        wd_incr_steps=total_updates,
        wd_incr_style="constant",
    )


@torch.no_grad()
def gradient_norm(optimizer: Any) -> float:
    """Return the norm of the gradient buffers of Megatron's ChainedOptimizer, with each parameter of the
    whole model counted once. Collective. Megatron decides which of a rank's gradients count, and over which
    ranks squares are summed; in float32 on a CPU the result is Megatron's, bit for bit."""
    optimizer.prepare_grads()
    by_group: dict[Any, list[Tensor]] = defaultdict(list)
    for part in optimizer.chained_optimizers:
        by_group[part.get_grad_stats_parallel_group()] += part.get_grads_for_grad_norm()
    squares = [_sum_of_squares(gradients, group) for group, gradients in by_group.items()]
    norms = [square**0.5 for square in torch.cat(squares).tolist()]
    return norms[0] if len(norms) == 1 else sqrt(sum(norm**2 for norm in norms))  # rounded as in Megatron


def take_step(optimizer: Any, norm: float) -> None:
    """Clip the gradients by their `gradient_norm` and step. Collective."""
    optimizer.get_grad_norm = lambda: norm  # in place of the method that computes it once more
    try:
        optimizer.step()
    finally:
        del optimizer.get_grad_norm


def _sum_of_squares(gradients: list[Tensor], group: Any) -> Tensor:
    """Return [1] float32 on the device, the sum over all ranks of the group. No host waits for it."""
    if gradients:
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        square = torch.linalg.vector_norm(torch.stack(norms)).reshape(1) ** 2
    else:
        square = torch.zeros(1, device=torch.cuda.current_device())
    dist.all_reduce(square, group=group)
    return square
