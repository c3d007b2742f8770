"""Measuring a policy on held-out prompts."""

from megatron_ibpo.evaluate.accuracy import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate"]
