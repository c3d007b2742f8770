"""Evaluation of a policy on held-out prompts."""

from megatron_ibpo.evaluate.accuracy import Corrector, Evaluation, evaluate
from megatron_ibpo.evaluate.eval_sample import EvalRequest, EvalSample, eval_sample
from megatron_ibpo.evaluate.sets import EvalSet, SetEvaluation, open_eval_sets, set_settings
from megatron_ibpo.evaluate.stored_samples import KeptError, KeptSamples, complete_samples

__all__ = [
    "Corrector",
    "EvalRequest",
    "EvalSample",
    "EvalSet",
    "Evaluation",
    "KeptError",
    "KeptSamples",
    "SetEvaluation",
    "complete_samples",
    "eval_sample",
    "evaluate",
    "open_eval_sets",
    "set_settings",
]
