"""Measuring a policy on held-out prompts."""

from megatron_ibpo.evaluate.accuracy import Evaluation, evaluate
from megatron_ibpo.evaluate.inference import Corrector

__all__ = ["Corrector", "Evaluation", "evaluate"]
