"""Short word problems of arithmetic with their worked solutions, from hand-written templates. The
bundled `examples/math/*.jsonl` are drawn from them, and a small policy was taught by them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

_NAMES = ("Ada", "Ben", "Chen", "Dora", "Emil", "Fay", "Gita", "Hugo", "Ines", "Jon", "Kofi", "Lea")
_ITEMS = (
    "apples",
    "marbles",
    "stamps",
    "pencils",
    "shells",
    "cards",
    "cookies",
    "buttons",
    "stickers",
    "coins",
)
_MISREAD = {"+": "-", "-": "+", "*": "+", "/": "-"}
"""Operation that a careless student takes instead."""


@dataclass(frozen=True)
class Template:
    """A family of problems. Numbers are named by letters in the text and in the steps."""

    text: str
    """Text with {name}, {other}, {item} and the letters of `ranges` and `products` to fill in."""
    steps: tuple[str, ...]
    """Steps "left operator right"; an operand is a letter, or r for the previous result."""
    ranges: dict[str, tuple[int, int]]
    """Letter → smallest and largest value."""
    products: dict[str, tuple[str, str]] | None = None
    """Letter → two others with this product, for divisions without a remainder."""


@dataclass(frozen=True)
class WordProblem:
    """One problem with its solution."""

    text: str
    steps: tuple[tuple[int | None, str, int | None], ...]
    """(left, operator, right) of each step; None is the previous result."""
    label: str

    @property
    def level(self) -> int:
        """Number of steps of the solution."""
        return len(self.steps)

    def solution(self, rng: random.Random | None = None, *, misread: float = 0.0) -> str:
        r"""Return, for example, `3+4=7;7*2=14. The answer is \boxed{14}`: every step, then the answer.

        Args:
            rng: the student's random generator; needed unless `misread` is 0.
            misread: probability that a step takes the wrong operation, which later ones build on.
        """
        result, written = 0, []
        for left, operator, right in self.steps:
            done = _MISREAD[operator] if rng is not None and rng.random() < misread else operator
            first, second = (result if value is None else value for value in (left, right))
            result = _compute(first, done, second)
            written.append(f"{first}{done}{second}={result}")
        return f"{';'.join(written)}. The answer is \\boxed{{{result}}}"


TEMPLATES = (
    Template(
        "{name} has {a} {item}. {other} gives {name} {b} more. How many {item} does {name} have now?",
        ("a + b",),
        {"a": (2, 20), "b": (2, 20)},
    ),
    Template(
        "There were {c} {item} in a box. {name} took {b} of them out. How many are left in the box?",
        ("c - b",),
        {"c": (12, 40), "b": (2, 11)},
    ),
    Template(
        "{name} fills {a} bags with {b} {item} each. How many {item} is that in all?",
        ("a * b",),
        {"a": (2, 9), "b": (2, 9)},
    ),
    Template(
        "{name} shares {c} {item} equally among {a} friends. How many {item} does each friend get?",
        ("c / a",),
        {"a": (2, 9), "b": (2, 9)},
        {"c": ("a", "b")},
    ),
    Template(
        "A bus carries {a} people. At the next stop {b} people get on. How many people are on the bus?",
        ("a + b",),
        {"a": (3, 30), "b": (2, 15)},
    ),
    Template(
        "{name} is {a} years old. {other} is {b} years older. How old is {other}?",
        ("a + b",),
        {"a": (4, 30), "b": (2, 12)},
    ),
    Template(
        "A rope is {c} meters long. {name} cuts off {b} meters. How long is the rest?",
        ("c - b",),
        {"c": (13, 50), "b": (2, 12)},
    ),
    Template(
        "One ticket costs {a} dollars. How many dollars do {b} tickets cost?",
        ("a * b",),
        {"a": (2, 9), "b": (2, 9)},
    ),
    Template(
        "{name} reads {a} pages a day. How many days does a book of {c} pages take?",
        ("c / a",),
        {"a": (2, 9), "b": (2, 9)},
        {"c": ("a", "b")},
    ),
    Template(
        "{name} scored {c} points and {other} scored {b} points. By how many points did {name} win?",
        ("c - b",),
        {"c": (16, 45), "b": (2, 15)},
    ),
    Template(
        "In a garden stand {a} rows of {b} trees. How many trees stand in the garden?",
        ("a * b",),
        {"a": (2, 9), "b": (2, 9)},
    ),
    Template(
        "It was {c} degrees at noon. By night it had become {b} degrees colder. How warm was it then?",
        ("c - b",),
        {"c": (12, 35), "b": (2, 11)},
    ),
    Template(
        "{name} walked {a} miles in the morning and {b} miles after lunch. How far did {name} walk?",
        ("a + b",),
        {"a": (2, 15), "b": (2, 15)},
    ),
    Template(
        "A baker packs {c} rolls into boxes of {a}. How many boxes does the baker fill?",
        ("c / a",),
        {"a": (2, 9), "b": (2, 9)},
        {"c": ("a", "b")},
    ),
    Template(
        "{name} buys {a} packs of {b} {item} and already owns {d}. How many {item} does {name} own then?",
        ("a * b", "r + d"),
        {"a": (2, 9), "b": (2, 9), "d": (2, 12)},
    ),
    Template(
        "{name} had {c} dollars, bought a book for {b} dollars and then earned {d} dollars. How many "
        "dollars does {name} have?",
        ("c - b", "r + d"),
        {"c": (15, 40), "b": (2, 12), "d": (2, 12)},
    ),
    Template(
        "{name} picks {a} {item} and {other} picks {b}. They eat {d} of them. How many {item} remain?",
        ("a + b", "r - d"),
        {"a": (6, 20), "b": (6, 20), "d": (2, 9)},
    ),
    Template(
        "A farmer has {a} crates of {b} eggs. {d} eggs break. How many eggs are whole?",
        ("a * b", "r - d"),
        {"a": (3, 9), "b": (4, 9), "d": (2, 9)},
    ),
    Template(
        "{c} children form {a} equal teams. Each team gets {d} more players. How large is a team now?",
        ("c / a", "r + d"),
        {"a": (2, 9), "b": (3, 9), "d": (2, 6)},
        {"c": ("a", "b")},
    ),
    Template(
        "A pen costs {a} dollars and a pad costs {b} dollars. {name} buys {d} sets of a pen and a "
        "pad. How many dollars does {name} pay?",
        ("a + b", "r * d"),
        {"a": (1, 4), "b": (1, 4), "d": (2, 9)},
    ),
    Template(
        "{name} has {c} {item}, loses {b} of them and is given {d} new ones. How many {item} does "
        "{name} have?",
        ("c - b", "r + d"),
        {"c": (14, 30), "b": (2, 12), "d": (2, 9)},
    ),
    Template(
        "{name} is {a} years old. {other} is {d} years older than twice that. How old is {other}?",
        ("a + a", "r + d"),
        {"a": (4, 20), "d": (2, 12)},
    ),
    Template(
        "{name} saves {a} dollars a week for {b} weeks and spends {d} dollars. How many dollars are left?",
        ("a * b", "r - d"),
        {"a": (3, 9), "b": (4, 9), "d": (2, 9)},
    ),
    Template(
        "{name}, {other} and a friend have {a}, {b} and {d} {item}. How many {item} is that together?",
        ("a + b", "r + d"),
        {"a": (2, 15), "b": (2, 15), "d": (2, 15)},
    ),
    Template(
        "A shop sells {a} boxes of {b} {item} in the morning and {d} {item} after noon, but {e} "
        "{item} come back. How many {item} did it sell?",
        ("a * b", "r + d", "r - e"),
        {"a": (2, 9), "b": (3, 9), "d": (3, 15), "e": (2, 8)},
    ),
    Template(
        "{name} has {a} {item} and finds {b}. {other} takes {d} of them, and {name} buys {e} new "
        "ones. How many {item} does {name} have?",
        ("a + b", "r - d", "r + e"),
        {"a": (6, 20), "b": (3, 15), "d": (2, 8), "e": (2, 12)},
    ),
)


def word_problems(seed: int) -> Iterator[WordProblem]:
    """Yield problems without end, every template equally often; the same for the same seed."""
    rng = random.Random(seed)
    while True:
        for template in rng.sample(TEMPLATES, len(TEMPLATES)):
            yield _drawn(template, rng)


def _drawn(template: Template, rng: random.Random) -> WordProblem:
    name, other_name = rng.sample(_NAMES, 2)
    values = {letter: rng.randint(*bounds) for letter, bounds in template.ranges.items()}
    for letter, (left, right) in (template.products or {}).items():
        values[letter] = values[left] * values[right]
    text = template.text.format(name=name, other=other_name, item=rng.choice(_ITEMS), **values)
    words = [step.split() for step in template.steps]
    steps = tuple((values.get(left), operator, values.get(right)) for left, operator, right in words)
    result = 0
    for first, operation, second in steps:
        result = _compute(result if first is None else first, operation, result if second is None else second)
    return WordProblem(text, steps, str(result))


def _compute(left: int, operator: str, right: int) -> int:
    """Return the value; divisions always come out even."""
    if operator == "/":
        return left // right
    return left + right if operator == "+" else left - right if operator == "-" else left * right
