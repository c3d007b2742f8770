"""Credit assignment: everything between scored responses and training sequences; one idea per file."""

from megatron_ibpo.credit.assign import Credit, assign_credit
from megatron_ibpo.credit.compared_parts import ThinkingMarks, part_in_prompt
from megatron_ibpo.credit.estimators import ComparedSamples, Estimator
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
from megatron_ibpo.credit.registries import (
    ESTIMATORS,
    OPERATORS,
    REGISTRIES,
    TOKEN_CREDITS,
    Method,
    check_credit,
    credit_of,
    find_estimator,
    find_method,
    find_operator,
    find_token_credit,
)
from megatron_ibpo.credit.token_credit import TokenCredit, TokenFactors

__all__ = [
    "ESTIMATORS",
    "OPERATORS",
    "REGISTRIES",
    "TOKEN_CREDITS",
    "AfterCredit",
    "AnswerStart",
    "ComparedSamples",
    "Credit",
    "CreditContext",
    "Estimator",
    "FollowUp",
    "GroupFilter",
    "Judgement",
    "LogProbQuery",
    "Method",
    "Operator",
    "ThinkingMarks",
    "TokenCredit",
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
    "find_token_credit",
    "is_informative",
    "leaves_gradient",
    "part_in_prompt",
]
