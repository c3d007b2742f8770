"""Grading of mathematics: formats, traps and noise."""

import random

import pytest

from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.config import DataConfig
from megatron_ibpo.rewards import LabelError, Score, check_labels, open_verifier


@pytest.fixture(scope="module")
def verifier():
    data = DataConfig(rm_type="math", reward_workers=1, reward_timeout=60)  # other things run besides
    with open_verifier(data) as opened:
        yield opened
        assert opened._pool.deaths == 0


def prompt(label, text="What is it?"):
    return Prompt(0, token_ids([]), 0, label, "math", text)


def wrongly_judged(verifier, answers_of, response="So it is \\boxed{%s}."):
    """What is not judged as a table says: label → answers that are right, and that are wrong."""
    asked = [
        (label, answer, float(is_right))
        for label, (right, wrong) in answers_of.items()
        for is_right, answers in ((True, right), (False, wrong))
        for answer in answers
    ]
    scores = verifier.score([(prompt(label), response % answer) for label, answer, _ in asked])
    return [(each, score) for each, score in zip(asked, scores, strict=True) if score.reward != each[2]]


def test_uncomputable_answers_are_wrong_and_no_error(verifier):
    too_much = [("9", r"\boxed{10^{10^{10}}}"), ("9", r"\boxed{" + r"\sqrt{" * 300 + "2" + "}" * 301)]
    too_much.append(("1/2", rf"\boxed{{{'2' * 200}/{'4' * 200}}}"))
    of_another_value = ("(2+x)^{500}", r"\boxed{(1+x)^{500}}")  # which would take seconds in vain
    *scores, fast = verifier.score([(prompt(label), text) for label, text in (*too_much, of_another_value)])
    assert scores == [Score(0.0, False, details={"response_error": 1.0})] * 3
    assert fast == Score(0.0, False)


def test_no_answer_and_no_label_runs_as_code(verifier, tmp_path):
    code = f"__import__('os').system('touch {tmp_path / 'P'}')"
    forms = [
        "%s",
        "$%s$",
        r"\boxed{%s}",
        r"\boxed{\text{%s}}",
        r"\boxed{\operatorname{%s}(1)}",
        r"\boxed{x_{%s}}",
    ]
    forms += [
        r"\boxed{\frac{%s}{2}}",
        r"\boxed{(1,%s)}",
        r"\boxed{x=%s}",
        r"\boxed{\sum_{i=%s}^3 i}",
        "answer: 1/2*%s+3",
    ]
    for spelling in (code, code.replace("_", r"\_"), code.replace("'", '"')):
        texts = [form % spelling for form in forms]
        labels = ("1", "(1,2)", r"\frac{1}{2}")
        scores = verifier.score([(prompt(label), text) for text in texts for label in labels])
        assert all(score.error is None for score in scores), spelling
        verifier.score([(prompt(text), r"\boxed{x+1}") for text in texts])
    assert not (tmp_path / "P").exists()


def test_a_label_without_an_answer_is_refused_at_the_start(verifier):
    (score,) = verifier.score([(prompt("$ $"), r"\boxed{1}")])
    assert score.reward is None
    assert "no mathematical answer" in score.error
    data, empty, fine = DataConfig(rm_type="math"), prompt(" "), prompt("12:00")
    check_labels(verifier._pool, [fine], data)
    with pytest.raises(LabelError, match="no mathematical answer"):
        check_labels(verifier._pool, [fine, empty], data)


