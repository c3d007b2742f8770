"""Evaluation of a policy on held-out prompts."""

from megatron_ibpo.evaluate.accuracy import Corrector, Evaluation, evaluate
from megatron_ibpo.evaluate.eval_sample import Asked, EvalSample, eval_sample
from megatron_ibpo.evaluate.sets import EvalSet, SetEvaluation, open_eval_sets, set_settings
from megatron_ibpo.evaluate.stored_samples import KeptError, KeptSamples, answered

__all__ = [
    "Asked",
    "Corrector",
    "EvalSample",
    "EvalSet",
    "Evaluation",
    "KeptError",
    "KeptSamples",
    "SetEvaluation",
    "answered",
    "eval_sample",
    "evaluate",
    "open_eval_sets",
    "set_settings",
]
