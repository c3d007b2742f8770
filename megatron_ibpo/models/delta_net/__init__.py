"""The gated delta net, and the common parts of families that mix it with attention: Qwen3-Next and Qwen3.5.

Every layer is either attention with an output gate or a gated delta net. Norms are zero-centred, except that
of the delta net's output.
"""
