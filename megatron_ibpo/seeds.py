"""Seeds: each a function of what it is for and of nothing else, so that order and layout do not matter."""

from __future__ import annotations

import numpy as np

__all__ = ["derive_seed"]


def derive_seed(*parts: int) -> int:
    """A seed below 2**32 from the run's seed and the numbers that name its use (step, prompt, sample, …).

    Neighbouring parts give unrelated seeds.
    """
    return int(np.random.SeedSequence(parts).generate_state(1)[0])
