"""Steps of a written solution: equations, calculations, sentences, lines."""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from megatron_ibpo.basics.records import Sample, TokenIds

_ENDS = re.compile(
    r"\n+"
    r"|(?<![.!?;])[.!?;]++(?=\s|$)"  # end of a sentence; not a decimal point
    r"|=\s*+(?:[-+]\s*+)?(?:[$€£]\s*+)?\d++(?:[.,]\d++)*+"  # end of a calculation: its result
)


def split_spans(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Cut a solution into spans [first, last) of tokens that follow each other without a gap.

    A span ends with a line, with a sentence, or with the result behind an equals sign, so `6+1=7-8=-1#-1`
    becomes `6+1=7`, `-8=-1`, `#-1`. A piece with neither letter nor digit belongs to the span before it. A
    token in which a span ends belongs to that span whole.

    Args:
        texts: the text of each token.
    """
    text = "".join(texts)
    ends_of_tokens = list(accumulate(map(len, texts)))
    cuts = {bisect_left(ends_of_tokens, match.end()) + 1 for match in _ENDS.finditer(text)}
    bounds = sorted({0, len(texts), *(cut for cut in cuts if cut < len(texts))})
    spans: list[tuple[int, int]] = []
    for first, last in pairwise(bounds):
        if spans and not any(c.isalnum() for piece in texts[first:last] for c in piece):
            spans[-1] = (spans[-1][0], last)
        else:
            spans.append((first, last))
    return spans


def written_spans(response: Sample, texts: Callable[[TokenIds], list[str]]) -> list[tuple[int, int]]:
    """Return the spans of a response's content in which the policy wrote a token, so none of only tool
    output."""
    spans = split_spans(texts(response.content_ids))
    return [(first, last) for first, last in spans if response.loss_mask[first:last].any()]
