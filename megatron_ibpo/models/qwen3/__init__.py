"""Qwen3, dense: https://huggingface.co/Qwen/Qwen3-32B. Qwen Team, "Qwen3 Technical Report", 2025."""
