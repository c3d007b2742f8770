"""Cost of Qwen3.5's layers: attention or a gated delta net in each."""

from megatron_ibpo.models.delta_net.cost import mixer_cost

__all__ = ["mixer_cost"]
