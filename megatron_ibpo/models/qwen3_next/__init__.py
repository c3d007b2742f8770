"""Qwen3-Next: https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct.

Three layers of four are gated delta nets, the fourth is attention with an output gate; every layer has a
mixture of experts with a shared one. Norms are zero-centred, except that of the delta net's output.
"""
