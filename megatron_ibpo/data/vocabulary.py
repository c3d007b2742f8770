"""What credit may need to know of single tokens: their texts, and the marks of thinking."""

from __future__ import annotations

from collections.abc import Callable

from megatron_ibpo.data.tokenizer import DataError, Tokenizer, has_unknown
from megatron_ibpo.records import TokenIds

__all__ = ["thinking_marks", "token_texts"]


def token_texts(tokenizer: Tokenizer) -> Callable[[TokenIds], list[str]]:
    """A function from ids to the text of each; every id is decoded once."""
    known: dict[int, str] = {}

    def texts(ids: TokenIds) -> list[str]:
        tokens = ids.tolist()
        for token in set(tokens) - known.keys():
            known[token] = tokenizer.decode([token])
        return [known[token] for token in tokens]

    return texts


def thinking_marks(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids of <think> and of </think>.

    Raises:
        DataError: the tokenizer cannot express them.
    """
    opening, closing = (tuple(tokenizer.encode(mark)) for mark in ("<think>", "</think>"))
    if has_unknown(tokenizer, (*opening, *closing)):
        raise DataError(
            "--ibpo-strip-thinking: the tokenizer has no tokens for <think> and </think>; drop the flag"
        )
    return opening, closing
