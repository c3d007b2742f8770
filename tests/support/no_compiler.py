"""Imported before Megatron: without a GPU nothing is compiled, and the compiler takes 3 s to import."""

import torch

from megatron_ibpo.policy import cpu

if not torch.cuda.is_available():
    torch.compile = cpu._as_it_is
