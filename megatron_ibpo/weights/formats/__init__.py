"""Checkpoints as files, in Hugging Face's and Megatron's format, and from one to the other."""
