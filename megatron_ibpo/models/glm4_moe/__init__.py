"""GLM-4.5, GLM-4.5-Air (https://huggingface.co/zai-org/GLM-4.5-Air) and GLM-4.6. GLM Team, "GLM-4.5: Agentic,
Reasoning, and Coding (ARC) Foundation Models", 2025.

The first layers have a dense MLP, the others experts and a shared one without a gate. A router scores
experts by sigmoids, and chooses by scores to which it adds a correction. This is no parameter: pretraining
balanced the experts with it, and it stays as it is. Checkpoints hold their multi-token prediction layer as
one more layer, which is carried along.
"""
