"""Pairs of a label and a response whose answer is right or wrong by how they were made: formats, traps,
adversarial text, numbers of 100,000 digits, nested LaTeX."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Pair:
    kind: str
    label: str
    response: str
    is_right: bool

    @property
    def takes_long(self) -> bool:
        """Is given up after seconds, or is long."""
        hard = ("!}", "\\sum", "((((", "1+1+1")
        return self.kind == "huge" or any(part in self.response for part in hard)


Draw = random.Random
Maker = Callable[[Draw], Iterator[tuple[str, str, bool]]]
"""(label, answer, whether it is right) of one draw."""


def integers(draw: Draw) -> Iterator[tuple[str, str, bool]]:
    n = draw.randint(1000, 10**9)
    for written in (
        f"{n}", f"{n:,}", f"{n:,}".replace(",", "{,}"), f"{n:,}".replace(",", "\\,"), f"{n}.0", f"+{n}",
        f"00{n}", f" {n} .", f"${n}$", f"\\${n}", f"\\text{{{n}}}", f"x = {n}", f"{n}\\text{{ cm}}",
        f"{n} \\mathrm{{kg}}", f"{n}^{{1}}",
    ):  # fmt: skip
        yield str(n), written, True
    for written in (
        f"{n + 1}", f"-{n}", f"{n}0", f"{n}.5", f"{n}, {n + 1}", f"{n} \\text{{ or }} {n + 1}", f"{n}x",
        f"{n}\\text{{ million}}", f"\\{{{n}, 1\\}}", f"{str(n)[:-1]}", f"{n}!",
    ):  # fmt: skip
        yield str(n), written, False


def decimals(draw: Draw) -> Iterator[tuple[str, str, bool]]:
    whole, places = draw.randint(1, 999), draw.randint(10, 99)
    exact = f"{whole}.{places}"
    value = Fraction(exact)
    for written in (
        exact, f"{exact}0", f"{whole},{places}", f"{whole}{places} \\times 10^{{-2}}", f"{whole}{places}e-2",
        f"\\frac{{{value.numerator}}}{{{value.denominator}}}", f"\\$ {exact}",
    ):  # fmt: skip
        yield exact, written, True
    for written in (
        f"{whole}", f"{whole}{places}", f"{whole}.{places}1", f"{exact}e2", f"-{exact}", f"{whole}.0{places}",
    ):  # fmt: skip
        yield exact, written, False


def fractions(draw: Draw) -> Iterator[tuple[str, str, bool]]:
    whole, denominator = draw.randint(0, 9), draw.choice([3, 7, 9, 11, 13, 17])
    value = whole + Fraction(draw.choice([1, 2]), denominator)  # no decimal of two places
    a, b = value.numerator * 2, value.denominator * 2
    label = f"\\frac{{{a}}}{{{b}}}"
    for written in (
        f"\\frac{{{a}}}{{{b}}}", f"\\dfrac{{{a}}}{{{b}}}", f"{a}/{b}", f"\\frac{{{a * 3}}}{{{b * 3}}}",
        f"\\left(\\frac{{{a}}}{{{b}}}\\right)", f"\\frac{{-{a}}}{{-{b}}}", f"{a} \\div {b}",
        f"\\boxed{{\\tfrac{{{a}}}{{{b}}}}}",
    ):  # fmt: skip
        yield label, written, True
    for written in (
        f"\\frac{{{b + 1}}}{{{a}}}", f"-\\frac{{{a}}}{{{b}}}", f"{a}", f"\\frac{{{a}}}{{{b + 1}}}",
        f"{float(value):.2f}", f"{a}{b}",
    ):  # fmt: skip
        yield label, written, False


def expressions(draw: Draw) -> Iterator[tuple[str, str, bool]]:
    a, b = draw.sample(range(2, 12), 2)
    square = f"x^2+{2 * a}x+{a * a}"
    yield from [
        (square, f"(x+{a})^2", True), (square, f"{a * a}+{2 * a}x+x^{{2}}", True),
        (square, f"(x+{a})(x+{a})", True), (square, f"(x-{a})^2", False), (square, f"(x+{a})^3", False),
        (square, f"x^2+{2 * a}x", False), (f"\\sqrt{{{a * a * b}}}", f"{a}\\sqrt{{{b}}}", True),
        (f"\\sqrt{{{a * a * b}}}", f"{a}\\sqrt{{{b}}}+1", False),
        (f"\\frac{{{a}\\pi}}{{{b}}}", f"\\frac{{{2 * a}\\pi}}{{{2 * b}}}", True),
        (f"\\frac{{{a}\\pi}}{{{b}}}", f"{a}\\pi", False), (f"{a}^{{{b}}}", str(a**b), True),
        (f"{a}^{{{b}}}", str(a**b + 1), False), (f"\\log_{{2}}({2**a})", str(a), True),
        (f"{a}+{b}i", f"{b}i+{a}", True), (f"{a}+{b}i", f"{a}-{b}i", False),
    ]  # fmt: skip


def collections(draw: Draw) -> Iterator[tuple[str, str, bool]]:
    a, b, c = sorted(draw.sample(range(10, 99), 3))
    yield from [
        (f"({a}, {b})", f"({a},{b})", True), (f"({a}, {b})", f"\\left({a}, {b}\\right)", True),
        (f"({a}, {b})", f"({b},{a})", False), (f"({a}, {b})", f"({a},{b},{c})", False),
        (f"({a}, {b})", f"[{a},{b}]", False), (f"[{a}, {b})", f"[{a},{b})", True),
        (f"[{a}, {b})", f"({a},{b}]", False), (f"\\{{{a},{b},{c}\\}}", f"\\{{{c}, {a}, {b}\\}}", True),
        (f"\\{{{a},{b},{c}\\}}", f"{a}, {b}, {c}", True),
        (f"\\{{{a},{b},{c}\\}}", f"\\{{{a}, {b}\\}}", False), (f"{a}, {b}, {c}", f"{b}, {c}, {a}", True),
        (f"{a}, {b}, {c}", f"{a}, {b}, {c + 1}", False),
        (f"{a} \\text{{ or }} {b}", f"{b} \\text{{ or }} {a}", True),
        (f"{a} \\text{{ or }} {b}", f"{a}", False), (f"x = {a} \\text{{ or }} x = {b}", f"{a}, {b}", True),
        (f"({a}, \\infty)", f"({a}, \\infty)", True), (f"({a}, \\infty)", f"(-\\infty, {a})", False),
    ]  # fmt: skip


def words(draw: Draw) -> Iterator[tuple[str, str, bool]]:
    right, wrong = draw.sample(["Monday", "Tuesday", "ellipse", "parabola", "even", "odd", "Alice", "Bob"], 2)
    hour, minute = draw.randint(1, 11), draw.randint(10, 49)
    letter, other = draw.sample("ABCDE", 2)
    yield from [
        (right, f"\\text{{{right}}}", True), (f"\\text{{{right}}}", right, True),
        (right, right.upper(), True), (right, wrong, False), (right, f"not {right}", False),
        (right, f"{right} or {wrong}", False), (letter, f"\\textbf{{{letter}}}", True),
        (letter, other, False), (f"{hour}:{minute}", f"{hour}:{minute}", True),
        (f"{hour}:{minute}", f"{hour}:{minute + 1}", False),
        (f"{hour}:{minute}", f"{hour + 1}:{minute}", False), (f"{minute}\\%", f"{minute}%", True),
        (f"{minute}\\%", f"0.{minute}", True), (f"{minute}\\%", f"{minute + 1}\\%", False),
    ]  # fmt: skip


def adversarial(draw: Draw) -> Iterator[tuple[str, str, bool]]:
    n = draw.randint(100, 999)
    label = str(n)
    for written in (
        "", " ", "?", "\\", "{", "}", "$", "\\frac", "\\frac{", "\\frac{1}{0}", "\\sqrt{", "nan", "None",
        "null", "\\infty", "∞", "\x00", "\ud800", "é" * 50, "if", "lambda: 0", "__import__('os')",
        "exec('1')", "0/0", "1/0", "1" + "+1" * 300, "(" * 200, "x" * 500, "\\boxed{" * 30,
        "\\text{the label}", "answer", "label", f"\\phantom{{{n}}}0", f"{n}<{n + 1}", f"<!-- {n} --> {n + 1}",
        f"\\sum_{{k=1}}^{{\\infty}} k^{{{n}}}", "-" * 100 + "0",
    ):  # fmt: skip
        yield label, written, False


def huge(draw: Draw) -> Iterator[tuple[str, str, bool]]:
    digits = str(draw.randint(1, 9)) + "".join(draw.choices("0123456789", k=99_999))
    yield digits, digits, True
    yield digits, f"00{digits}", True
    yield digits, f"{digits}.0", True
    yield digits, digits[:-1] + str((int(digits[-1]) + 1) % 10), False
    yield digits, digits[:-1], False
    yield digits, f"-{digits}", False
    yield "7", digits, False
    yield digits, "7", False
    depth = draw.randint(20, 90)
    yield "7", "{" * depth + "7" + "}" * depth, True
    nested = "\\frac{1}{1+" * 8 + "1" + "}" * 8
    yield "34/55", nested, True
    yield "33/55", nested, False


BOXED: list[Maker] = [integers, decimals, fractions, expressions, collections, words, adversarial, huge]


def final_answers(draw: Draw) -> Iterator[Pair]:
    """Yield responses with the answer at different places."""
    n = draw.randint(1000, 9999)
    other = n + draw.randint(1, 99)
    for response, right in [
        (f"It is {other}? No: \\boxed{{{n}}}", True), (f"\\boxed{{{other}}}, no: \\boxed{{{n}}}", True),
        (f"\\boxed{{{n}}}, no: \\boxed{{{other}}}", False), (f"<think>{other}</think>\\boxed{{{n}}}", True),
        (f"<think>\\boxed{{{n}}}</think>\\boxed{{{other}}}", False), (f"<think>\\boxed{{{n}}}", False),
        (f"<think>\\boxed{{{n}}}</think>", False), (f"The answer is {n}.", True),
        (f"The final answer is: ${n}$", True), (f"Answer: {n}", True), (f"**Final answer:** {n}", True),
        (f"so we get\n#### {n}", True), (f"2 + 3 = 5, so it makes {n}.", True),
        (f"The answer is {other}.", False), (f"The answer is {n} or {other}.", False),
        (f"It is {other}, {n + 500} or {n}", False), (f"\\boxed{{{other}}} or \\boxed{{{n}}}", False),
        (f"\\boxed{{{other}}}, \\boxed{{{n}}}", False), (f"{n} eggs are given. The answer is {other}", False),
        (f"\\boxed{{{n}", False) if n % 2 else (f"\\boxed{{}} \\boxed{{{n}}}", True),
        (f"\\fbox{{{n}}}", True), ("I do not know", False),
    ]:  # fmt: skip
        yield Pair("final_answers", str(n), response, right)
    a, b, c = draw.sample(range(10, 99), 3)
    yield Pair("boxes", f"\\{{{a},{b},{c}\\}}", f"\\boxed{{{a}}}, \\boxed{{{b}}} and \\boxed{{{c}}}", True)
    yield Pair("boxes", f"{a}, {b}, {c}", f"$\\boxed{{{c}}}$, $\\boxed{{{a}}}$, $\\boxed{{{b}}}$", True)
    yield Pair("boxes", f"({a}, {b})", f"x = \\boxed{{{a}}}, y = \\boxed{{{b}}}", True)
    yield Pair("boxes", f"({a}, {b})", f"x = \\boxed{{{b}}}, y = \\boxed{{{a}}}", False)


def pairs(rounds: int, huge_rounds: int = 1) -> Iterator[Pair]:
    """Yield `rounds` draws of every kind."""
    for number in range(rounds):
        for maker in BOXED:
            if maker is huge and number >= huge_rounds:
                continue
            draw = random.Random(f"{maker.__name__} {number}")
            for label, answer, right in maker(draw):
                yield Pair(maker.__name__, label, f"So it is \\boxed{{{answer}}}.", right)
        yield from final_answers(random.Random(number))


_LATEX = r"""\boxed{ \fbox{ { } \frac \frac{1}{ \sqrt \left( \right) ^ _ ^{ $ $$ \text{ \pi \infty \cup \in
\sum \int \begin{pmatrix} \end{pmatrix} & \\ 1 2 42 3.5 1,000 1e9 - + * / = < , ( ) [ ] ! % x y i"""
_TEXT = [" ", "\n", " or ", " and ", "The answer is ", "</think>", "<think>", "<answer>", "#", "####"]
_STRANGE = ["é", "\U0001d7d9", "\ud800", "\x00", "٣", "½", "²", "\u200b", "\u202e", "{" * 60, "9" * 400]
_PIECES = [*_LATEX.split(), *_TEXT, *_STRANGE]
"""Pieces that responses are made of, and that have broken parsers."""


def noise(draw: Draw) -> str:
    """A response that means nothing, half of them in a box."""
    text = "".join(draw.choices(_PIECES, k=draw.randint(1, 25)))
    return f"\\boxed{{{text}}}" if draw.random() < 0.5 else text
