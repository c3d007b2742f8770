"""gpt-oss-20b and gpt-oss-120b (https://huggingface.co/openai/gpt-oss-20b). OpenAI, "gpt-oss-120b &
gpt-oss-20b Model Card", 2025.

Experts in every layer; attention with biases, a sink for each head and, in every other layer, a window.
Experts and router have biases too, and the experts' gated activation is clamped. Checkpoints hold the
experts of a layer in one tensor, transposed, with the rows of gate and up in turn.
"""