def test_answers_of_all_formats_are_judged(verifier):
    """Formats, traps, hostile text."""
    matrix, sevens = r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "7" * 150
    answers = {
        "255651622": (
            ["255651622", "255,651,622", "255{,}651{,}622", r"255\,651\,622", "255651622.0", "+255651622",
             " 255651622 .", "$255651622$", r"\$255651622", "x = 255651622", r"255651622\text{ cm}"],
            ["255651623", "-255651622", "2556516220", "255651622.5", "255651622, 255651623", "255651622x",
             r"255651622 \text{ or } 255651623", r"255651622\text{ million}", r"\{255651622, 1\}"],
        ),
        "707.11": (
            ["707.11", "707.110", "707,11", r"70711 \times 10^{-2}", r"\frac{70711}{100}", r"\$ 707.11"],
            ["707", "70711", "707.111", "707.11e2", "-707.11", "707.011"],
        ),
        r"\frac{70}{34}": (
            [r"\frac{70}{34}", r"\dfrac{70}{34}", "70/34", r"\frac{210}{102}", r"\left(\frac{70}{34}\right)",
             r"\frac{-70}{-34}", r"70 \div 34", r"\boxed{\tfrac{70}{34}}"],
            [r"\frac{35}{70}", r"-\frac{70}{34}", "70", r"\frac{70}{35}", "2.06", "7034"],
        ),
        "x^2+16x+64": (["(x+8)^2", "64+16x+x^{2}", "(x+8)(x+8)"], ["(x-8)^2", "(x+8)^3", "x^2+16x"]),
        r"\sqrt{128}": ([r"8\sqrt{2}"], [r"8\sqrt{2}+1"]), r"\frac{8\pi}{2}": ([r"4\pi"], [r"8\pi"]),
        r"\log_{2}(256)": (["8"], []), "8+2i": (["2i+8"], ["8-2i"]), "9:23": (["9:23"], ["9:24", "10:23"]),
        r"23\%": (["23%", "0.23", "23"], [r"24\%"]), r"(66, \infty)": ([r"(66, \infty)"], [r"(-\infty, 66)"]),
        "(66, 77)": (["(66,77)", r"\left(66, 77\right)"], ["(77,66)", "(66,77,98)", "[66,77]"]),
        "[66, 77)": (["[66,77)"], ["(66,77]"]),
        r"\{66,77,98\}": ([r"\{98, 66, 77\}", "66, 77, 98"], [r"\{66, 77\}"]),
        "66, 77, 98": (["77, 98, 66"], ["66, 77, 99"]),
        r"x = 66 \text{ or } x = 77": (["66, 77", r"77 \text{ or } 66"], ["66"]),
        "Tuesday": ([r"\text{Tuesday}", "TUESDAY"], ["Monday", "not Tuesday", "Tuesday or Monday"]),
        "D": ([r"\textbf{D}"], ["E"]),
        r"\boxed{7}": (["7"], []), "$7$": (["7"], []), r"\$5": (["5"], []), "070": (["70"], []),
        "1,000": (["1000"], []), "1,22": (["1.22", "22, 1"], []), r"\frac12": ([r"\dfrac{2}{4}", "0.5"], []),
        "1/2": ([r"0.5 \text{ or } \frac12"], []), "1/3": ([], ["0.333"]), "12": ([], ["1 2"]),
        "0.001": (["1e-3"], []), "1e-3": (["10^{-3}"], []), "5000000": ([r"5\text{ million}"], []),
        r"60^\circ": (["60°"], []), "60": ([r"60^{\circ}"], ["61°"]), r"\infty": ([r"\infty"], []),
        "(x+1)^2": (["x^2+2x+1"], ["x^2+2x+2"]), "9" * 100_000: (["9" * 100_000], ["9" * 99_999 + "8"]),
        r"\emptyset": ([r"\varnothing"], []), r"\varnothing": (["∅"], []), "yes": ([r"\text{YES}"], []),
        "no solution": ([r"\text{No solutions}"], [r"\text{solutions}"]),
        r"\text{No real solution}": ([r"\text{no real solutions}"], []),
        f"({sevens},1)": ([f"({sevens}.0, 1)"], []), f"{matrix}+{matrix}": ([f"{matrix} + {matrix}"], []),
        "274": (
            [],
            ["", "?", "\\", "{", "$", r"\frac", r"\frac{1}{0}", r"\sqrt{", "nan", "None", r"\infty", "\x00",
             "\ud800", "é" * 50, "lambda: 0", "__import__('os')", "0/0", "x" * 500, r"\boxed{" * 30, "answer",
             r"\text{the label}", r"\phantom{274}0", "274<275", "<!-- 274 --> 275", "-" * 100 + "0"],
        ),
    }  # fmt: skip
    assert wrongly_judged(verifier, answers) == []


