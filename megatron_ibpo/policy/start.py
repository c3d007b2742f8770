"""What a trainer's process runs first."""

from typing import Any

from megatron_ibpo.policy import cpu
from megatron_ibpo.quiet import hush_megatron


def trainer_rank(*arguments: Any) -> Any:
    """A `rank.TrainerRank`. Without CUDA its stand-ins come before Megatron, which would import
    torch.compile's machinery for nothing: two seconds."""
    hush_megatron()
    cpu.activate()
    from megatron_ibpo.policy.rank import TrainerRank

    return TrainerRank(*arguments)
