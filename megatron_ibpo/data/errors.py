"""What is wrong with somebody's data."""

from __future__ import annotations

__all__ = ["DataError"]


class DataError(ValueError):
    """Prompts or a tokenizer that cannot be used; the text says what, where and what to do."""
