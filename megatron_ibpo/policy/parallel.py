"""Which rank holds which part of the model: Megatron's model-parallel groups."""

from __future__ import annotations

from megatron_ibpo.config import ParallelConfig
from megatron_ibpo.models import check_layout
from megatron_ibpo.policy import cpu
from megatron_ibpo.world import World

__all__ = ["check_layout", "destroy", "initialize"]


def initialize(parallel: ParallelConfig, world: World, seed: int) -> None:
    """Create Megatron's process groups and seed its random generators. Collective.

    Ranks are placed tensor-parallel first, then expert, data and pipeline parallel, so that TP groups
    are neighbours. Whether the model fits the layout is `check_layout`'s question, asked before.

    Raises:
        ValueError: sizes that do not divide the world, or context parallelism.
    """
    cpu.activate()
    from megatron.core import parallel_state, tensor_parallel

    _check_sizes(parallel, world.size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round(parallel.distributed_timeout_minutes)),
        create_gloo_process_groups=world.device.type == "cuda",
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def destroy() -> None:
    """Forget Megatron's groups; the torch world stays."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def _check_sizes(parallel: ParallelConfig, world_size: int) -> None:
    if parallel.context_parallel_size != 1:
        raise ValueError(
            f"--context-parallel-size={parallel.context_parallel_size}: context parallelism is not "
            "supported yet; use 1"
        )
    dense = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    expert = (
        parallel.expert_tensor_parallel_size
        * parallel.expert_model_parallel_size
        * parallel.pipeline_model_parallel_size
    )
    for name, size in (("TP x PP", dense), ("ETP x EP x PP", expert)):
        if size < 1 or world_size % size:
            raise ValueError(f"{name} = {size} does not divide the world size ({world_size})")
