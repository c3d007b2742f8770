"""Several sources as one. The position alone determines which source gives a prompt, and which of its
prompts."""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.data.prompts import PromptSource

LONGEST_CYCLE = 10_000
"""Longest cycle of the pattern of sources, in positions; shares are exact to this fraction."""


def mixed(sources: Sequence[PromptSource], weights: Sequence[Fraction]) -> PromptSource:
    """Mix the prompts of all sources in proportion to the weights, each source in its own order.

    The pattern repeats after a cycle. Within it, each share is off by at most one prompt of a source per
    other source.
    """
    counts = cycle_counts(weights)
    cycle = np.array(interleaved(counts))
    length = len(cycle)
    rank = np.zeros(length, np.int64)
    """Number of earlier positions in the cycle with the same source, by position."""
    for number in range(len(sources)):
        own = cycle == number
        rank[own] = np.arange(own.sum())

    def at(position: int) -> Prompt:
        turn, place = divmod(position, length)
        number = int(cycle[place])
        own = turn * counts[number] + int(rank[place])
        return replace(sources[number].at(own), index=position)

    def count() -> int:
        """Return the positions until every source has given all its prompts; 0 if one never does."""
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
    """Return how often each source comes in a cycle. The shares are exact if a cycle of at most LONGEST_CYCLE
    can hold them, else rounded (largest remainder); every source comes at least once."""
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
    """Return an order with source i counts[i] times, spread evenly: each next position goes to the source
    that is furthest behind (smooth weighted round robin)."""
    length, behind, order = sum(counts), [0] * len(counts), []
    for _ in range(length):
        behind = [value + count for value, count in zip(behind, counts, strict=True)]
        chosen = max(range(len(counts)), key=behind.__getitem__)
        behind[chosen] -= length
        order.append(chosen)
    return order


def _position_of(own: int, cycle: np.ndarray, source: int) -> int:
    """Return the position at which prompt `own` of a source comes."""
    places = np.flatnonzero(cycle == source)
    turn, rank = divmod(own, len(places))
    return turn * len(cycle) + int(places[rank])
