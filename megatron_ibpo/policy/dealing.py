"""Sequences dealt to data-parallel ranks, and cut into micro-batches. Needs no torch.

Sequences of a family have the same prompt, which a pass computes once for those that are in it together.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

Cost = Callable[[int], float]
"""Tokens of a sequence → cost of a pass over it, in any unit; `forward_flops` of the model's shape. Ranks
wait for each other, so all should have about the same amount to compute."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of sequences, by their index."""

    tokens: Sequence[int]
    """Tokens of prompt and response."""
    families: Sequence[int]
    """Number of each one's family."""
    prompts: Sequence[int]
    """Tokens that the family shares."""

    @classmethod
    def of_whole(cls, tokens: Sequence[int]) -> "Sizes":
        """Return the sizes of sequences of which each is a family by itself."""
        return cls(tokens, range(len(tokens)), [0] * len(tokens))

    def tokens_beside(self, index: int, families: Collection[int]) -> int:
        """Return the tokens that a sequence adds to a pass in which these families are."""
        return self.tokens[index] - (self.prompts[index] if self.families[index] in families else 0)

    def cost_beside(self, index: int, families: Collection[int], cost: Cost) -> float:
        """Return the cost that a sequence adds to a pass in which these families are."""
        shared = self.prompts[index] if self.families[index] in families else 0
        return cost(self.tokens[index]) - (cost(shared) if shared else 0.0)

    def cost(self, members: Iterable[int], cost: Cost) -> float:
        """Return the cost of a pass over these sequences."""
        families: set[int] = set()
        total = 0.0
        for index in members:
            total += self.cost_beside(index, families, cost)
            families.add(self.families[index])
        return total

    def by_family(self, members: Iterable[int]) -> list[list[int]]:
        """Return the members of each family, the families in the order of their first members."""
        families = defaultdict(list)
        for index in members:
            families[self.families[index]].append(index)
        return list(families.values())


def deal(sizes: Sizes, num_ranks: int, cost: Cost) -> list[list[int]]:
    """Deal the sequences to data-parallel ranks: whole families, the dearest first, each to the rank with the
    least so far; then single sequences where that evens the ranks out.

    Of sequences without families the fullest of R ranks gets at most 4/3 - 1/(3R) of its load under the best
    deal (R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969).
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    families = sizes.by_family(range(len(sizes.tokens)))
    costs = [sizes.cost(members, cost) for members in families]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    heapify(loads)
    for number in sorted(range(len(families)), key=lambda n: (-costs[n], n)):
        load, rank = loads[0]
        shares[rank] += families[number]
        heapreplace(loads, (load + costs[number], rank))
    if len(families) < len(sizes.tokens):
        _even_out(shares, sizes, cost)
    return shares


def _even_out(shares: list[list[int]], sizes: Sizes, cost: Cost) -> None:
    """Move sequences from the fullest rank to the emptiest, one by one, while the larger of the two loads
    falls. A family that is then on both has its prompt computed on both."""
    loads = [sizes.cost(share, cost) for share in shares]
    while True:
        fullest, emptiest = loads.index(max(loads)), loads.index(min(loads))
        here = Counter(sizes.families[index] for index in shares[fullest])
        there = {sizes.families[index] for index in shares[emptiest]}
        best = loads[fullest], loads[emptiest], -1
        for index in shares[fullest]:
            others = [sizes.families[index]] if here[sizes.families[index]] > 1 else []
            left = loads[fullest] - sizes.cost_beside(index, others, cost)
            grown = loads[emptiest] + sizes.cost_beside(index, there, cost)
            if max(left, grown) < max(best[:2]):
                best = left, grown, index
        if best[2] < 0 or fullest == emptiest:
            return
        loads[fullest], loads[emptiest], moved = best
        shares[fullest].remove(moved)
        shares[emptiest].append(moved)


def cut_shares(
    shares: Sequence[Sequence[int]], sizes: Sizes, max_tokens: int, cost: Cost, multiple: int = 1
) -> list[list[list[int]]]:
    """Cut each rank's sequences into micro-batches of up to `max_tokens` tokens; a longer sequence has one of
    its own.

    Returns [rank][micro-batch][index]. Every rank has the same number of them, a multiple of `multiple`;
    empty ones fill up. Each sequence goes into the micro-batch of its family or the first one with room. The
    most expensive come first, since ranks that share experts wait for each other in every micro-batch.
    """
    plan = [_first_fit(share, sizes, max_tokens) for share in shares]
    for batches in plan:
        batches.sort(key=lambda batch: -sizes.cost(batch, cost))
    num_batches = max(1, *(len(batches) for batches in plan))
    num_batches = -(-num_batches // multiple) * multiple
    return [[*batches, *([] for _ in range(num_batches - len(batches)))] for batches in plan]


@dataclass
class _Bin:
    room: int
    members: list[int] = field(default_factory=list)
    families: set[int] = field(default_factory=set)


def _first_fit(share: Sequence[int], sizes: Sizes, max_tokens: int) -> list[list[int]]:
    bins: list[_Bin] = []
    for family in sizes.by_family(share):
        last: list[_Bin] = []  # where the family went
        for index in family:
            fitting = (b for b in (*last, *bins) if b.room >= sizes.tokens_beside(index, b.families))
            chosen = next(fitting, None)
            if chosen is None:
                chosen = _Bin(max_tokens)
                bins.append(chosen)
            chosen.room -= sizes.tokens_beside(index, chosen.families)
            chosen.members.append(index)
            chosen.families.add(sizes.families[index])
            last = [chosen]
    return [b.members for b in bins]


def siblings_first(members: Sequence[int], sizes: Sizes) -> tuple[list[int], tuple[int, ...]]:
    """Return a micro-batch's members, families of two or more first, and the sizes of these families."""
    families = sizes.by_family(members)
    siblings = [family for family in families if len(family) > 1]
    alone = {family[0] for family in families if len(family) == 1}
    ordered = [index for family in siblings for index in family]
    return [*ordered, *(index for index in members if index in alone)], tuple(map(len, siblings))
