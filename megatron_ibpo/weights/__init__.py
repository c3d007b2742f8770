"""Weights between Hugging Face checkpoints, the trainer's ranks and the engines.

Nothing here imports Megatron or vLLM when it is imported: both sides use this room. Import from its modules:
the driver needs a few that work without torch.
"""
