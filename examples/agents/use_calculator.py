"""An environment with a tool: arithmetic that needs a calculator.

    --environment examples/agents/use_calculator.py:UseCalculator
    --prompt-data import://examples/agents/agent_prompts.py:calculator

The policy may call `calculate` as often as it has turns. Its first message without a call is its answer, and
the last number in it counts.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from megatron_ibpo.environments.protocol import Message, Opening, Tool, Turn

CALCULATE: Tool = {
    "name": "calculate",
    "description": "Compute an expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "whole numbers, +, -, * and ()"}},
        "required": ["expression"],
    },
}
"""The tool, as the policy sees it."""
UNREADABLE = "That call is malformed."
"""Reply to a call that is not in the chat format."""
CANNOT_COMPUTE = "error"
"""The tool's answer to anything but an expression."""
LONGEST_EXPRESSION = 100
"""Limit in characters, so that every value is computed at once."""

_OPERATORS: dict[type[ast.operator | ast.unaryop], Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_NUMBER = re.compile(r"-?\d+")


class UseCalculator:
    """One question and the calculator for it. The reward is 1 for the right final answer."""

    def reset(self, question: str, label: str, metadata: Mapping[str, Any], seed: int) -> Opening:
        self.label = label
        self.answer: str | None = None
        self.results: list[str] = []
        return Opening([{"role": "user", "content": question}], [CALCULATE])

    def step(self, message: Message) -> Turn:
        if calls := message.get("tool_calls"):
            tool_messages = [_answer(call) for call in calls]
            self.results += [answer["content"] for answer in tool_messages]
            return Turn(tool_messages)
        if message.get("malformed_tool_calls"):
            return Turn([{"role": "user", "content": UNREADABLE}])
        self.answer = next(reversed(_NUMBER.findall(message["content"].replace(",", ""))), None)
        return Turn(done=True)

    def score(self) -> dict[str, float]:
        return {
            "score": float(self.answer == self.label),
            "tool_errors": float(self.results.count(CANNOT_COMPUTE)),
            "answers_of_the_tool": float(self.answer in self.results),
        }

    def close(self) -> None:
        pass


def calculate(expression: str) -> int:
    """Return the value of an expression of whole numbers, +, -, * and parentheses.

    Raises:
        ValueError: it is something else, or too long.
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"an expression may have {LONGEST_EXPRESSION} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(str(error)) from error


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_value(left), _value(right))
        case ast.UnaryOp(kind, operand) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_value(operand))
    raise ValueError(f"{type(node).__name__} is not supported")


def _answer(call: Mapping[str, Any]) -> Message:
    """Return the tool's answer to a call."""
    function = call["function"]
    try:
        if function["name"] != CALCULATE["name"]:
            raise ValueError(f"there is no tool {function['name']}")
        content = str(calculate(function["arguments"]["expression"]))
    except (KeyError, TypeError, AttributeError, ValueError):
        content = CANNOT_COMPUTE
    return {"role": "tool", "tool_call_id": call.get("id"), "name": function["name"], "content": content}
