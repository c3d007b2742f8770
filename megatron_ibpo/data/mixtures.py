"""Sources of prompts, opened and mixed: in a mixture the position alone determines the source and its row."""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

import numpy as np

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.config import DataConfig, EnvironmentConfig
from megatron_ibpo.data.generated import SCHEME, generated_prompts
from megatron_ibpo.data.pass_rates import PassRates
from megatron_ibpo.data.prompt_files import file_prompts
from megatron_ibpo.data.prompts import PromptSource, in_environment
from megatron_ibpo.data.row_prompts import OWN_SCHEME, Reader, own_rows, read_prompts
from megatron_ibpo.data.sources import Tally, read_spec
from megatron_ibpo.data.tokenizer import DataError, Tokenizer

LONGEST_CYCLE = 10_000
"""Longest cycle of the pattern of sources, in positions; shares are exact to this fraction."""


def open_sources(
    specs: Sequence[str],
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    split: Literal["train", "eval"],
    max_prompt_len: int | None = None,
    rates: PassRates | None = None,
    reader_type: type[Reader] = Reader,
    holds_out: bool = False,
    environment: EnvironmentConfig | None = None,
) -> PromptSource:
    """Open all sources as one, mixed in proportion to their weights. In a mixture, a generated task whose
    settings name no verifier is graded by reasoning_gym.

    Args:
        specs: files or directories, `reasoning_gym://TASK?parameter=value…` or
            `import://package.module:function`.
        split: training prompts come in an order drawn by `data.data_seed`; a file's evaluation prompts come
            in the file's order. Generated splits never share a question; for files that is up to the user.
        max_prompt_len: tokens that a prompt may have, so that a response still fits the context.
        rates: pass rates for --filter-pass-rate.
        reader_type: what rows of files and functions hold: prompts, or demonstrations.
        holds_out: both splits are opened from these sources, so rows of a file that names no part for
            evaluation are divided between them.
        environment: names the environment of all rows that name none, and those that rows may name.

    Raises:
        DataError: a source or one of its prompts cannot be used.
    """
    environment = environment or EnvironmentConfig()
    opened, weights = list[PromptSource](), list[Fraction]()
    for source in [read_spec(spec) for spec in specs]:
        if len(specs) > 1 and source.location.startswith(SCHEME) and source.rm_type is None:
            source = replace(source, rm_type="reasoning_gym")
        settings = tokenizer, data, source, Tally(source.location), max_prompt_len, rates
        reader = reader_type(*settings, environment=environment, split=split)
        opened.append(_opened(reader, holds_out=holds_out))
        weights.append(source.weight)
    return in_environment(opened[0] if len(opened) == 1 else _mixed(opened, weights), environment.environment)


def _opened(reader: Reader, *, holds_out: bool) -> PromptSource:
    location = reader.source.location
    if location.startswith(SCHEME):
        opened, held_out = generated_prompts(reader), "other items of the same task"
    elif location.startswith(OWN_SCHEME):
        opened = read_prompts(own_rows(location, reader.split), reader)
        held_out = 'its rows for "eval"'
    elif "://" in location:
        raise DataError(
            f"prompts {location!r}: expected a file or directory, {SCHEME}TASK?parameter=value or "
            f"{OWN_SCHEME}package.module:function"
        )
    else:
        opened, held_out = file_prompts(reader, holds_out=holds_out)
    if not holds_out or reader.split == "train":
        return opened
    note = f"{location}: no --eval-prompt-data is given, so evaluation is on {held_out}"
    return replace(opened, notes=(*opened.notes, note))


def _mixed(sources: Sequence[PromptSource], weights: Sequence[Fraction]) -> PromptSource:
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
        rank[cycle == number] = np.arange(counts[number])

    def at(position: int) -> Prompt:
        turn, place = divmod(position, length)
        number = int(cycle[place])
        source_position = turn * counts[number] + int(rank[place])
        return replace(sources[number].at(source_position), index=position)

    def count() -> int:
        """Return the positions until every source has given all its prompts; 0 if one never does."""
        sizes = [source.num_prompts() for source in sources]
        if not all(sizes):
            return 0
        return max(_position_of(size - 1, cycle, number) + 1 for number, size in enumerate(sizes))

    ready = [
        _position_of(source.ready, cycle, number)
        for number, source in enumerate(sources)
        if source.ready is not None
    ]
    return PromptSource(
        at,
        count=count,
        notes=tuple(note for source in sources for note in source.notes),
        tallies=tuple(tally for source in sources for tally in source.tallies),
        ready=min(ready, default=None),
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


def _position_of(place_in_source: int, cycle: np.ndarray, source: int) -> int:
    """Return the position at which prompt `place_in_source` of a source comes."""
    places = np.flatnonzero(cycle == source)
    turn, rank = divmod(place_in_source, len(places))
    return turn * len(cycle) + int(places[rank])
