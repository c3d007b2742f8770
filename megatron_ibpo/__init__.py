"""Reinforcement learning of reasoning models with IBPO on Megatron-core and vLLM."""

__version__ = "0.1.0"
