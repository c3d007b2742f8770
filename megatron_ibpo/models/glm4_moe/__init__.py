"""GLM-4.5, GLM-4.5-Air (https://huggingface.co/zai-org/GLM-4.5-Air) and GLM-4.6. GLM Team, "GLM-4.5: Agentic,
Reasoning, and Coding (ARC) Foundation Models", 2025.

The first layers have a dense MLP, the others experts and a shared one without a gate. A router scores experts
by sigmoids, and chooses by scores plus a correction. This is no parameter: pretraining balanced the experts
with it, and it does not change. Checkpoints hold their multi-token prediction layer as one more layer, which
is carried along.
"""
