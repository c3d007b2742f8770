"""Weights between Hugging Face checkpoints, the trainer's ranks and the engines.

Importing this package imports neither Megatron nor vLLM, since trainers and engines both use it. Import from
its modules: the driver needs a few that work without torch.
"""
