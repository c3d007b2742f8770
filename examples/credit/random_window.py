"""A few tokens at a random place: the control of the divergence window.

--token-credit examples/credit/random_window.py:RandomWindow. The part of the window's gain that remains here
comes from learning little from wrong responses, not from the place. It costs no forward pass: 1.00 times
GSPO.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from megatron_ibpo.basics.records import Group
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.config import COUNT
from megatron_ibpo.credit import CreditContext, TokenFactors
from megatron_ibpo.credit.operator import TokenWeights
from megatron_ibpo.credit.token_credit import Advantages, on_wrong_responses


@dataclass(frozen=True)
class RandomWindow:
    """A random window. m_t = 1 at w consecutive tokens among those that the policy wrote, at a place drawn
    uniformly for each response, and 0 elsewhere; for the responses that have a window under
    `DivergenceWindow`. The draw depends only on seed, step, prompt and response."""

    token_credit_tokens: Annotated[int, COUNT] = 2
    """w, the width of the window. 2 was the best of those tried on the tiny tasks."""

    chooses_tokens: ClassVar[bool] = True

    def __call__(
        self, groups: Sequence[Group], advantages: Advantages, context: CreditContext
    ) -> TokenFactors:
        width = self.token_credit_tokens

        def weigh(group: Group, index: int, advantage: float) -> TokenWeights:
            if advantage >= 0:
                return None
            response = group.responses[index]
            written = np.flatnonzero(response.loss_mask)
            rng = random.Random(
                derive_seed("random window", context.seed, context.step, group.prompt.index, index)
            )
            first = rng.randrange(max(0, len(written) - width) + 1)
            weights = np.zeros(len(response.token_ids))
            weights[written[first : first + width]] = 1.0
            return weights

        weights = on_wrong_responses(groups, advantages, weigh)
        return TokenFactors(weights, note="a window at a random place")
