"""Checkpoint files in Hugging Face's and Megatron's formats, and conversion between the two."""
