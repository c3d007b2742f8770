"""Edit distance and canonical alignment by the book: whole tables and no trick, for tests to compare with."""

from __future__ import annotations


def table(a, b) -> list[list[int]]:
    """Wagner and Fischer's: entry [i][j] is the distance of the first i ids of a and the first j of b."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        above = rows[-1]
        for j, y in enumerate(b, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (x != y)))
        rows.append(row)
    return rows


def edits(a, b) -> int:
    return table(a, b)[-1][-1]


def most_matches(a, b) -> int:
    """Return the most matches of all alignments of least cost."""
    cost, best = table(a, b), {}
    for i in range(len(a) + 1):
        for j in range(len(b) + 1):
            ways = [0] if i == j == 0 else []
            if i and cost[i - 1][j] + 1 == cost[i][j]:
                ways.append(best[i - 1, j])
            if j and cost[i][j - 1] + 1 == cost[i][j]:
                ways.append(best[i, j - 1])
            if i and j:
                equal = a[i - 1] == b[j - 1]
                if cost[i - 1][j - 1] + (not equal) == cost[i][j]:
                    ways.append(best[i - 1, j - 1] + equal)
            best[i, j] = max(ways)
    return best[len(a), len(b)]


def canonical_matches(a, b) -> list[tuple[int, int]]:
    """Pairs of places that the canonical alignment matches, as unmodified_mask documents it."""
    prefix = 0
    while prefix < min(len(a), len(b)) and a[prefix] == b[prefix]:
        prefix += 1
    suffix = 0
    while suffix < min(len(a), len(b)) - prefix and a[-1 - suffix] == b[-1 - suffix]:
        suffix += 1
    core = _core_matches(a[prefix : len(a) - suffix], b[prefix : len(b) - suffix])
    return (
        [(i, i) for i in range(prefix)]
        + [(prefix + i, prefix + j) for i, j in core]
        + [(len(a) - i, len(b) - i) for i in range(suffix, 0, -1)]
    )


def _core_matches(a, b) -> list[tuple[int, int]]:
    cost = table(a, b)
    ahead: dict[tuple[int, int], tuple[int, int]] = {
        (len(a), len(b)): (0, 0)
    }  # most matches to come, preference

    def offer(i, j, matches, preference):
        ahead[i, j] = max(ahead.get((i, j), (-1, 0)), (matches, preference))

    for i in range(len(a), -1, -1):
        for j in range(len(b), -1, -1):
            if (i, j) not in ahead:
                continue
            matches = ahead[i, j][0]
            if i and j and a[i - 1] == b[j - 1]:
                offer(i - 1, j - 1, matches + 1, 3)
                continue
            if i and j and cost[i - 1][j - 1] + 1 == cost[i][j]:
                offer(i - 1, j - 1, matches, 3)
            if i and cost[i - 1][j] + 1 == cost[i][j]:
                offer(i - 1, j, matches, 2)
            if j and cost[i][j - 1] + 1 == cost[i][j]:
                offer(i, j - 1, matches, 1)
    i = j = 0
    found = []
    while (i, j) != (len(a), len(b)):
        preference = ahead[i, j][1]
        if preference == 3 and a[i] == b[j]:
            found.append((i, j))
        i, j = i + (preference != 1), j + (preference != 2)
    return found
