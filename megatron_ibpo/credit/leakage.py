"""Detection of corrections that only take over a reference's answer. A right answer after a wrong derivation,
or after none, says nothing about where the wrong response went wrong."""

from collections.abc import Sequence

from megatron_ibpo.basics.records import Correction, Group, Prompt, Sample, TokenIds
from megatron_ibpo.credit.compared_parts import ThinkingMarks, compared
from megatron_ibpo.credit.operator import AnswerStart
from megatron_ibpo.edit_distance import unmodified_mask

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
        return _derivation(group.prompt, compared(sample, marks).ids, answer_start)

    corrected = derivation(correction.response)
    if corrected is None:
        return False
    wrong = derivation(group.responses[correction.target])
    if wrong is not None and _only_adds(corrected, wrong):
        return True
    reference_lengths = [len(ids) for reference in references if (ids := derivation(reference)) is not None]
    return bool(reference_lengths) and len(corrected) < OWN_SHARE * min(reference_lengths)


def _derivation(prompt: Prompt, ids: TokenIds, answer_start: AnswerStart) -> TokenIds | None:
    start = answer_start(prompt, ids)
    return None if start is None else ids[:start]


def _only_adds(corrected: TokenIds, wrong: TokenIds) -> bool:
    """Return whether a derivation keeps every token of the wrong one and adds next to none."""
    if not 0 <= len(corrected) - len(wrong) <= OWN_SHARE * len(wrong):
        return False
    kept_flags, _ = unmodified_mask([wrong], None, [corrected], None)
    return bool(kept_flags.all())
