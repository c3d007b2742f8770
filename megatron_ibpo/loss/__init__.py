"""The policy-gradient loss over packed sequences, which torch defines and Triton kernels compute on GPUs."""

from megatron_ibpo.loss.head_loss import head_logprobs, head_policy_loss
from megatron_ibpo.loss.linear_loss import CHUNK_ROWS, linear_packed_logprobs, linear_policy_loss
from megatron_ibpo.loss.logprobs import ChosenBackend, choose_backend, packed_logprobs
from megatron_ibpo.loss.objective import Objective, check_calls, check_terms, make_objective
from megatron_ibpo.loss.packed_rows import LossRows, RowIndex, SamplingSets
from megatron_ibpo.loss.segments import LossStats, policy_loss, weighted_value
from megatron_ibpo.loss.variants import VARIANTS, Parameter, Variant, resolve_variant

__all__ = [
    "CHUNK_ROWS",
    "VARIANTS",
    "ChosenBackend",
    "LossRows",
    "LossStats",
    "Objective",
    "Parameter",
    "RowIndex",
    "SamplingSets",
    "Variant",
    "check_calls",
    "check_terms",
    "choose_backend",
    "head_logprobs",
    "head_policy_loss",
    "linear_packed_logprobs",
    "linear_policy_loss",
    "make_objective",
    "packed_logprobs",
    "policy_loss",
    "resolve_variant",
    "weighted_value",
]
