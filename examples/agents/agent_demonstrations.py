"""Conversations of scripted students with the environments next to this file, to warm-start a tiny agent.

    bash tools/ibpo.sh sft --prompt-data import://examples/agents/agent_demonstrations.py:both --apply-chat-template …

A student has one habit per episode. Only some habits lead to success, so that reinforcement has something to
choose from: the demonstrations are right in about four of ten episodes.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from agent_prompts import HIGHEST, TRIES, Row, calculator, guess_number
from agent_tokenizer import CALL, FINAL_ANSWER
from calculator import Calculator
from guess_number import HIGHER, GuessNumber

from megatron_ibpo.environments.protocol import Environment, Message

PASSES = {"train": 2, "eval": 1}
"""Demonstrations of each question of a split."""
CALCULATOR_HABITS = {"careful": 0.3, "guess": 0.2, "miscopy": 0.2, "ignore": 0.15, "malformed": 0.15}
"""Use the tool well; answer without it; call it with a wrong digit; misread its answer; write a call that is
not in the chat format at first."""
GAME_HABITS = {"halve": 0.15, "within": 0.25, "step": 0.6}
"""Guess the middle of what is left; any number of what is left; the next number up or down."""

Student = Callable[[Sequence[Message]], Message]
"""Conversation so far → the next message."""


def both(split: str) -> list[Row]:
    """Return conversations in both environments, in alternation, as rows for `ibpo sft`."""
    found = []
    for number in range(PASSES[split]):
        arithmetic = demonstrations(Calculator, calculator(split), calculator_student, f"{split} {number}")
        games = demonstrations(GuessNumber, guess_number(split), game_student, f"{split} {number}")
        found += [row for pair in zip(arithmetic, games, strict=True) for row in pair]
    return found


def demonstrations(
    environment: Callable[[], Environment],
    rows: Sequence[Row],
    student: Callable[[random.Random], Student],
    seed: str,
) -> Iterator[Row]:
    """Yield one conversation per question, with its reward and the tools of the environment."""
    for number, row in enumerate(rows):
        yield play(environment(), row, student(random.Random(f"{seed} {number}")))


def play(environment: Environment, row: Row, student: Student) -> Row:
    """Return the conversation of a student with an environment."""
    opening = environment.reset(row["prompt"], row["label"], row["metadata"], seed=0)
    messages, done = list(opening.messages), False
    while not done:
        message = student(messages)
        turn = environment.step(message)
        messages += [message, *(() if turn.done else turn.messages)]
        done = turn.done
    tools = [{"type": "function", "function": tool} for tool in opening.tools]
    return {"messages": messages, "tools": tools, "score": environment.score()}


# ---------------------------------------------------------------------------------------- calculator


def calculator_student(rng: random.Random) -> Student:
    """Return a student of arithmetic with a habit."""
    habit = _drawn(CALCULATOR_HABITS, rng)

    def answer(messages: Sequence[Message]) -> Message:
        question, last = messages[0]["content"], messages[-1]
        expression = next(word.rstrip("?") for word in question.split() if word[0].isdigit())
        if last["role"] == "tool":
            result = last["content"]
            return _said(FINAL_ANSWER + (_misread(result, rng) if habit == "ignore" else result) + ".")
        if habit == "guess":
            return _said(f"{FINAL_ANSWER}{rng.randint(100, 9999)}.")
        if habit == "malformed" and len(messages) == 1:
            text = "".join(CALL).replace(CALL[-2], CALL[-2] + expression).removesuffix(rng.choice(('"}}', "}")))
            return _said(f"<tool_call>\n{text}\n</tool_call>") | {"malformed_tool_calls": [text]}
        return _called(_misread(expression, rng) if habit == "miscopy" else expression)

    return answer


def _called(expression: str) -> Message:
    function = {"name": "calculate", "arguments": {"expression": expression}}
    return _said("") | {"tool_calls": [{"id": "call_0", "type": "function", "function": function}]}


def _misread(text: str, rng: random.Random) -> str:
    """Return the text with one digit changed."""
    place = rng.choice([place for place, character in enumerate(text) if character.isdigit()])
    digit = rng.choice([digit for digit in "123456789" if digit != text[place]])
    return text[:place] + digit + text[place + 1 :]


# ------------------------------------------------------------------------------------------- the game


def game_student(rng: random.Random) -> Student:
    """Return a player with a habit."""
    habit = _drawn(GAME_HABITS, rng)

    def guess(messages: Sequence[Message]) -> Message:
        low, high = 1, HIGHEST
        guesses = [int(message["content"]) for message in messages if message["role"] == "assistant"]
        for number, reply in zip(guesses, messages[2::2], strict=True):
            if reply["content"] == HIGHER:
                low = max(low, number + 1)
            else:
                high = min(high, number - 1)
        if habit == "halve":
            return _said(str((low + high) // 2))
        if habit == "within" or not guesses:
            return _said(str(rng.randint(low, high)))
        return _said(str(guesses[-1] + (1 if messages[-1]["content"] == HIGHER else -1)))

    return guess


def _said(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _drawn(habits: Mapping[str, float], rng: random.Random) -> str:
    return rng.choices([*habits], [*habits.values()])[0]
