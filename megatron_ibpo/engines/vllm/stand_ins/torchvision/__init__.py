"""A stand-in for the parts of torchvision that vLLM and transformers import for vision-language models.

The package index has no torchvision for the CPU's torch, and vLLM cannot load Qwen3.5 without one: its text
model is in a module with the vision tower, whose preprocessing imports it. Only engines on CPUs have this on
their path, and only if no torchvision is installed. It computes nothing: engines get text alone.
"""

__version__ = "0.28.0"
