"""Qwen3 mixtures of experts: https://huggingface.co/Qwen/Qwen3-30B-A3B. Qwen Team, "Qwen3 Technical Report",
2025."""
