"""Qwen3.5 and what came after it under the same names: https://huggingface.co/Qwen/Qwen3.5-27B (dense) and
https://huggingface.co/Qwen/Qwen3.5-35B-A3B (a mixture of experts with a shared one).

Layers are Qwen3-Next's, with a dense MLP where there are no experts. Checkpoints wrap the text model in one
that also sees (`text_config`, names under `model.language_model.`): the text model is trained, and the vision
tower is carried along as it is.
"""
