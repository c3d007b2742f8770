"""Kinds of answers that were once judged wrongly: each label with right and with wrong answers."""

import pytest

from megatron_ibpo.basics.reward_value import ResponseError
from megatron_ibpo.rewards.math import is_right

KINDS = {
    "what the library cannot read": {
        r"p \equiv 1 \pmod 4": (
            [
                r"p \equiv 1 \pmod{4}", r"p \equiv 1 (\text{mod } 4)", "p ≡ 1 (mod 4)",
                r"p\equiv 1\ (\bmod\ 4)",
            ],
            [
                r"p \equiv 3 \pmod 4", r"p \equiv 1 \pmod 8", "4", "1",
            ],
        ),
        r"\begin{cases} x & x>0 \\ 0 & x\le 0\end{cases}": (
            [
                r"\begin{cases}x & x>0\\0 & x\leq 0\end{cases}",
            ],
            [
                r"\begin{cases} -x & x>0 \\ 0 & x\le 0\end{cases}", "0", "x",
            ],
        ),
        r"1, 2, \ldots, n": (
            [
                "1, 2, ..., n", r"1,2,\dots,n", "1, 2, …, n",
            ],
            [
                r"1, 3, 5, \ldots, 2n-1", "2", "n", r"1, 2, \ldots, 2n",
            ],
        ),
        "12_{7}": (["12_7", "12₇"], ["12_8", "13_7"]),
        r"n \mid 5": ([], [r"n \mid 10", "5"]),
        r"x \to 3": ([r"x\to 3", "x → 3"], ["3", r"y \to 3", r"x \to 2"]),
        r"\forall n \ge 3": (
            [
                r"\forall n \geq 3", "∀ n ≥ 3",
            ],
            [
                r"\exists n \ge 3", r"\forall n \ge 4", "3",
            ],
        ),
        r"A \cup B": (["A ∪ B"], [r"A \cap B", "A"]),
        r"2\mathbin{\#}3": ([], [r"3\mathbin{\#}3", "3"]),
        r"k\pi, k \in \mathbb{Z}": (
            [
                r"k \pi,\ k\in\mathbb{Z}",
            ],
            [
                r"2k\pi, k \in \mathbb{Z}", r"\pi",
            ],
        ),
    },
    "constants and functions in upright letters": {
        r"1 - \frac{1}{\mathrm{e}}": (
            [
                r"1 - \frac{1}{e}", r"1-\mathrm{e}^{-1}", r"1 - \frac{1}{\text{e}}", r"1-\frac1e",
            ],
            [
                r"1 - \frac{1}{3}", r"1+\frac{1}{e}", r"1 - \frac{1}{2e}",
            ],
        ),
        r"\mathrm{e}^{2}": (
            [
                "e^2", r"{\rm e}^2", r"\operatorname{e}^2", r"\mathrm e^{2}", r"\exp(2)",
                r"\mathrm{exp}(2)",
            ],
            [
                "2^2", r"\mathrm{e}^3", "x^2",
            ],
        ),
        r"2\mathrm{i}": (
            [
                "2i", r"2\mathit{i}", r"2\text{i}", r"2\mathrm i",
            ],
            [
                "2", r"-2\mathrm{i}", "3i",
            ],
        ),
        "3+4i": ([r"3+4\mathrm{i}", r"4\mathrm{i}+3", r"3 + 4{\rm i}"], [r"3-4\mathrm{i}", "7"]),
        r"\frac{\mathrm{e}}{2}": (
            [
                r"\frac{e}{2}", "e/2",
            ],
            [
                r"\frac{\mathrm{e}}{3}", r"\frac{1}{2}",
            ],
        ),
        r"\ln 2": (
            [
                r"\mathrm{ln}\,2", r"\operatorname{ln} 2", r"\mathrm{ln}(2)",
            ],
            [
                r"\mathrm{ln}\,3",
            ],
        ),
        r"\sin x": ([r"\mathrm{sin} x", r"\operatorname{sin}(x)"], [r"\mathrm{cos} x"]),
    },
    "mixed numbers": {
        "5/4": (
            [
                "1 1/4", r"1\frac{1}{4}", r"1 \frac14", "1¼", r"1\ 1/4", "1  1/4", "1.25",
            ],
            [
                "1 1/2", "11/4", "1/4", "1 4/1",
            ],
        ),
        "-1 1/4": (["-1.25", "-5/4", r"-1\frac{1}{4}", "−1¼"], ["1.25", "-3/4", "-1/4"]),
        "71/6": (["11 5/6", r"11\tfrac{5}{6}"], ["11 6/5", "55/6", "115/6"]),
        "1 1/4": (["1.25", r"\frac{5}{4}"], ["1 1/3", "1/4", "11/4"]),
        "10": ([], ["4 10/3", "10/3"]),
        "2": ([], ["2 2/3", "2 1"]),
        "2 2/3": (["8/3", "2⅔"], ["2", "4/3", "22/3"]),
        r"3\frac{1}{2}": (["3 1/2", "7/2", "3.5", "3½"], ["3/2", "3 1/3"]),
        "(1 1/2, 2)": (["(3/2, 2)", "(1.5, 2)"], ["(1/2, 2)", "(11/2, 2)"]),
    },
    "numbers far from 1": {
        r"1.6\times10^{-19}": (
            [
                "1.6e-19", "1.60×10⁻¹⁹", r"16 \times 10^{-20}", "1.6 * 10^{-19}",
            ],
            [
                r"1.7\times10^{-19}", "1.6e-18", "0", r"1.6\times10^{19}", "1.61e-19",
            ],
        ),
        r"\frac{1}{10^9}": (["1e-9", "10^{-9}", "0.000000001"], ["2e-9", "0", "1e-8"]),
        r"\frac{\sqrt{2}}{10^{8}}": (
            [
                r"\sqrt{2}\cdot 10^{-8}", r"\frac{1}{\sqrt{2}\cdot 5 \cdot 10^{7}}",
            ],
            [
                r"\frac{\sqrt{3}}{10^{8}}", "0",
            ],
        ),
        "0": (["0.0"], ["1e-9", "0.0000001", "10^{-7}"]),
        "1e-7": (["0.0000001"], ["2e-7", "0.00000011"]),
        "6.02e23": (["6.02×10²³", "6.02 x 10^23"], ["6.03e23", "6.02e22"]),
        "123456789.123456": ([], ["123456789.123457", "123456789"]),
        "0.333333": (["1/3"], ["0.3", "0.3334"]),
    },
    "plain text and Unicode": {
        "x^2+1": (["x²+1", "1 + x²", "x**2+1"], ["x³+1", "x²−1"]),
        r"\frac{\sqrt{2}}{2}": (["√2/2", "√(2)/2", "sqrt(2)/2", "1/√2"], ["√3/2", "2/2"]),
        r"\frac{1}{2}": (["½", "1⁄2", "1/2"], ["⅓", "2"]),
        r"\pi/2": (["π/2", "pi/2", r"\frac{\pi}{2}"], ["π", "2π"]),
        r"(-\infty, 3]": (
            [
                "(-∞, 3]", "(−∞,3]", "(-infinity, 3]", "(-inf, 3]",
            ],
            [
                "(-∞, 3)", "3", "[3, ∞)",
            ],
        ),
        "-5": (["−5", "－5", "-5.0"], ["5"]),
        "x_1": (["x₁"], ["x₂", "x"]),
        r"x \le 3": (["x ≤ 3", "x <= 3", r"x\leqslant 3"], ["x ≥ 3", "x < 3", "3"]),
        r"3\times 10^8": (["3×10⁸", "3·10^8", "3e8", "300000000"], ["3×10⁷"]),
        r"2\theta": (["2θ", "2*theta"], ["θ"]),
        "5": (["５"], ["６"]),
        r"60^\circ": (["60°", "60º", "60 degrees", r"60\degree"], ["61°"]),
        r"A\cap B": (["A∩B"], ["A∪B"]),
        r"2\pi r": (["2πr", "2·π·r"], ["πr"]),
        r"\lfloor x \rfloor": (["⌊x⌋"], ["⌈x⌉"]),
        r"1\pm\sqrt{2}": (["1±√2", "1 ± sqrt(2)"], ["1+√2"]),
    },
    "words around a letter or a yes": {
        "B": (
            [
                "(B)", "B.", "B)", r"\text{(B)}", "(B) 5", "B. 17 cm", "Option B", "option (B)",
                r"\textbf{(B)}\ 12", "The answer is B",
            ],
            [
                "C", "(C) B", "A or B", "BC", "b+1", r"A \cup B", "AB",
            ],
        ),
        "Yes": (
            [
                "yes", "Yes, it is", r"\text{Yes}", "YES.", r"\text{Yes, since } x>0",
            ],
            [
                "No", "no, yes", "yesterday", "not",
            ],
        ),
        "No": (["no", "No.", r"\text{No, it is not}"], ["yes", "none of them", "n o t"]),
        "True": (["true", "True."], ["False", "untrue"]),
        "the circle": (
            [
                "circle", r"\text{a circle}", "The Circle",
            ],
            [
                "ellipse", "the circles of Hell",
            ],
        ),
        "William Shakespeare": (
            [
                "william shakespeare", r"\text{William Shakespeare}.",
            ],
            [
                "Shakespeare", "William Blake",
            ],
        ),
        "Tuesday": (["tuesday", "TUESDAY"], ["Thursday"]),
    },
    "several assignments": {
        "x=1, y=2": (
            [
                "y=2, x=1", "x = 1 and y = 2", "x=1; y=2", r"y = 2 \text{ and } x = 1", r"x=1,\ y=2",
                r"x=1 \quad y=2", "x=1, y=4/2",
            ],
            [
                "x=2, y=1", "x=1", "y=2", "x=1, z=2", "x=1, y=2, z=3",
            ],
        ),
        r"a = \frac{1}{2}, b = -1": (
            [
                "b=-1, a=0.5", "a=1/2, b=-1",
            ],
            [
                "a=-1, b=1/2", "a=1/2, b=1",
            ],
        ),
        "x_1 = 3, x_2 = 4": (["x_2 = 4, x_1 = 3", "x₁=3, x₂=4"], ["x_1 = 4, x_2 = 3"]),
        "y = 2x+1": (["2x+1 = y", "y=1+2x"], ["y = 2x-1", "2x+1=z"]),
        "x=5": (["5", "x = 5"], ["x=6"]),
    },
    "digits that are arguments, and signs before a value": {
        r"\log_2 3": ([r"\log_{2}{3}", r"\log_2(3)", r"\frac{\ln 3}{\ln 2}"], [r"\log_3 2", "3", "23"]),
        "1/2": ([r"\frac 1 2", r"\frac1 2"], ["12", r"\frac 1 3", "1 2"]),
        "3x^2": (["x^2 3", r"\bf 3x^2"], ["x^{23}", "x^3"]),
        "12": (["= 12", r"\approx 12", r"\bf 12", "12_{10}", "12.", "x=12."], ["12_{7}", "= 13", ">12"]),
        "7": (["7^{th}", r"7^{\text{th}}", r"\underline{7}", r"\boldsymbol{7}"], ["7^{t}", "8^{th}"]),
        r"\ln 2": (["ln 2", "ln(2)"], ["ln 3", "2"]),
    },
    "sets, units and layout": {
        r"\{1,2,3\}": ([r"\{3, 1, 2\}", "1, 2, 3", r"\lbrace 1,2,3 \rbrace"], [r"\{1, 2\}"]),
        r"50\%": (["50%", "0.5", r"50\%", "50 %"], ["5%", "51%"]),
        "1,234,567": (
            [
                "1234567", "1{,}234{,}567", "1 234 567", r"1\,234\,567",
            ],
            [
                "1234", "1,234,568",
            ],
        ),
        r"\$5.50": (["5.5", "$5.50", "5.50 dollars", "€5.50"], ["5.05"]),
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": (
            [
                r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}",
                r"\left(\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}\right)",
            ],
            [
                r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}",
                r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}",
            ],
        ),
        "(1, 2)": (["(1,2)", r"\left(1, 2\right)", r"\big(1,2\big)"], ["(2,1)", "1", "[1,2]"]),
        "3:30": ([r"3{:}30", r"3\!:\!30"], ["3:31", "330"]),
        r"(-1,1)\cup(2,3)": (["(2,3)∪(-1,1)", r"(-1,1) \cup (2,3)"], ["(-1,1)", "(-1,1)∩(2,3)"]),
        r"5\text{ cm}": (["5", "5 cm", r"5\,\mathrm{cm}"], ["6 cm"]),
    },
}  # fmt: skip


def judged(response, label):
    try:
        return is_right(response, label)
    except ResponseError:  # a wrong answer that is counted
        return False


@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_a_kind_are_judged_as_a_whole(kind):
    wrong = [
        (label, answer, expected)
        for label, columns in KINDS[kind].items()
        for expected, answers in zip((True, False), columns, strict=True)
        for answer in answers
        if judged(f"So it is $\\boxed{{{answer}}}$.", label) is not expected
    ]
    assert wrong == []


def test_markdown_around_an_answer_is_no_part_of_it():
    for label, right, wrong in (
        ("12", "The answer is **12**.", "The answer is **13**."),
        ("18", "The total is **$18**.", "The total is **$19**."),
        ("B", "**Answer: B**", "**Answer: C**"),
        ("Evelyn", "The answer is **Evelyn**.", "The answer is **Debra**."),
        ("8", "The answer is 2**3", "The answer is 3**2"),
    ):
        assert judged(right, label)
        assert not judged(wrong, label)
