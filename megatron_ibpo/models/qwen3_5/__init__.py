"""Qwen3.5 and its successors under the same names: https://huggingface.co/Qwen/Qwen3.5-27B (dense) and
https://huggingface.co/Qwen/Qwen3.5-35B-A3B (a mixture of experts with a shared one).

Layers are Qwen3-Next's, with a dense MLP if there are no experts. Checkpoints wrap the text model in a
vision-language model (`text_config`, names under `model.language_model.`): the text model is trained, and the
vision tower is carried along unchanged.
"""
