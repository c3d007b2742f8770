"""Verifiers: the only source of rewards."""

from megatron_ibpo.basics.reward_value import LabelError, ResponseError
from megatron_ibpo.rewards.response import Response, answer_place
from megatron_ibpo.rewards.verifier import (
    CHECKED_AT_START,
    Pool,
    Score,
    Verifier,
    answer_extractor,
    check_labels,
    check_pool,
    check_servers,
    extracted_answer,
    label_problems,
    main_rm_type,
    named_rm_types,
    open_pool,
    open_verifier,
    reward_functions,
    start_pool,
    worker_count,
)
from megatron_ibpo.rewards.workers import Outcome, WorkerError, WorkerPool

__all__ = [
    "CHECKED_AT_START",
    "LabelError",
    "Outcome",
    "Pool",
    "Response",
    "ResponseError",
    "Score",
    "Verifier",
    "WorkerError",
    "WorkerPool",
    "answer_extractor",
    "answer_place",
    "check_labels",
    "check_pool",
    "check_servers",
    "extracted_answer",
    "label_problems",
    "main_rm_type",
    "named_rm_types",
    "open_pool",
    "open_verifier",
    "reward_functions",
    "start_pool",
    "worker_count",
]
