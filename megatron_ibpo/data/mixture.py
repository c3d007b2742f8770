"""Several sources as one: which of them gives the prompt at a position, and which of its own it is, follow
from the position alone."""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.data.prompts import PromptSource

LONGEST_CYCLE = 10_000
"""Positions after which the pattern of sources repeats, at most: shares are exact to this fraction."""


def mixed(sources: Sequence[PromptSource], weights: Sequence[Fraction]) -> PromptSource:
    """Prompts of all sources in shares as the weights; every source in its own order.

    The pattern repeats after a cycle in which the shares are exact, and within it they are never off by more
    than one prompt of a source for every other source.
    """
    counts = cycle_counts(weights)
    cycle = np.array(interleaved(counts))
    length = len(cycle)
    rank = np.zeros(length, np.int64)
    """How many of the positions before this one in the cycle have the same source."""
    for number in range(len(sources)):
        own = cycle == number
        rank[own] = np.arange(own.sum())

    def at(position: int) -> Prompt:
        turn, place = divmod(position, length)
        number = int(cycle[place])
        own = turn * counts[number] + int(rank[place])
        return replace(sources[number].at(own), index=position)

    def count() -> int:
        """Positions until every source has given all its prompts; 0 where one never does."""
        sizes = [source.num_prompts() for source in sources]
        if not all(sizes):
            return 0
        return max(_position_of(size - 1, cycle, number) + 1 for number, size in enumerate(sizes))

    return PromptSource(
        at,
        count=count,
        notes=tuple(note for source in sources for note in source.notes),
        tallies=tuple(tally for source in sources for tally in source.tallies),
        ready=min(
            (
                _position_of(source.ready, cycle, number)
                for number, source in enumerate(sources)
                if source.ready is not None
            ),
            default=None,
        ),
        grows=any(source.grows for source in sources),
    )


def cycle_counts(weights: Sequence[Fraction]) -> list[int]:
    """How often each source comes in a cycle: in exactly the shares of the weights where a cycle of
    LONGEST_CYCLE can have them, else rounded to it (largest remainder), and at least once."""
    total = sum(weights, Fraction(0))
    shares = [weight / total for weight in weights]
    length = math.lcm(*(share.denominator for share in shares))
    if length <= LONGEST_CYCLE:
        return [int(share * length) for share in shares]
    counts = [max(1, math.floor(share * LONGEST_CYCLE)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i] * LONGEST_CYCLE)
    for number in by_remainder[: max(0, LONGEST_CYCLE - sum(counts))]:
        counts[number] += 1
    return counts


def interleaved(counts: Sequence[int]) -> list[int]:
    """Source i counts[i] times, as evenly as can be: each next position goes to the source that is furthest
    behind (smooth weighted round robin)."""
    length, behind, order = sum(counts), [0] * len(counts), []
    for _ in range(length):
        behind = [value + count for value, count in zip(behind, counts, strict=True)]
        chosen = max(range(len(counts)), key=behind.__getitem__)
        behind[chosen] -= length
        order.append(chosen)
    return order


def _position_of(own: int, cycle: np.ndarray, source: int) -> int:
    """Where prompt `own` of a source comes."""
    places = np.flatnonzero(cycle == source)
    turn, rank = divmod(own, len(places))
    return turn * len(cycle) + int(places[rank])
