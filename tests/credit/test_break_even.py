"""When corrections pay: the law by hand, what a step and a run tell of it, and the points of a study."""

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


@given(p=st.floats(0.01, 0.99), q=st.floats(0.01, 0.99), price=st.floats(1, 6), spent=st.floats(0.5, 50))
def test_the_law_says_which_way_finds_a_first_text_sooner_whatever_is_spent(p, q, price, spent):
    needed = skill_needed(p, price, first=True)
    by_corrections, by_responses = 1 - (1 - q) ** (spent / price), 1 - (1 - p) ** spent
    if abs(q - needed) > 1e-6 and max(by_corrections, by_responses) < 1 - 1e-9:
        assert (q > needed) == (by_corrections > by_responses)


def group_of(outcomes, corrected=()):
    responses, answers = ([response([7], float(ok)) for ok in oks] for oks in (outcomes, corrected))
    wrong = [place for place, correct in enumerate(outcomes) if not correct]
    return Group(prompt(), responses, [correction(i, own) for i, own in zip(wrong, answers, strict=False)])


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
    unscored = group_of([0, 0, 0], [1, 1, 1])
    unscored.responses[0].reward = unscored.corrections[0].response.reward = None
    counts = composition_counts([unscored])
    assert (counts["responses_alone"], counts["corrections_alone"]) == (2, 2)


def test_the_metered_price_is_that_of_sampling_and_update():
    """Two responses of 2 tokens to one prompt of 3, and a correction of 4 to a prompt of 9."""
    first, second = (response([7, 8], 0.0, "length", prompt=[1, 2, 3]) for _ in range(2))
    corrected = response([7, 8, 9, 13], 1.0, "length", prompt=[*range(9)])
    group = Group(prompt(), [first, second], [correction(0, corrected)])
    sequences = [
        TrainSequence(s.prompt_token_ids, s.token_ids, s.loss_mask, 1.0, 1.0, 0, 0, 0, kind)
        for s, kind in ((first, "response"), (second, "response"), (corrected, "correction"))
    ]
    shape = read_hf_config(ROOT / "examples/tiny_qwen3")
    f = [forward_flops(shape, n) for n in range(14)]
    of_response = (f[3] + 2 * (f[5] - f[3]) + 2 * 3 * f[5]) / 2
    meter = CostMeter(shape, 1)
    assert meter.correction_price([group], sequences) == pytest.approx((f[13] + 3 * f[13]) / of_response)
    assert meter.correction_price([group], sequences[:2]) == pytest.approx(f[13] / of_response)
    assert meter.correction_price([Group(prompt(), [first, second])], sequences) is None
    assert meter.spent.flops == 0  # asking costs nothing


def step(price=3.0, **tried):
    """A step's row: of responses_alone=(20, 3) and so on, 3 of 20 were right."""
    row = {"kind": "step", "correction_price": price}
    for name in ("responses_alone", "responses_accompanied", "corrections_alone", "corrections_accompanied"):
        row[name], row[f"{name}_correct"] = tried.get(name, (0.0, 0.0))
    return row | {"corrections": row["corrections_alone"] + row["corrections_accompanied"]}


RARE = step(2.0, responses_alone=(1000, 50), corrections_alone=(400, 200))
FREQUENT = step(5.0, responses_accompanied=(1000, 600), corrections_accompanied=(200, 100))
NO_CORRECTIONS = {"kind": "step", "reward": 0.5}


def test_a_run_says_where_its_corrections_stand():
    found = break_even([RARE, FREQUENT, NO_CORRECTIONS])
    assert found["price"] == pytest.approx((2 * 400 + 5 * 200) / 600)
    assert found["alone"]["needed"] == pytest.approx(1 - 0.95**3)
    assert found["accompanied"]["needed"] == pytest.approx(1.8)
    assert (found["alone"]["pays"], found["accompanied"]["pays"]) == (True, False)
    assert found["alone"]["skill"]["low"] == pytest.approx(0.451, abs=1e-3)
    price, alone, accompanied = break_even_lines(found)
    assert price == "A correction costs as much as 3.0 responses."
    assert "50% of corrections and 5% of retries" in alone
    assert alone.endswith("worth their cost from 14% on, so these are.")
    assert accompanied.endswith("Corrections cannot be worth their cost where retries succeed so often.")
    doubtful = break_even([step(responses_alone=(40, 4), corrections_alone=(20, 5))])
    assert (doubtful["alone"]["pays"], "accompanied" in doubtful) == (None, False)
    assert "from 27% on; there were too few to tell" in break_even_lines(doubtful)[-1]
    assert break_even([NO_CORRECTIONS]) is None
    assert break_even_lines(None) == []


def test_the_points_of_a_study_lie_on_the_right_side_of_the_curve():
    found = {"ibpo": break_even([RARE, FREQUENT]), "gspo": None}
    runs = [
        RunResult(name, 0, {}, 8, 1, {}, [], 0, [], 8, {}, {}, break_even=own) for name, own in found.items()
    ]
    alone, accompanied = break_even_points(runs)
    assert (alone.method, alone.composition, accompanied.composition) == ("ibpo", "alone", "accompanied")
    assert alone.margin == pytest.approx(0.5 - (1 - 0.95**3))
    assert accompanied.margin == pytest.approx(0.5 - 1.8)
    left, _ = break_even_figure([alone, accompanied]).axes
    x, y = next(line for line in left.lines if "break-even" in str(line.get_label())).get_data()
    assert np.interp(0.05, x, y) == pytest.approx(1 - 0.95**3, abs=1e-3)


def test_the_law_is_asked_only_where_texts_of_corrections_are_trained_on():
    plain_prompt = ["--config", str(ROOT / "examples/algorithms/ibpo_plain_prompt.yaml")]
    learning, shaping = (["--advantage-estimator", name] for name in ("ibpo", "ibpo-shaping-only"))
    operators = [find_operator(parse_config(flags).algorithm) for flags in (learning, plain_prompt, shaping)]
    assert [learns_from_corrections(operator) for operator in operators] == [True, True, False]
