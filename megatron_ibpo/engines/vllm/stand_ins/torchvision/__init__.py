"""What vLLM and transformers import of torchvision on their way to models that also see.

The package index has no torchvision for the CPU's torch, and vLLM cannot load Qwen3.5 without one: its text
model lies in a module with the vision tower, whose preprocessing imports it. Only engines on CPUs find this
on their path, and only where no torchvision is installed. It computes nothing: engines are given text alone.
"""

__version__ = "0.28.0"
