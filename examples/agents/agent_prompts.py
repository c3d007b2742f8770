"""Prompts of the environments next to this file.

    --prompt-data import://examples/agents/agent_prompts.py:calculator
    --prompt-data import://examples/agents/agent_prompts.py:guess_number

A question depends on its split and number alone. A hash decides which split it belongs to.
"""

import hashlib
import random
from collections.abc import Callable
from typing import Any

from use_calculator import calculate as value_of

QUESTIONS = {"train": 4096, "eval": 512}
"""Questions in each split."""
HIGHEST, TRIES = 30, 5
"""The game: numbers from 1 to HIGHEST, and the guesses. Halving the range finds 31 numbers in five."""
QUESTION_TEXT = ("What is ", "? Use the tool, then answer with the number.")
"""The text around an expression."""
GAME = ("I think of a whole number from 1 to ", ". You have ", " tries. Guess: write only a number.")
"""The text around HIGHEST and TRIES."""

Row = dict[str, Any]


def calculator(split: str) -> list[Row]:
    """Return rows of arithmetic, such as `What is 37*84-5219?`, with the results as labels."""
    return [_sum_row(_of_split(_expression, split, number)) for number in range(QUESTIONS[split])]


def guess_number(split: str) -> list[Row]:
    """Return rows of the game, with the number to guess as the label. All ask the same."""
    question = f"{GAME[0]}{HIGHEST}{GAME[1]}{TRIES}{GAME[2]}"
    return [
        {
            "prompt": question,
            "label": str(random.Random(f"guess {split} {number}").randint(1, HIGHEST)),
            "task": "guess_number",
            "metadata": {"tries": TRIES},
        }
        for number in range(QUESTIONS[split])
    ]


def _sum_row(expression: str) -> Row:
    return {
        "prompt": f"{QUESTION_TEXT[0]}{expression}{QUESTION_TEXT[1]}",
        "label": str(value_of(expression)),
        "task": "calculator",
        "metadata": {"expression": expression},
    }


def _expression(rng: random.Random) -> str:
    """Draw two products and sums of three numbers, which no model of this size computes in its head."""
    left, right, last = rng.randint(12, 99), rng.randint(12, 99), rng.randint(100, 9999)
    product, addend = f"{left}*{right}", str(last)
    sign = rng.choice("+-")
    return f"{product}{sign}{addend}" if rng.random() < 0.5 else f"{addend}{sign}{product}"


def _of_split(draw: Callable[[random.Random], str], split: str, number: int) -> str:
    """Return the first question of this number's draws that belongs to the split."""
    rng = random.Random(f"{draw.__name__} {split} {number}")
    while True:
        question = draw(rng)
        if _held_out(question) == (split == "eval"):
            return question


def _held_out(question: str) -> bool:
    return hashlib.blake2b(question.encode(), digest_size=1).digest()[0] < 128
