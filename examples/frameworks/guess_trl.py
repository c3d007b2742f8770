"""The game for TRL: guessing is a tool, and the episode ends with the first message that does not call it."""

import random

from guess import QUESTION, answer


class GuessTheNumber:
    def reset(self, **row):
        self._number = random.randint(1, 20)
        self._right = False
        return QUESTION

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: A number from 1 to 20.
        """
        if self._right:
            raise ValueError("The game is over.")
        reply = answer(str(number), self._number)
        self._right = reply == "Right!"
        return reply

    def get_reward(self) -> float:
        return float(self._right)