def test_the_final_answer_counts_but_no_quotation_of_the_prompt(verifier):
    numbers, sevens = ",".join(map(str, range(1, 26))), "7" * 800
    answers = {
        "7311": (
            [r"It is 7409? No: \boxed{7311}", r"\boxed{7409}, no: \boxed{7311}", "The answer is 7311.",
             r"<think>7409</think>\boxed{7311}", "The final answer is: $7311$", "**Final answer:** 7311",
             "so we get\n#### 7311", "2 + 3 = 5, so it makes 7311.", r"\fbox{7311}", r"\boxed{} \boxed{7311}",
             r"\boxed{7311} in \boxed{}", r"\boxed{7311} \boxed{7311}", r"\boxed{7311} and then \boxed{7"],
            [r"\boxed{7311}, no: \boxed{7409}", r"<think>\boxed{7311}</think>\boxed{7409}", "",
             r"<think>\boxed{7311}", r"<think>\boxed{7311}</think>", "The answer is 7409.", r"\boxed{7311",
             "The answer is 7311 or 7409.", "It is 7409, 7811 or 7311", r"\boxed{7409} or \boxed{7311}",
             r"\boxed{7409}, \boxed{7311}", "7311 eggs. The answer is 7409", r"7311, so \boxed{7409}"],
        ),
        "12:00": (["The answer is 12:00."], ["The answer is 12:30."]),
        "1,2,3,4": (["So it is 1, 2, 3 or 4", "So it is 1, 2 , 3, or 4", "So it is 1,2 or 3 or 4"], []),
        numbers: ([f"The answer is {numbers}"], []), "25": ([], [f"The answer is {numbers}"]),
        sevens: ([f"The answer is {sevens}"], []), "7": ([], [f"The answer is {sevens}"]),
        "4": ([], ["So it is 3 or 4"]),
        r"\{63,15,43\}": ([r"\boxed{63}, \boxed{15} and \boxed{43}"], []),
        "63, 15, 43": ([r"$\boxed{43}$, $\boxed{63}$, $\boxed{15}$"], []),
        "(63, 15)": ([r"x = \boxed{63}, y = \boxed{15}"], [r"x = \boxed{15}, y = \boxed{63}"]),
    }  # fmt: skip
    assert wrongly_judged(verifier, answers, response="%s") == []
    asked = prompt("5", r"Write the sum of 2 and 3 like \boxed{5}.")
    quoted, answered = verifier.score([(asked, asked.text), (asked, asked.text + r" It is \boxed{5}.")])
    assert (quoted.reward, answered.reward) == (0.0, 1.0)


@pytest.mark.parametrize(
    "count", [40, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_noise_is_judged_and_breaks_nothing(verifier, count):
    """What responses are made of and what has broken parsers, in any order, half of it in a box."""
    latex = r"""\boxed{ \fbox{ { } \frac \frac{1}{ \sqrt \left( \right) ^ _ ^{ $ $$ \text{ \pi \infty \cup \in
        \sum \int \begin{pmatrix} \end{pmatrix} & \\ 1 2 42 3.5 1,000 1e9 - + * / = < , ( ) [ ] ! % x y i"""
    text = [" ", "\n", " or ", " and ", "The answer is ", "</think>", "<think>", "<answer>", "#", "####"]
    strange = ["é", "\U0001d7d9", "\ud800", "\x00", "٣", "½", "²", "\u200b", "\u202e", "{" * 60, "9" * 400]
    draw, pieces = random.Random(0), [*latex.split(), *text, *strange]
    labels = draw.choices(["42", "\\frac{1}{2}", "x^2+1", "(1,2)", "12:00", "Monday"], k=count)
    noise = ["".join(draw.choices(pieces, k=draw.randint(1, 25))) for _ in labels]
    noise = [f"\\boxed{{{text}}}" if draw.random() < 0.5 else text for text in noise]
    scores = verifier.score([(prompt(label), text) for label, text in zip(labels, noise, strict=True)])
    assert [score.error for score in scores if score.error is not None] == []
    assert {score.reward for score in scores} <= {0.0, 1.0}
