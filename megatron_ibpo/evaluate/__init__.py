"""Evaluation of a policy on held-out prompts."""

from megatron_ibpo.evaluate.accuracy import Corrector, Evaluation, evaluate
from megatron_ibpo.evaluate.sets import EvalSet, SetEvaluation, open_eval_sets, set_settings
from megatron_ibpo.evaluate.stored_samples import (
    EvalRequest,
    EvalSample,
    KeptError,
    KeptSamples,
    complete_samples,
    eval_sample,
)

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
