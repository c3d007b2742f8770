"""The page of runs as one file that needs no server or network, small enough to open at once."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_ibpo.data import Tokenizer
from megatron_ibpo.report.page.directories import RunSource, Source, open_source
from megatron_ibpo.report.page.html import comparison, embedded, page

MOST_BYTES = 32 * 2**20
"""Bytes of samples in a page: above this, browsers take seconds to open the file."""


def build_page(
    directories: Sequence[Path],
    *,
    steps: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
    most_bytes: int = MOST_BYTES,
) -> str:
    """Return the page of these runs and evaluations.

    Samples are added up to `most_bytes`; the page says what was left out. The last step comes first, then the
    first, then those that halve the gaps.

    Args:
        steps: recorded steps to include from every run; None: all.
        tokenizer: tokenizer of the runs; None: their own.

    Raises:
        ValueError: a directory holds neither a run nor an evaluation, a step was not recorded, or a record
            cannot be read.
    """
    sources = [open_source(directory, tokenizer=tokenizer) for directory in directories]
    overviews = [source.overview() for source in sources]
    replies: dict[str, str] = {}
    for number, (source, overview) in enumerate(zip(sources, overviews, strict=True)):
        replies[f"runs/{number}/series"] = embedded(source.series(None, None))
        keys = _section_keys(source, overview, steps)
        included = _add_samples(replies, number, source, keys, most_bytes // len(sources))
        if left_out := len(overview["sections"]) - len(included):
            many = f"{left_out} of {len(overview['sections'])}"
            overview["left_out"] = (
                f"{many} recorded steps are not in this file; --steps chooses others, and `serve` shows all"
                if overview["kind"] == "run"
                else f"{many} sets are too large for this file; `serve` shows all"
            )
        overview["sections"] = [section for section in overview["sections"] if section["key"] in included]
    runs = {"version": "", "runs": overviews, "comparison": comparison(overviews)}
    replies["runs"] = embedded(runs)
    data = ",".join(f"{embedded(address)}:{reply}" for address, reply in replies.items())
    title = ", ".join(f"{overview['title']}: {overview['name']}" for overview in overviews)
    return page(title, f"{{{data}}}")


def _section_keys(source: Source, overview: dict[str, Any], steps: Sequence[int] | None) -> list[int]:
    keys = [section["key"] for section in overview["sections"]]
    if steps is None or not isinstance(source, RunSource):
        return keys
    if missing := sorted(set(steps) - set(keys)):
        raise ValueError(f"{source.name} holds no records of step {', '.join(map(str, missing))}")
    return sorted(set(steps))


def _add_samples(
    replies: dict[str, str], number: int, source: Source, keys: Sequence[int], most_bytes: int
) -> set[int]:
    """Add sections to the replies while there is room. Returns the keys added."""
    included: set[int] = set()
    size = 0
    for key in _spread(keys):
        address = f"runs/{number}/sections/{key}"
        groups = source.section(key)
        section_replies = {address: embedded(groups)}
        for group in range(len(groups)):
            section_replies[f"{address}/groups/{group}"] = embedded(source.group(key, group))
            size += len(section_replies[f"{address}/groups/{group}"])
            if size > most_bytes:
                return included
        replies |= section_replies
        included.add(key)
    return included


def _spread(keys: Sequence[int]) -> Iterable[int]:
    """Yield the last, the first, then the middle of each gap, widest gaps first."""
    if keys:
        yield keys[-1]
    if len(keys) > 1:
        yield keys[0]
    gaps = [(0, len(keys) - 1)]
    while gaps:
        first, last = gaps.pop(0)
        if (middle := (first + last) // 2) > first:
            yield keys[middle]
            gaps += [(first, middle), (middle, last)]
