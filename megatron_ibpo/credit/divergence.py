"""Credit by divergence: a wrong response learns at the place where it leaves the prefix shared with a right
one of its group, since what the two share cannot tell right from wrong. Our own method, with credit by common
prefixes as in SPO (arXiv 2505.23564) and OAR (arXiv 2601.07408), but without their extra samples and passes.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, ClassVar, Literal

import numpy as np

from megatron_ibpo.basics.records import Group, Sample, shared_length
from megatron_ibpo.config import COUNT
from megatron_ibpo.credit.operator import CreditContext, TokenTexts, TokenWeights, require_tool
from megatron_ibpo.credit.pairing import split_spans
from megatron_ibpo.credit.token_credit import Advantages, TokenFactors, on_wrong_responses

Unit = Literal["token", "step"]
Step = tuple[int, int, str | None]
"""(first token, token after the last, text for comparison). The end-of-sequence id is a step without text."""

_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?")
_AROUND_SIGNS = re.compile(r"(?:(?<!\s)\s++)?+([^\w\s])\s*+")


@dataclass(frozen=True)
class DivergenceCut:
    """m_t = 1 from the place where the response leaves the longest prefix that it shares with a correct one
    of its group, and 0 before it.

    Applies to wrong responses with an advantage below 0 and a correct sibling; the others keep all tokens. A
    response that is all prefix, such as a truncated one, learns nothing.

    A call raises ValueError under --token-credit-unit step if the context has no texts of tokens.
    """

    token_credit_unit: Unit = "token"
    """Unit in which responses are compared. "token": the first token that differs. "step": the first step (a
    line, a sentence, a calculation) that differs in more than white space and the spelling of numbers, for
    prose; the window of divergence-window is then that step."""

    chooses_tokens: ClassVar[bool] = True

    def __call__(
        self, groups: Sequence[Group], advantages: Advantages, context: CreditContext
    ) -> TokenFactors:
        place = _step_place(context) if self.token_credit_unit == "step" else _token_place

        def weigh(group: Group, index: int, advantage: float) -> TokenWeights:
            if advantage >= 0:
                return None
            response = group.responses[index]
            correct = [sibling for sibling in group.responses if sibling.correct]
            first, last = self._learned(response, *place(response, correct))
            weights = np.zeros(len(response.token_ids))
            weights[first:last] = 1.0
            return weights

        return TokenFactors(
            on_wrong_responses(groups, advantages, weigh),
            note="from the place where it leaves the longest prefix shared with a right response",
        )

    def _learned(self, response: Sample, first: int, last: int) -> tuple[int, int]:
        """Return the tokens [first, last) that learn in a response that diverges in these."""
        return first, len(response.token_ids)


@dataclass(frozen=True)
class DivergenceWindow(DivergenceCut):
    """`DivergenceCut` with m_t = 1 only at the first --token-credit-tokens tokens that the policy wrote from
    that place on. By steps, only at the step that begins there."""

    token_credit_tokens: Annotated[int, COUNT] = 2
    """w, the width of the window. 2 was the best of those tried on the tiny tasks."""

    def _learned(self, response: Sample, first: int, last: int) -> tuple[int, int]:
        if self.token_credit_unit == "step":
            return first, last
        written = np.flatnonzero(response.loss_mask[first:])[: self.token_credit_tokens]
        return first, first + (int(written[-1]) + 1 if len(written) else 0)


def shared_tokens(response: Sample, siblings: Sequence[Sample]) -> int:
    """Return the length of the longest prefix that the response shares with one of the others."""
    return max(shared_length(response.token_ids, sibling.token_ids) for sibling in siblings)


def normalised(text: str) -> str:
    """Return the form in which two steps are compared: numbers without thousands separators, leading zeros
    and trailing zeros of their fraction; one space between words, none around signs."""
    return " ".join(_AROUND_SIGNS.sub(r"\1", _NUMBER.sub(_plain_number, text)).split())


def _token_place(response: Sample, correct: Sequence[Sample]) -> tuple[int, int]:
    """Return [first, last) of the first token that no correct response has after the same tokens."""
    shared = shared_tokens(response, correct)
    return shared, shared + 1


def _step_place(context: CreditContext) -> Callable[[Sample, Sequence[Sample]], tuple[int, int]]:
    """Return a function for [first, last) of the first step that no correct response has after the same."""
    texts = require_tool(context.vocabulary.token_texts, "texts of tokens")
    steps = cache(lambda sample: _steps(sample, texts))

    def place(response: Sample, correct: Sequence[Sample]) -> tuple[int, int]:
        response_steps, end = steps(response), len(response.token_ids)
        shared = max(_common_steps(response_steps, steps(sibling)) for sibling in correct)
        return response_steps[shared][:2] if shared < len(response_steps) else (end, end)

    return place


def _steps(sample: Sample, texts: TokenTexts) -> list[Step]:
    pieces = texts(sample.content_ids)
    steps: list[Step] = [
        (first, last, normalised("".join(pieces[first:last]))) for first, last in split_spans(pieces)
    ]
    if sample.finish_reason == "stop":
        steps.append((len(pieces), len(pieces) + 1, None))
    return steps


def _common_steps(first: Sequence[Step], second: Sequence[Step]) -> int:
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a[2] != b[2]), min(len(first), len(second)))


def _plain_number(match: re.Match[str]) -> str:
    integer, _, fraction = match[0].replace(",", "").partition(".")
    fraction = fraction.rstrip("0")
    return (integer.lstrip("0") or "0") + (f".{fraction}" if fraction else "")
