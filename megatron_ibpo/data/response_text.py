"""Responses as text, with the thinking that their prompts leave open."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from megatron_ibpo.basics.records import Prompt, Sample, TokenIds
from megatron_ibpo.data.tokenizer import Tokenizer, id_of
from megatron_ibpo.rewards.thinking import SPECIAL_MARKS, Response, left_open, open_at_end

_END = 64
"""Ids at the end of a prompt that are searched for a mark at its end."""
_MOST_TAILS = 256
"""Ends of prompts that are remembered; a chat template writes one or two."""


class ResponseText:
    """Returns the text of a sample for verifiers. Finds out whether its prompt leaves thinking open, as the
    templates of many reasoning models do."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._special = _special_marks(tokenizer)
        self._mark_of_tail = lru_cache(_MOST_TAILS)(self._left_open)

    def __call__(self, prompt: Prompt, sample: Sample) -> Response:
        """Return the text of a response to the prompt, or of a correction."""
        return self.of_ids(prompt, sample.prompt_token_ids, sample.token_ids)

    def of_ids(self, prompt: Prompt, prompt_ids: TokenIds, ids: TokenIds) -> Response:
        """Return the text of these ids, written after `prompt_ids`."""
        text = self._tokenizer.decode(ids)
        marked = _with_marks(ids.tolist(), self._special, self._tokenizer) if self._special else text
        return Response(text, self.open_mark(prompt, prompt_ids) + marked)

    def open_mark(self, prompt: Prompt, prompt_ids: TokenIds) -> str:
        """Return the mark of the thinking that is open where the policy begins to write; empty if none is.

        The generation prompt of the chat template decides, and not what a user or a candidate solution says
        before it. A prompt without one leaves thinking open if it ends in a mark.

        Args:
            prompt_ids: ids that were sampled from: the prompt's own, or those of a correction.
        """
        tail = prompt.tail_ids
        if len(tail) and np.array_equal(prompt_ids[-len(tail) :], tail):
            return self._mark_of_tail(tuple(tail.tolist()))
        return open_at_end(self._tokenizer.decode_all(prompt_ids[-_END:]))

    def _left_open(self, tail: tuple[int, ...]) -> str:
        return left_open(self._tokenizer.decode_all(tail))


def _special_marks(tokenizer: Tokenizer) -> dict[int, str]:
    """Return id → mark of the marks of thinking that decoding leaves out."""
    ids = {id_of(mark, tokenizer): mark for mark in SPECIAL_MARKS}
    return {token: mark for token, mark in ids.items() if token is not None and not tokenizer.decode([token])}


def _with_marks(ids: Sequence[int], marks: dict[int, str], tokenizer: Tokenizer) -> str:
    """Return the text of ids with these marks, which decoding leaves out."""
    pieces, start = list[str](), 0
    for place, token in enumerate(ids):
        if token in marks:
            pieces += [tokenizer.decode(ids[start:place]), marks[token]]
            start = place + 1
    return "".join([*pieces, tokenizer.decode(ids[start:])])
