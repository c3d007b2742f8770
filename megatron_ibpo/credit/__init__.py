"""Credit assignment: everything between scored responses and training sequences; one file an idea."""

from megatron_ibpo.credit.assign import Credit, assign_credit
from megatron_ibpo.credit.dynamic_sampling import fill_batch
from megatron_ibpo.credit.operator import Judgement, LogProbQuery, LoopAccess, Operator
from megatron_ibpo.credit.shown import ThinkingMarks, shown_parts

__all__ = [
    "Credit",
    "Judgement",
    "LogProbQuery",
    "LoopAccess",
    "Operator",
    "ThinkingMarks",
    "assign_credit",
    "fill_batch",
    "shown_parts",
]
