"""Prefixes that token sequences share."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from megatron_ibpo.basics.records import TokenIds


def repeated_prefixes(sequences: Sequence[TokenIds]) -> list[int]:
    """Return for each sequence the length of the prefix it shares with the previous one in sorted order.

    A pass that computes every shared prefix once saves these tokens: the sum of the lengths less the sum of
    these is the number of nodes in the sequences' prefix tree. Of equal sequences one is computed.
    """
    # in any order of whole tokens, sequences with the longest shared prefix are neighbours
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tobytes())
    repeated = [0] * len(sequences)
    for before, here in pairwise(order):
        repeated[here] = shared_length(sequences[before], sequences[here])
    return repeated


def shared_length(first: TokenIds, second: TokenIds) -> int:
    """Return the length of two sequences' common prefix."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if differs.size else length
