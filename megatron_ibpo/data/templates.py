"""Prompts made from a prompt's token ids: the correction prompt x̃ = (x; y, references) (ibpo step 4), and
the same question asked in several ways (prompt perturbation)."""

from collections.abc import Sequence

import numpy as np

from megatron_ibpo.basics.records import Prompt, TokenIds, token_ids
from megatron_ibpo.data.tokenizer import DataError, Tokenizer, has_unknown

_NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")


def correction_instruction(num_candidates: int) -> str:
    """Return the instruction to correct K candidate solutions; K=2 is the paper's wording."""
    if num_candidates == 1:
        return (
            "You are given a candidate solution to the problem. Check it step by step, identify any errors, "
            "and then produce a corrected solution and final answer."
        )
    in_words = dict(enumerate(_NUMBERS, start=2)).get(num_candidates, str(num_candidates))
    return (
        f"You are given {in_words} candidate solutions to the same problem. Compare them step by step, "
        "identify any inconsistencies or errors, and then produce a corrected solution and final answer."
    )


def candidate_heading(number: int) -> str:
    """Return the heading of the candidate solution `number`, counted from 1."""
    return f"Candidate solution {number}: "


class CorrectionTemplate:
    """A builder of correction prompts: the prompt up to the end of its user content, the candidates (the
    wrong response first), the instruction, and the prompt's own generation prompt.

    Candidates are inserted as the sampled ids, so nothing is decoded and encoded again.
    """

    def __init__(self, tokenizer: Tokenizer, num_candidates: int):
        """
        Args:
            num_candidates: K, the wrong response included; smaller prompts can be built too.

        Raises:
            DataError: the tokenizer has no tokens for the template's words.
        """
        counts = range(1, num_candidates + 1)
        self._headings = {n: self._encode(tokenizer, "\n" + candidate_heading(n)) for n in counts}
        self._instructions = {
            n: self._encode(tokenizer, "\n" + correction_instruction(n)) for n in {1, num_candidates}
        }
        self._newline = token_ids(tokenizer.encode("\n"))

    @staticmethod
    def _encode(tokenizer: Tokenizer, text: str) -> TokenIds:
        ids = token_ids(tokenizer.encode(text))
        if not len(ids) or has_unknown(tokenizer, ids):
            raise DataError(
                f"the tokenizer has no tokens for the correction prompt's text {text!r}; "
                "use another tokenizer or another --ibpo-k"
            )
        return ids

    def __call__(self, prompt: Prompt, target_ids: TokenIds, references: Sequence[TokenIds]) -> TokenIds:
        """Return the token ids of x̃.

        Args:
            target_ids: the wrong response, without its end-of-sequence id.
            references: the K-1 references in drawn order, without end-of-sequence ids; may be empty (K=1).
        """
        candidates = (target_ids, *references)
        parts = [prompt.head_ids]
        for number, candidate in enumerate(candidates, start=1):
            parts += [self._headings[number], candidate]
        parts += [self._instructions[len(candidates)]]
        parts += [prompt.tail_ids if len(prompt.tail_ids) else self._newline]
        return np.concatenate(parts)


class PromptSuffixes:
    """Appends one of several texts to the user's content, in turn over the samples of a group, to make them
    more diverse."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]):
        """
        Args:
            texts: an empty one leaves the prompt unchanged; without texts, all prompts are unchanged.

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
        """Largest number of tokens added to a prompt."""
        return max(map(len, self._suffixes), default=0)

    def __call__(self, prompt: Prompt, sample: int) -> TokenIds:
        """Return the prompt of sample number `sample`."""
        if not self._suffixes:
            return prompt.token_ids
        suffix = self._suffixes[sample % len(self._suffixes)]
        if not len(suffix):
            return prompt.token_ids
        return np.concatenate([prompt.head_ids, suffix, prompt.tail_ids])
