"""The environment of the campaign against episodes: its answers depend on the seed."""

import random
from collections.abc import Mapping
from typing import Any

from megatron_ibpo.environments import Message, Opening, Turn


class Game:
    """A sum to which each side adds; ending on an even one is right. The label is the number of turns."""

    def reset(self, question: str, label: str, metadata: Mapping[str, Any], seed: int) -> Opening:
        self.random, self.turns, self.sum = random.Random(seed), int(label), 0
        return Opening([{"role": "user", "content": f"{question} {self._own()}:"}])

    def step(self, message: Message) -> Turn:
        self.sum += sum(map(int, message["content"].split()))
        self.turns -= 1
        return Turn([{"role": "user", "content": f" {self._own()}:"}], done=self.turns == 0)

    def score(self) -> float:
        return float(self.sum % 2 == 0)

    def close(self) -> None:
        pass

    def _own(self) -> int:
        number = self.random.randrange(10)
        self.sum += number
        return number
