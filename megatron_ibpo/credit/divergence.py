"""Credit by divergence: a wrong response learns where it leaves the prefix that it shares with a right one.

Samples of one prompt form a tree. Where a wrong response parts from a right one of its group, something was
decided; what the two share cannot tell right from wrong. Ours; credit by common prefixes as in SPO
(arXiv 2505.23564) and OAR (arXiv 2601.07408), without their further samples and passes: the price is 1.00
times the tokens of GSPO.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from megatron_ibpo.basics.records import Group, Sample, TokenIds
from megatron_ibpo.credit.operator import CreditContext, TokenTexts, TokenWeights, lent
from megatron_ibpo.credit.spans import split_spans
from megatron_ibpo.credit.token_credit import Advantages, TokenFactors, on_wrong_responses

Step = tuple[int, int, str | None]
"""(first token, token after the last, text as it is compared); the end-of-sequence id is one without text."""

_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?")
_AROUND_SIGNS = re.compile(r"(?:(?<!\s)\s++)?+([^\w\s])\s*+")


def divergence_cut(groups: Sequence[Group], advantages: Advantages, context: CreditContext) -> TokenFactors:
    """m_t = 1 from the place on where the response leaves the longest prefix that it shares with a correct
    one of its group, and 0 before it.

    So for wrong responses with an advantage below 0 and a correct sibling; the others learn as a whole. One
    that is all prefix, such as one that was cut off, learns nothing.

    Raises:
        ValueError: --token-credit-unit step, and the context has no texts of tokens.
    """
    return _between(groups, advantages, context, lambda response, first, _: (first, len(response.token_ids)))


def divergence_window(
    groups: Sequence[Group], advantages: Advantages, context: CreditContext
) -> TokenFactors:
    """As `divergence_cut`, and 1 at the first --token-credit-tokens tokens alone that the policy wrote from
    that place on; by steps, at the step that begins there."""
    if context.algorithm.token_credit_unit == "step":
        return _between(groups, advantages, context, lambda _, first, last: (first, last))
    width = context.algorithm.token_credit_tokens

    def window(response: Sample, first: int, _: int) -> tuple[int, int]:
        written = np.flatnonzero(response.loss_mask[first:])[:width]
        return first, first + (int(written[-1]) + 1 if len(written) else 0)

    return _between(groups, advantages, context, window)


def shared_tokens(response: Sample, others: Sequence[Sample]) -> int:
    """The length of the longest prefix that the response shares with one of the others."""
    return max(_common_tokens(response.token_ids, other.token_ids) for other in others)


def normalised(text: str) -> str:
    """What two steps are compared by: numbers without thousands separators, leading zeros and zeros at the
    end of their fraction; one space between words, none around signs."""
    return " ".join(_AROUND_SIGNS.sub(r"\1", _NUMBER.sub(_plain_number, text)).split())


def _between(
    groups: Sequence[Group],
    advantages: Advantages,
    context: CreditContext,
    bounds: Callable[[Sample, int, int], tuple[int, int]],
) -> TokenFactors:
    """
    Args:
        bounds: (response, first token of the step in which it diverges, token after that step) → the tokens
            [first, last) that learn.
    """
    place = _step_place(context) if context.algorithm.token_credit_unit == "step" else _token_place

    def weigh(group: Group, index: int, advantage: float) -> TokenWeights:
        if advantage >= 0:
            return None
        response = group.responses[index]
        correct = [other for other in group.responses if other.correct]
        first, last = bounds(response, *place(response, correct))
        weights = np.zeros(len(response.token_ids))
        weights[first:last] = 1.0
        return weights

    return TokenFactors(on_wrong_responses(groups, advantages, weigh))


def _token_place(response: Sample, correct: Sequence[Sample]) -> tuple[int, int]:
    """[first, last) of the first token that no correct response has after the same tokens."""
    shared = shared_tokens(response, correct)
    return shared, shared + 1


def _common_tokens(own: TokenIds, other: TokenIds) -> int:
    length = min(len(own), len(other))
    differing = np.flatnonzero(own[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


def _step_place(context: CreditContext) -> Callable[[Sample, Sequence[Sample]], tuple[int, int]]:
    """Gives [first, last) of the first step that no correct response has after the same steps."""
    texts = lent(context.vocabulary.token_texts, "texts of tokens")
    steps = cache(lambda sample: _steps(sample, texts))

    def place(response: Sample, correct: Sequence[Sample]) -> tuple[int, int]:
        own, end = steps(response), len(response.token_ids)
        shared = max(_common_steps(own, steps(other)) for other in correct)
        return own[shared][:2] if shared < len(own) else (end, end)

    return place


def _steps(sample: Sample, texts: TokenTexts) -> list[Step]:
    pieces = texts(sample.content_ids)
    steps: list[Step] = [
        (first, last, normalised("".join(pieces[first:last]))) for first, last in split_spans(pieces)
    ]
    if sample.finish_reason == "stop":
        steps.append((len(pieces), len(pieces) + 1, None))
    return steps


def _common_steps(own: Sequence[Step], other: Sequence[Step]) -> int:
    pairs = zip(own, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a[2] != b[2]), min(len(own), len(other)))


def _plain_number(match: re.Match[str]) -> str:
    whole, _, fraction = match[0].replace(",", "").partition(".")
    fraction = fraction.rstrip("0")
    return (whole.lstrip("0") or "0") + (f".{fraction}" if fraction else "")
