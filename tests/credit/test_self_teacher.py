"""Self-teacher credit by hand: what the teacher is asked, and what becomes of its answers."""

from pathlib import Path

import numpy as np
import pytest

from megatron_ibpo.basics.records import Group
from megatron_ibpo.config import Config
from megatron_ibpo.run.checks import check_settings
from support.credit_cases import (
    GSPO,
    PROMPT,
    RIGHT,
    Loop,
    algorithm,
    by_kind,
    fix_last,
    group,
    ids_of,
    plain,
    response,
    token_weights,
    tokens_spent,
)

WRONG = [10, 11, 12, 14]


class Teacher:
    """Finds the tokens of every response this much likelier than the engine, whose log-probs are -.5."""

    def __init__(self, *gaps):
        self.gaps, self.asked = gaps, []

    def __call__(self, queries):
        self.asked += queries
        return [
            np.array([-0.5 + gap for gap in self.gaps[: len(q.continuation)]], np.float32) for q in queries
        ]


def taught(groups, teacher, *, preset=GSPO, max_context=100, **settings):
    config = algorithm(**preset | {"token_credit": "self-teacher"} | settings)
    return Loop(fix_last).credit(groups, config, logprobs=teacher, max_context=max_context)


def test_what_the_teacher_finds_unlikely_is_pushed_down_more():
    """a = .5 -.5 0 3 -3: m = 1 + η clip(-a, -1, 1) = .5 1.5 1 0 2, at η = ½ halfway to 1."""
    gaps = (0.5, -0.5, 0.0, 3.0, -3.0)
    full = taught([group(RIGHT, WRONG)], Teacher(*gaps))
    assert token_weights(full.sequences) == [None, pytest.approx((0.5, 1.5, 1.0, 0.0, 2.0))]
    half = taught([group(RIGHT, WRONG)], Teacher(*gaps), token_credit_eta=0.5)
    assert token_weights(half.sequences) == [None, pytest.approx((0.75, 1.25, 1.0, 0.5, 1.5))]
    assert full.metrics["teacher_gap"] == pytest.approx(0.0)
    gspo = Loop(fix_last).credit([group(RIGHT, WRONG)], algorithm(**GSPO))
    assert [s.advantage for s in full.sequences] == [s.advantage for s in gspo.sequences]


def test_the_teacher_sees_a_right_response_and_nothing_else():
    teacher = Teacher(*[0.0] * 5)
    taught(
        [group(RIGHT, WRONG, [10, 15]), group(WRONG, WRONG, index=1), group(RIGHT, RIGHT, index=2)], teacher
    )
    assert [ids_of(q.context) for q in teacher.asked] == [(*PROMPT[:2], 90, *RIGHT, PROMPT[2])] * 2
    assert [ids_of(q.continuation) for q in teacher.asked] == [(*WRONG, 2), (10, 15, 2)]


def test_tokens_that_the_policy_did_not_write_have_no_gap():
    made = group(RIGHT, WRONG)
    made = Group(made.prompt, [made.responses[0], response(WRONG, 0.0, written=[True, False, True, True])])
    credit = taught([made], Teacher(-1.0, -1.0, -1.0, -1.0, -1.0))
    assert ids_of(by_kind(credit, "response")[1].token_weights) == (2.0, 1.0, 2.0, 2.0, 2.0)


def test_a_teacher_that_agrees_changes_nothing():
    agreed = taught([group(RIGHT, WRONG)], Teacher(*[0.0] * 5)).sequences
    assert token_weights(agreed) == [None, (1.0,) * 5]


def test_a_response_whose_pass_would_not_fit_learns_as_a_whole():
    teacher = Teacher(*[-1.0] * 5)
    credit = taught([group(RIGHT, WRONG)], teacher, max_context=12)  # 3 + 1 + 4, and 5
    assert (teacher.asked, token_weights(credit.sequences)) == ([], [None, None])
    assert credit.metrics["teacher_skipped"] == 1


def test_it_multiplies_what_ibpo_says_of_tokens():
    """The mask of a corrected response keeps the token that its correction changes, the fourth."""
    from support.credit_cases import of_preset

    credit = taught([group(RIGHT, WRONG)], Teacher(*[-0.5] * 5), preset=of_preset("ibpo-mask"))
    assert ids_of(by_kind(credit, "response")[1].token_weights) == (0.0, 0.0, 0.0, 1.5, 0.0)


def test_the_meter_counts_one_forward_pass_for_each_wrong_response():
    """|x| + 2|y| = 3 + (1 + 4) + 5 for each of two, above what GSPO takes."""
    teacher, made, plainly = Teacher(*[0.0] * 5), [group(RIGHT, WRONG, WRONG)], [group(RIGHT, WRONG, WRONG)]
    credit = taught(made, teacher)
    gspo = Loop(fix_last).credit(plainly, algorithm(**GSPO))
    assert tokens_spent(made, credit, teacher.asked) - tokens_spent(plainly, gspo) == 2 * (3 + 2 * 5)
    assert credit.metrics["teacher_tokens"] == 2 * 13
    assert plain(made[0].responses) == plain(plainly[0].responses)


@pytest.mark.parametrize(
    "settings", [{"rollout_top_p": 0.9}, {"rollout_top_k": 20}, {"rollout_top_p_cycle": (1.0, 0.9)}]
)
def test_a_distribution_that_was_cut_off_is_no_student(settings):
    config = Config(algorithm=algorithm(**GSPO | {"token_credit": "self-teacher"}))
    config.model.hf_checkpoint, config.run.dry_run = Path(), True
    check_settings(config)
    for name, value in settings.items():
        setattr(config.rollout, name, value)
    with pytest.raises(ValueError, match="--token-credit self-teacher: compares"):
        check_settings(config)


def test_without_a_policy_to_ask_it_says_so():
    with pytest.raises(ValueError, match="log-probs"):
        taught([group(RIGHT, WRONG)], None)
