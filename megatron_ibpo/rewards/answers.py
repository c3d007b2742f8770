"""The answer that a response comes to, as text: what a majority vote counts."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from megatron_ibpo.rewards.verifier import VERIFIERS

__all__ = ["answer_extractor"]


def answer_extractor(rm_type: str) -> Callable[[str], str | None] | None:
    """`extract_answer(response) -> str | None` of the module in which a verifier is; None if it has none.

    Answers that are written differently are different answers.
    """
    module = importlib.import_module(VERIFIERS.get(rm_type, rm_type).partition(":")[0])
    return getattr(module, "extract_answer", None)
