"""The gated delta net, and what families that mix it with attention have in common: Qwen3-Next and Qwen3.5.

Every layer is either attention with an output gate or a gated delta net. Norms are zero-centred, but for that
of the delta net's output.
"""
