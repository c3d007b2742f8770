"""Credit assignment: everything between scored responses and training sequences; one idea per file."""

from megatron_ibpo.credit.assign import Credit, assign_credit
from megatron_ibpo.credit.estimators import ComparedSamples
from megatron_ibpo.credit.group_filters import (
    AfterCredit,
    GroupFilter,
    any_group,
    fill_batch,
    find_group_filter,
    is_informative,
    leaves_gradient,
)
from megatron_ibpo.credit.operator import (
    AnswerStart,
    CreditContext,
    FollowUp,
    Judgement,
    LogProbQuery,
    Operator,
    Vocabulary,
)
from megatron_ibpo.credit.pairing import ThinkingMarks, part_in_prompt
from megatron_ibpo.credit.registries import (
    REGISTRIES,
    Method,
    check_credit,
    credit_of,
    find_estimator,
    find_method,
    find_operator,
)
from megatron_ibpo.credit.token_credit import TokenFactors

__all__ = [
    "REGISTRIES",
    "AfterCredit",
    "AnswerStart",
    "ComparedSamples",
    "Credit",
    "CreditContext",
    "FollowUp",
    "GroupFilter",
    "Judgement",
    "LogProbQuery",
    "Method",
    "Operator",
    "ThinkingMarks",
    "TokenFactors",
    "Vocabulary",
    "any_group",
    "assign_credit",
    "check_credit",
    "credit_of",
    "fill_batch",
    "find_estimator",
    "find_group_filter",
    "find_method",
    "find_operator",
    "is_informative",
    "leaves_gradient",
    "part_in_prompt",
]
