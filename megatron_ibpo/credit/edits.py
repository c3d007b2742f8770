"""The tokens of the wrong response that a correction changes, and U, those it keeps (ibpo step 7). A
correction says nothing about the wrong response if it is a new solution, which the rewrite test finds (ibpo
step 6), or only takes over a reference's answer, a leakage that is counted."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from megatron_ibpo.basics.records import Correction, Flags, Group, Sample, TokenIds, Weights
from megatron_ibpo.credit.operator import AnswerStart
from megatron_ibpo.credit.pairing import ComparedPairs, Part, ThinkingMarks, compared
from megatron_ibpo.edit_distance import rewrite_test, unmodified_mask


def find_edits(pairs: ComparedPairs, *, mark_insertions: bool) -> tuple[list[Flags], npt.NDArray[np.int64]]:
    """Return (for each correction the flags of the tokens of its target that it changes, its number of edits
    [corrections]), and fill in `unmodified_share`. Changed are tokens that the canonical alignment of the two
    does not keep, and those hidden from the correction prompt. The end-of-sequence id counts as kept if the
    correction has one too. With `mark_insertions`, the token before an insertion, if there is one, counts as
    changed too."""
    kept_flags, kept_of_corrected_flags, counts = unmodified_mask(*pairs.y, *pairs.y_hat, return_other=True)
    flags = zip(
        pairs.members,
        pairs.targets,
        _cut(kept_flags, pairs.y[1]),
        _cut(kept_of_corrected_flags, pairs.y_hat[1]),
        strict=True,
    )
    edits = []
    for (group, correction), target, target_flags, corrected_flags in flags:
        correction.unmodified_share = (
            np.count_nonzero(target_flags) / target_flags.size if target_flags.size else 0.0
        )
        changed = ~target_flags
        if mark_insertions:
            changed[_before_insertions(target_flags, corrected_flags)] = True
        edits.append(_in_response(changed, target, group.responses[correction.target], correction))
    return edits, counts


def gradient_mask(edits: Sequence[Flags]) -> Weights:
    """Return m_t of a response from its corrections that count: 1 where one changes the token, otherwise
    0."""
    return np.logical_or.reduce(edits).astype(np.float64)


def mark_rewrites(
    pairs: ComparedPairs,
    edits: npt.NDArray[np.int64],
    threshold: float | Literal["adaptive"],
    marks: ThinkingMarks | None,
) -> float | None:
    """Fill in the distances of every correction and the fields derived from them (`records.Correction`), and
    return α in force; None if it is adaptive and there are no corrections.

    A correction ŷ of y is a rewrite when d(y, ŷ) > α and, if it had references, d(y, ŷ) > d(ŷ, y_ref) with
    the nearest of them. d is the token edit distance between the compared parts, divided by the longer
    length. An adaptive α is the mean + 2 population standard deviations of d(y, ŷ) over all corrections of
    the step.

    Args:
        edits: number of edits of each pair, from `find_edits`.
    """
    references = [
        [compared(group.responses[i], marks).ids for i in correction.references]
        for group, correction in pairs.members
    ]
    test = rewrite_test(pairs.y, pairs.y_hat, references, threshold=threshold, edits=edits)
    for i, (_, correction) in enumerate(pairs.members):
        nearest = float(test.reference_distance[i])
        correction.distance = float(test.distance[i])
        correction.reference_distance = nearest if math.isfinite(nearest) else None
        correction.beyond_threshold = bool(test.distance[i] > test.threshold)
        correction.rewritten = bool(test.rewritten[i])
    return None if math.isnan(test.threshold) else test.threshold


def _cut(flags: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> list[Flags]:
    all_flags, bounds = flags.view(bool), offsets.tolist()
    return [all_flags[first:last] for first, last in pairwise(bounds)]


def _before_insertions(target_flags: Flags, corrected_flags: Flags) -> npt.NDArray[np.intp]:
    """Return the indices of kept tokens after which the correction inserts tokens and the target has none."""
    ours, theirs = np.flatnonzero(target_flags), np.flatnonzero(corrected_flags)
    gap_here = np.diff(ours, append=len(target_flags)) - 1
    gap_there = np.diff(theirs, append=len(corrected_flags)) - 1
    return ours[(gap_here == 0) & (gap_there > 0)]


def _in_response(changed: Flags, part: Part, response: Sample, correction: Correction) -> Flags:
    """Map the flags of a part's tokens to those of the whole response."""
    flags = np.ones(len(response.token_ids), bool)
    flags[slice(len(changed)) if part.places is None else part.places] = changed
    if response.finish_reason == "stop":
        flags[-1] = correction.response.finish_reason != "stop"
    return flags


OWN_SHARE = 0.1
"""Share of a derivation's tokens below which a correction's own part does not count as a derivation."""


def note_reference_leakage(
    groups: Sequence[Group], answer_start: AnswerStart, marks: ThinkingMarks | None
) -> None:
    """Fill in `Correction.reference_leakage`.

    The derivation of a solution is the compared part before its final answer. A correction leaks if it is
    correct, a reference shown to it is correct, and either

    - its derivation keeps every token of the wrong response's and adds at most OWN_SHARE as many: nothing was
      repaired, only the answer changed; or
    - its derivation has less than OWN_SHARE of the tokens of the shortest correct reference's: there is none.

    A correction is never marked if it has no final answer, or if the solution it is compared with has none.
    """
    for group in groups:
        for correction in group.corrections:
            correction.reference_leakage = _leaks(group, correction, answer_start, marks)


def _leaks(
    group: Group, correction: Correction, answer_start: AnswerStart, marks: ThinkingMarks | None
) -> bool:
    references = [group.responses[i] for i in correction.references if group.responses[i].correct]
    if not correction.response.correct or not references:
        return False

    def derivation(sample: Sample) -> TokenIds | None:
        ids = compared(sample, marks).ids
        start = answer_start(group.prompt, ids)
        return None if start is None else ids[:start]

    corrected = derivation(correction.response)
    if corrected is None:
        return False
    wrong = derivation(group.responses[correction.target])
    if wrong is not None and _only_adds(corrected, wrong):
        return True
    reference_lengths = [len(ids) for reference in references if (ids := derivation(reference)) is not None]
    return bool(reference_lengths) and len(corrected) < OWN_SHARE * min(reference_lengths)


def _only_adds(corrected: TokenIds, wrong: TokenIds) -> bool:
    """Return whether a derivation keeps every token of the wrong one and adds next to none."""
    if not 0 <= len(corrected) - len(wrong) <= OWN_SHARE * len(wrong):
        return False
    kept_flags, _ = unmodified_mask([wrong], None, [corrected], None)
    return bool(kept_flags.all())
