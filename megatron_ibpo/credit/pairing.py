"""The responses that a wrong response is compared with (ibpo step 3)."""

import random
from collections.abc import Sequence

from megatron_ibpo.basics.records import Sample


def is_wrong(response: Sample) -> bool:
    """Return whether a response is scored and not correct. It is neither right nor wrong if its verifier
    failed."""
    return response.reward is not None and not response.correct


def draw_references(
    target: int, responses: Sequence[Sample], count: int, rng: random.Random
) -> tuple[int, ...]:
    """Draw `count` = K-1 references for the wrong response `target`, as indices into `responses`.

    Uniform over the correct responses, or over the other wrong ones if none is correct. Responses whose
    verifier failed are never references. Empty if there is no other response: K falls to 1.
    """
    pool = [i for i, response in enumerate(responses) if response.correct]
    if not pool:
        pool = [i for i, response in enumerate(responses) if is_wrong(response) and i != target]
    return draw(pool, count, rng)


def draw(pool: Sequence[int], count: int, rng: random.Random) -> tuple[int, ...]:
    """Draw `count` items of the pool, none twice before all were drawn. Empty for an empty pool."""
    drawn: list[int] = []
    while pool and len(drawn) < count:
        drawn += rng.sample(pool, min(len(pool), count - len(drawn)))
    return tuple(drawn)
