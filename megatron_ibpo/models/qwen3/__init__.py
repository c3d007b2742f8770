"""Qwen3, dense (https://huggingface.co/Qwen/Qwen3-32B) and with a mixture of experts in every layer
(https://huggingface.co/Qwen/Qwen3-30B-A3B). Qwen Team, "Qwen3 Technical Report", 2025."""
