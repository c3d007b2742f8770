"""The game as an environment of this package."""

import random

from guess import QUESTION, answer

from megatron_ibpo.environments.protocol import Opening, Turn


class GuessTheNumber:
    def reset(self, question, label, metadata, seed):
        self.number = random.Random(seed).randint(1, 20)
        self.right = False
        return Opening([{"role": "user", "content": QUESTION}])

    def step(self, message):
        reply = answer(message.get("content") or "", self.number)
        self.right = reply == "Right!"
        return Turn([{"role": "user", "content": reply}], done=self.right)

    def score(self):
        return float(self.right)

    def close(self):
        pass
