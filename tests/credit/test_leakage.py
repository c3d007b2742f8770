"""Corrections that take over a reference's answer and nothing else are flagged, and no others."""

import pytest

from support.credit_cases import Loop, algorithm, group

ANSWER = 70
"""Token before the final answer, which is 13 where it is right."""


def answer_start(prompt, ids):
    marks = [place for place, token in enumerate(ids.tolist()) if token == ANSWER]
    return marks[-1] + 1 if marks else None


def leaked(wrong, right, corrected, start=answer_start):
    """(the flag of the correction of `wrong`, the step's credit); `right` is its reference."""
    groups = [group(wrong, right)]
    loop = Loop(lambda prompt_ids: corrected)
    credit = loop.credit(groups, algorithm(), vocabulary={"answer_start": start})
    return groups[0].corrections[0].reference_leakage, credit


STEPS = list(range(20, 40))
WRONG = [*STEPS, ANSWER, 14]
RIGHT = [*STEPS[:10], *range(40, 50), ANSWER, 13]


@pytest.mark.parametrize(
    ("corrected", "leaks"),
    [
        ([*STEPS, ANSWER, 13], True),  # nothing but the answer is another one
        ([*STEPS, 60, 61, ANSWER, 13], True),  # "so it is"
        ([*STEPS, 60, 61, 62, ANSWER, 13], False),  # more than a tenth is its own
        ([*STEPS[:19], 40, ANSWER, 13], False),  # the last step is repaired
        ([ANSWER, 13], True),  # no derivation at all
        ([20, ANSWER, 13], True),
        ([20, 21, ANSWER, 13], False),  # a tenth of the reference's
        (RIGHT, False),  # a copy is a derivation; it is measured as such
        ([*STEPS, ANSWER, 15], False),  # wrong itself
        ([*STEPS, 13], False),  # says no answer
    ],
)
def test_what_leaks(corrected, leaks):
    flag, credit = leaked(WRONG, RIGHT, corrected)
    assert flag is leaks
    assert credit.metrics["reference_leakage_rate"] == float(leaks)


def test_no_reference_has_an_answer_to_give_away_when_none_is_right():
    flag, _ = leaked(WRONG, [*RIGHT[:-1], 14], [*STEPS, ANSWER, 13])
    assert not flag


def test_an_answer_that_was_cut_off_is_completed_and_not_replaced():
    flag, _ = leaked(STEPS, RIGHT, [*STEPS, ANSWER, 13])
    assert not flag


def test_the_flag_changes_no_credit_and_says_nothing_where_answers_are_unknown():
    _, flagged = leaked(WRONG, RIGHT, [*STEPS, ANSWER, 13])
    flag, unknown = leaked(WRONG, RIGHT, [*STEPS, ANSWER, 13], start=None)
    assert not flag
    assert "reference_leakage_rate" not in unknown.metrics
    assert [s.advantage for s in flagged.sequences] == [s.advantage for s in unknown.sequences]
