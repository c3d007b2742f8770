"""The game for GEM."""

import random

from gem import Env
from guess import QUESTION, answer


class GuessTheNumber(Env):
    def reset(self, seed=None):
        super().reset(seed)
        self.number = random.randint(1, 20)
        return QUESTION, {}

    def step(self, action):
        reply = answer(action, self.number)
        right = reply == "Right!"
        return reply, float(right), right, False, {}
