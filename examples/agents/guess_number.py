"""An environment without tools: a game of several turns.

    --environment examples/agents/guess_number.py:GuessNumber
    --prompt-data import://examples/agents/agent_prompts.py:guess_number

The policy guesses a number and is told whether the number is higher or lower.
"""

import re
from collections.abc import Mapping
from typing import Any

from megatron_ibpo.environments.protocol import Message, Opening, Turn

HIGHER, LOWER = "higher", "lower"
NO_NUMBER = "Write a number."
"""Reply to a message without a number. It costs a try."""

_NUMBER = re.compile(r"\d+")


class GuessNumber:
    """One game. The label is the number, and `tries` in the metadata the number of guesses. The reward is 1
    for the right guess in time."""

    def reset(self, question: str, label: str, metadata: Mapping[str, Any], seed: int) -> Opening:
        self.number, self.tries = int(label), int(metadata["tries"])
        self.turns_used, self.found = 0, False
        return Opening([{"role": "user", "content": question}])

    def step(self, message: Message) -> Turn:
        self.turns_used += 1
        numbers = _NUMBER.findall(message["content"])
        guess = float(numbers[-1]) if numbers else None  # int refuses thousands of digits
        self.found = guess == self.number
        if self.found or self.turns_used == self.tries:
            return Turn(done=True)
        if guess is None:
            reply = NO_NUMBER
        else:
            reply = HIGHER if guess < self.number else LOWER
        return Turn([{"role": "user", "content": reply}])

    def score(self) -> dict[str, float]:
        return {"score": float(self.found), "turns_used": float(self.turns_used)}

    def close(self) -> None:
        pass
