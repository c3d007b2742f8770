"""Conversations of scripted students with the environments next to this file, to warm-start a tiny agent.

    bash tools/ibpo.sh sft --prompt-data import://examples/agents/agent_demonstrations.py:both …

A student has one habit per episode. Only some habits lead to success, so that reinforcement has something to
choose from. One row in CORRECTION_EVERY is compare-and-correct: the question comes with two episodes of other
students, and the target is an episode with a good habit.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from agent_prompts import HIGHEST, Row, calculator, guess_number
from agent_tokenizer import CALL, FINAL_ANSWER, make_agent_tokenizer
from guess_number import HIGHER, GuessNumber
from use_calculator import UseCalculator

from megatron_ibpo.data.prompts import candidate_heading, correction_instruction
from megatron_ibpo.environments.protocol import Environment, Message, Opening

CORRECTION_EVERY = 5
CALCULATOR_HABITS = {"careful": 0.2, "guess": 0.5, "miscopy": 0.1, "ignore": 0.1, "malformed": 0.1}
"""Use the tool well; answer without it; call it with a wrong digit; misread its answer; write a call that is
not in the chat format at first. Each with its probability."""
GAME_HABITS = {"halve": 0.15, "within": 0.25, "step": 0.6}
"""Guess the middle of what is left; any number of what is left; the next number up or down."""
SKILL = 0.9
"""Probability of the first habit, which is the good one, in a correction."""

Student = Callable[[Sequence[Message]], Message]
"""Conversation so far → the next message."""


@dataclass(frozen=True)
class Lesson:
    """An environment with its questions and students."""

    environment: Callable[[], Environment]
    questions: Callable[[str], list[Row]]
    student: Callable[[str, random.Random], Student]
    """(habit, random generator) → a student."""
    habits: Mapping[str, float]

    def draw_student(self, rng: random.Random, skill: float = 0.0) -> Student:
        """Return a student with a random habit, or with the good one with probability `skill`."""
        names = [*self.habits]
        good = rng.random() < skill
        habit = names[0] if good else rng.choices(names, [*self.habits.values()])[0]
        return self.student(habit, rng)


def both(split: str) -> list[Row]:
    """Return conversations in both environments, in alternation, as rows for `ibpo sft`."""
    return list(
        chain.from_iterable(
            zip(*(demonstrations(environment, split) for environment in LESSONS), strict=True)
        )
    )


def demonstrations(lesson: Lesson, split: str) -> Iterator[Row]:
    """Yield the conversations of one environment."""
    tokenizer = make_agent_tokenizer()
    for number, question in enumerate(lesson.questions(split)):
        rng = random.Random(f"{question['task']} {split} {number}")
        if number % CORRECTION_EVERY:
            yield play(lesson.environment(), question, lesson.draw_student(rng))
            continue
        candidates = [
            episode_text(tokenizer, play(lesson.environment(), question, lesson.draw_student(rng)))
            for _ in range(1 + number % 2)
        ]
        yield play(lesson.environment(), question, lesson.draw_student(rng, SKILL), comparison(candidates))


def play(environment: Environment, question: Row, student: Student, suffix: str = "") -> Row:
    """Return the conversation of a student with an environment, with the tools and the score.

    Args:
        suffix: text after the question.
    """
    opening = environment.reset(question["prompt"], question["label"], question["metadata"], seed=0)
    messages = [*opening.messages[:-1], _with_more(opening, suffix)]
    while True:
        message = student(messages)
        messages.append(message)
        turn = environment.step(message)
        if turn.done:
            break
        messages += turn.messages
    tools = [{"type": "function", "function": tool} for tool in opening.tools]
    return {"messages": messages, "tools": tools, "score": environment.score()}


def comparison(candidates: Sequence[str]) -> str:
    """Return the text that asks to compare and correct, as IBPO's correction prompt does."""
    headed_candidates = [
        f"\n{candidate_heading(number)}{text}" for number, text in enumerate(candidates, start=1)
    ]
    return "".join(headed_candidates) + f"\n{correction_instruction(len(candidates))}"


def episode_text(tokenizer: Any, row: Row) -> str:
    """Return an episode as its ids read: everything after the start of the policy's first turn, without the
    end of its last one."""
    chats = [
        tokenizer.apply_chat_template(messages, tools=row["tools"] or None, tokenize=False, **settings)
        for messages, settings in (
            (row["messages"], {}),
            (row["messages"][:1], {"add_generation_prompt": True}),
        )
    ]
    return chats[0].removeprefix(chats[1]).removesuffix(f"{tokenizer.eos_token}\n")


def _with_more(opening: Opening, text: str) -> Message:
    last = opening.messages[-1]
    return last | {"content": last["content"] + text}


# ---------------------------------------------------------------------------------------- calculator


def calculator_student(habit: str, rng: random.Random) -> Student:
    """Return a student of arithmetic with one of CALCULATOR_HABITS."""

    def answer(messages: Sequence[Message]) -> Message:
        question, last = messages[0]["content"], messages[-1]
        expression = next(word.rstrip("?") for word in question.split() if word[0].isdigit())
        if last["role"] == "tool":
            result = last["content"]
            return _assistant_message(
                FINAL_ANSWER + (_misread(result, rng) if habit == "ignore" else result) + "."
            )
        if habit == "guess":
            return _assistant_message(f"{FINAL_ANSWER}{rng.randint(100, 9999)}.")
        if habit == "malformed" and len(messages) == 1:
            text = "".join([*CALL[:-1], expression, rng.choice(("", '"'))])
            return _assistant_message(f"<tool_call>\n{text}\n</tool_call>") | {"malformed_tool_calls": [text]}
        return _called(_misread(expression, rng) if habit == "miscopy" else expression)

    return answer


def _called(expression: str) -> Message:
    function = {"name": "calculate", "arguments": {"expression": expression}}
    return _assistant_message("") | {
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}]
    }


def _misread(text: str, rng: random.Random) -> str:
    """Return the text with one digit changed."""
    place = rng.choice([place for place, character in enumerate(text) if character.isdigit()])
    digit = rng.choice([digit for digit in "123456789" if digit != text[place]])
    return text[:place] + digit + text[place + 1 :]


# ------------------------------------------------------------------------------------------- the game


def game_student(habit: str, rng: random.Random) -> Student:
    """Return a player with one of GAME_HABITS."""

    def guess(messages: Sequence[Message]) -> Message:
        low, high = 1, HIGHEST
        guesses = [int(message["content"]) for message in messages if message["role"] == "assistant"]
        for number, reply in zip(guesses, messages[2::2], strict=True):
            if reply["content"] == HIGHER:
                low = max(low, number + 1)
            else:
                high = min(high, number - 1)
        if habit == "halve":
            return _assistant_message(str((low + high) // 2))
        if habit == "within" or not guesses:
            return _assistant_message(str(rng.randint(low, high)))
        return _assistant_message(str(guesses[-1] + (1 if messages[-1]["content"] == HIGHER else -1)))

    return guess


def _assistant_message(content: str) -> Message:
    return {"role": "assistant", "content": content}


LESSONS = (
    Lesson(UseCalculator, calculator, calculator_student, CALCULATOR_HABITS),
    Lesson(GuessNumber, guess_number, game_student, GAME_HABITS),
)
