"""When corrections pay: the law by hand, what a step and a run tell of it, and the points of a study."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ibpo.basics.records import Group, TrainSequence
from megatron_ibpo.credit import find_operator
from megatron_ibpo.credit.break_even import composition_counts, learns_from_corrections, skill_needed
from megatron_ibpo.models import forward_flops, read_hf_config
from megatron_ibpo.report.correction_value import break_even, break_even_lines
from megatron_ibpo.run.cost import CostMeter
from megatron_ibpo.run.settings import parse_config
from megatron_ibpo.study.curves import break_even_figure, break_even_points
from megatron_ibpo.study.run_results import RunResult
from support.credit_cases import correction, prompt, response
from support.paths import ROOT

DENSE = read_hf_config(ROOT / "examples/tiny_qwen3")


@pytest.mark.parametrize(
    ("resample", "price", "first", "needed"),
    [
        (0.5, 2, False, 1.0),
        (0.5, 2, True, 0.75),  # two tries fail together in a quarter of the cases
        (0.1, 3, False, 0.3),
        (0.1, 3, True, 0.271),  # 1 - .9³
        (0.6, 3, False, 1.8),  # never
        (0.6, 3, True, 0.936),
        (0.4, 1, False, 0.4),  # at the price of a response corrections only have to be better
        (0.4, 1, True, 0.4),
    ],
)
def test_the_skill_from_which_on_corrections_pay(resample, price, first, needed):
    assert skill_needed(resample, price, first=first) == pytest.approx(needed)


@given(p=st.floats(0.01, 0.99), q=st.floats(0.01, 0.99), price=st.floats(1, 6), spent=st.floats(0.5, 50))
def test_the_law_of_first_texts_says_which_way_finds_one_more_often_whatever_is_spent(p, q, price, spent):
    by_corrections, by_responses = 1 - (1 - q) ** (spent / price), 1 - (1 - p) ** spent
    if abs(q - skill_needed(p, price, first=True)) > 1e-6 and max(by_corrections, by_responses) < 1 - 1e-9:
        assert (q > skill_needed(p, price, first=True)) == (by_corrections > by_responses)


def scored(correct):
    return response([7, 13 if correct else 8], float(correct))


def group_of(outcomes, corrected=()):
    wrong = [place for place, correct in enumerate(outcomes) if not correct]
    corrections = [correction(i, scored(ok)) for i, ok in zip(wrong, corrected, strict=False)]
    return Group(prompt(), [scored(correct) for correct in outcomes], corrections)


def test_responses_and_corrections_are_counted_by_who_else_of_the_group_is_correct():
    groups = [
        group_of([1, 0, 0, 0], [1, 0, 0]),  # the correct one is alone among wrong ones, the others are not
        group_of([0, 0, 0, 0], [1, 0, 0, 0]),
        group_of([1, 1, 0, 0], [1, 1]),
    ]
    assert composition_counts(groups) == {
        "responses_alone": 5, "responses_alone_correct": 1,
        "corrections_alone": 4, "corrections_alone_correct": 1,
        "responses_accompanied": 7, "responses_accompanied_correct": 2,
        "corrections_accompanied": 5, "corrections_accompanied_correct": 3,
    }  # fmt: skip


def test_what_was_not_scored_counts_nowhere():
    group = group_of([0, 0, 0], [1, 1, 1])
    group.responses[0].reward = group.corrections[0].response.reward = None
    counts = composition_counts([group])
    assert (counts["responses_alone"], counts["corrections_alone"]) == (2, 2)


def test_where_all_prompts_are_equally_hard_composition_tells_nothing():
    """Of three responses that are right or wrong with the same chance, all eight outcomes once: half of them
    are right whatever the others are."""
    counts = composition_counts([group_of(outcomes) for outcomes in product([0, 1], repeat=3)])
    assert counts["responses_alone_correct"] / counts["responses_alone"] == 1 / 2
    assert counts["responses_accompanied_correct"] / counts["responses_accompanied"] == 1 / 2


def trained(sample, kind):
    ids = sample.token_ids
    return TrainSequence(sample.prompt_token_ids, ids, np.ones(len(ids), bool), 1.0, 1.0, 0, 0, 0, kind)


def test_the_metered_price_is_that_of_sampling_and_update():
    """Two responses of 2 tokens to one prompt of 3, and a correction of 4 to a prompt of 9."""
    first, second = (response([7, 8], 0.0, "length", prompt=[1, 2, 3]) for _ in range(2))
    corrected = response([7, 8, 9, 13], 1.0, "length", prompt=[*range(9)])
    group = Group(prompt(), [first, second], [correction(0, corrected)])
    sequences = [trained(first, "response"), trained(second, "response"), trained(corrected, "correction")]
    f = [forward_flops(DENSE, n) for n in range(14)]
    of_response = (f[3] + 2 * (f[5] - f[3]) + 2 * 3 * f[5]) / 2
    meter = CostMeter(DENSE, 1)
    assert meter.correction_price([group], sequences) == pytest.approx((f[13] + 3 * f[13]) / of_response)
    assert meter.correction_price([group], sequences[:2]) == pytest.approx(f[13] / of_response)
    assert meter.correction_price([Group(prompt(), [first, second])], sequences) is None
    assert meter.spent.flops == 0  # asking costs nothing


def step(price=3.0, **counts):
    names = [
        f"{kind}_{where}{correct}"
        for kind in ("responses", "corrections")
        for where in ("alone", "accompanied")
        for correct in ("", "_correct")
    ]
    row = {"kind": "step", "correction_price": price, **dict.fromkeys(names, 0.0), **counts}
    return row | {"corrections": row["corrections_alone"] + row["corrections_accompanied"]}


RARE = {"responses_alone": 1000, "responses_alone_correct": 50, "corrections_alone": 400}
FREQUENT = {
    "responses_accompanied": 1000,
    "responses_accompanied_correct": 600,
    "corrections_accompanied": 300,
}


def test_a_run_says_where_its_corrections_stand():
    found = break_even(
        [
            step(2.0, **RARE, corrections_alone_correct=200),
            step(4.0, **FREQUENT, corrections_accompanied_correct=150, corrections_alone=-100),
            {"kind": "step", "reward": 0.5},  # without corrections
        ]
    )
    assert found["price"] == pytest.approx((2 * 400 + 4 * 200) / 600)
    found = break_even(
        [step(**RARE, **FREQUENT, corrections_alone_correct=200, corrections_accompanied_correct=150)]
    )
    assert found["alone"]["needed"] == pytest.approx(1 - 0.95**3)
    assert found["accompanied"]["needed"] == pytest.approx(1.8)
    assert (found["alone"]["pays"], found["accompanied"]["pays"]) == (True, False)
    assert found["alone"]["skill"]["low"] == pytest.approx(0.451, abs=1e-3)
    assert break_even_lines(found) == [
        "A correction costs as much as 3.0 responses.",
        "If no other response to the prompt is right, 50% of corrections and 5% of retries succeed. "
        "Corrections are worth their cost from 14% on, so these are.",
        "If another response to the prompt is right, 50% of corrections and 60% of retries succeed. "
        "Corrections cannot be worth their cost where retries succeed so often.",
    ]


def test_figures_that_leave_doubt_are_called_doubtful():
    found = break_even(
        [
            step(
                responses_alone=40,
                responses_alone_correct=4,
                corrections_alone=20,
                corrections_alone_correct=5,
            )
        ]
    )
    assert found["alone"]["pays"] is None
    assert break_even_lines(found)[-1].endswith(
        "worth their cost from 27% on; there were too few to tell whether these are."
    )
    assert "accompanied" not in found


def test_a_run_without_corrections_says_nothing():
    assert break_even([{"kind": "step", "reward": 0.5}]) is None
    assert break_even_lines(None) == []


def test_the_points_of_a_study_lie_on_the_right_side_of_the_curve():
    found = break_even(
        [step(**RARE, **FREQUENT, corrections_alone_correct=200, corrections_accompanied_correct=150)]
    )
    runs = [
        RunResult(method, 0, {}, 8, 1, {}, [], 0.0, [], 8.0, {}, {}, task="sums", break_even=of_run)
        for method, of_run in (("ibpo", found), ("gspo", None))
    ]
    alone, accompanied = break_even_points(runs)
    assert (alone.method, alone.composition, accompanied.composition) == ("ibpo", "alone", "accompanied")
    assert alone.margin == pytest.approx(0.5 - (1 - 0.95**3))
    assert accompanied.margin == pytest.approx(0.5 - 1.8)
    left, _ = break_even_figure([alone, accompanied]).axes
    x, y = next(line for line in left.lines if "break-even" in str(line.get_label())).get_data()
    assert np.interp(0.05, x, y) == pytest.approx(1 - 0.95**3, abs=1e-3)


@pytest.mark.parametrize(
    ("flags", "learns"),
    [
        (["--advantage-estimator", "ibpo"], True),
        (["--advantage-estimator", "ibpo-shaping-only"], False),
        (["--config", str(ROOT / "examples/algorithms/ibpo_plain_prompt.yaml")], True),
    ],
)
def test_the_law_is_asked_only_where_texts_of_corrections_are_trained_on(flags, learns):
    assert learns_from_corrections(find_operator(parse_config(flags).algorithm)) is learns
