import random

from megatron_ibpo.environments import Opening, Turn


class Game:
    """A sum to which each side adds, as the seed says; an even one at the end is right. `label`: turns."""

    def reset(self, question, label, metadata, seed):
        self.random, self.turns, self.sum = random.Random(seed), int(label), 0
        return Opening(self._adds(f"{question} "))

    def step(self, message):
        self.sum += sum(map(int, message["content"].split()))
        self.turns -= 1
        return Turn(self._adds(" "), done=self.turns == 0)

    def score(self):
        return float(self.sum % 2 == 0)

    def close(self):
        pass

    def _adds(self, before):
        number = self.random.randrange(10)
        self.sum += number
        return [{"role": "user", "content": f"{before}{number}:"}]
