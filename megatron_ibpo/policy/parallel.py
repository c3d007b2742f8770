"""Megatron's model-parallel groups: the part of the model that each rank holds."""

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.config import ParallelConfig
from megatron_ibpo.policy import cpu


def initialize(parallel: ParallelConfig, world: World, seed: int) -> None:
    """Create Megatron's process groups and seed its random generators. Collective.

    Ranks are placed tensor-parallel first, then expert, data and pipeline parallel, so that the ranks of a TP
    group are neighbours. The layout must have passed `models.check_layout`.
    """
    cpu.activate()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round(parallel.distributed_timeout_minutes)),
        # checkpoints gather optimizer state in host memory; a rank that is only counted cannot communicate
        create_gloo_process_groups=world.control is not None,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def destroy() -> None:
    """Forget Megatron's groups; torch's process group remains."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
