"""Turn groups: the turns of an episode are compared with other turns from the same state.

--advantages examples/credit/turn_groups.py:TurnGroups. It shows an estimator that gives tokens different
advantages: A of a token is A of its episode among all of the prompt, plus ω times A of its turn among those
that the policy took in the same state. GiGPO (arXiv 2505.10978, section 4), with the z-score as its norm.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar

import numpy as np

from megatron_ibpo.basics.records import Sample, Weights
from megatron_ibpo.config import NOT_NEGATIVE, UNIT
from megatron_ibpo.credit import ComparedSamples
from megatron_ibpo.credit.estimators import group_z_score


@dataclass(frozen=True)
class TurnGroups:
    """Two turns are in the same state if the policy read the same tokens before them. (An environment whose
    observations name its state could compare more turns: GiGPO's anchor states.) A turn that no other episode
    took from its state has only its episode's advantage."""

    turn_discount: Annotated[float, UNIT] = 0.95
    """γ: the return of a turn is the episode's reward times γ for each turn that came after it."""
    turn_weight: Annotated[float, NOT_NEGATIVE] = 1.0
    """ω, the weight of a turn's advantage beside its episode's."""

    gives_token_advantages: ClassVar[bool] = True

    def of_batch(self, batch: Sequence[ComparedSamples]) -> list[list[Weights]]:
        return [self._of_group(compared) for compared in batch]

    def _of_group(self, compared: ComparedSamples) -> list[Weights]:
        rewards = [reward for reward in compared.rewards if reward is not None]
        of_tokens = [
            np.full(len(sample.token_ids), advantage)
            for sample, advantage in zip(compared.samples, group_z_score(rewards), strict=True)
        ]
        states: dict[bytes, list[_Turn]] = {}
        for number, (sample, reward) in enumerate(zip(compared.samples, rewards, strict=True)):
            for turn in self._turns(number, sample, reward):
                read = sample.prompt_token_ids.tobytes() + sample.token_ids[: turn.first].tobytes()
                states.setdefault(read, []).append(turn)
        for turns in states.values():
            relative = group_z_score([turn.discounted for turn in turns])
            for turn, advantage in zip(turns, relative, strict=True):
                of_tokens[turn.sample][turn.first : turn.last] += self.turn_weight * advantage
        return of_tokens

    def _turns(self, number: int, sample: Sample, reward: float) -> Iterator["_Turn"]:
        written = np.concatenate(([False], sample.loss_mask, [False]))
        bounds = np.flatnonzero(written[1:] != written[:-1]).tolist()
        turns = list(pairwise(bounds))[::2]
        for later, (first, last) in zip(reversed(range(len(turns))), turns, strict=True):
            yield _Turn(number, first, last, self.turn_discount**later * reward)


@dataclass(frozen=True)
class _Turn:
    """Tokens [first, last) of a sample, which the policy wrote without a break."""

    sample: int
    """Its number among the compared ones."""
    first: int
    last: int
    discounted: float
    """Return of the turn."""
