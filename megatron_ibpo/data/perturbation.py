"""Prompt perturbation: the same question asked in several ways, so that a group's responses differ more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_ibpo.data.tokenizer import DataError, Tokenizer, has_unknown
from megatron_ibpo.records import Prompt, TokenIds, token_ids

__all__ = ["PromptSuffixes"]


class PromptSuffixes:
    """Appends one of several texts to the user's content, in turn over the samples of a group."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]):
        """
        Args:
            texts: an empty one leaves the prompt as it is; without any, all prompts are left so.

        Raises:
            DataError: the tokenizer cannot express one of them.
        """
        self._suffixes = [token_ids(tokenizer.encode(text) if text else []) for text in texts]
        for text, ids in zip(texts, self._suffixes, strict=True):
            if has_unknown(tokenizer, ids):
                raise DataError(
                    f"--rollout-prompt-suffixes: the tokenizer has no tokens for some of {text!r}; use "
                    "another text"
                )

    @property
    def longest(self) -> int:
        """Tokens that a prompt grows by at most."""
        return max(map(len, self._suffixes), default=0)

    def __call__(self, prompt: Prompt, sample: int) -> TokenIds:
        """The prompt of sample number `sample`."""
        if not self._suffixes:
            return prompt.token_ids
        suffix = self._suffixes[sample % len(self._suffixes)]
        if not len(suffix):
            return prompt.token_ids
        return np.concatenate([prompt.head_ids, suffix, prompt.tail_ids])
