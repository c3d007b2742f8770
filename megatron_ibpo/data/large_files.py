"""Prompts of files that are too large to be read whole: some rows are checked at the start, the others when
drawn."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from rich.progress import track

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.data.layouts import known_layout
from megatron_ibpo.data.order import Place, TableOrder
from megatron_ibpo.data.prompts import PromptSource
from megatron_ibpo.data.row_prompts import Reader, layout_notes, normalised
from megatron_ibpo.data.sources import BAD_ROW, DUPLICATE, Tally
from megatron_ibpo.data.tables import Row, RowCounts, Table, WithoutRows
from megatron_ibpo.data.tokenizer import DataError

FIRST_CHECKED, SAMPLE_CHECKED = 64, 192
"""Rows checked before the run starts: the first ones, and a sample from the whole file."""
MOST_ATTEMPTS = 1000
"""Rows that are tried for one position; if so many in a row are left out, almost none can be used."""

MOST_PASSED_OVER = 2**20
"""Rows in the order of the file that may be left out in a row; after that, its first prompts are repeated."""


def prompts_of_table(table: Table, reader: Reader) -> PromptSource:
    """Return the rows of a table as an endless stream.

    In training, a row that is left out gives its position to another one, drawn at random, since which rows
    will be left out is not known beforehand. In the file's own order the next row takes it.

    Raises:
        DataError: the table is empty, or one of the rows checked first cannot be used.
    """
    if reader.data.deduplicate:
        table = _without_duplicates(table, reader)
    order = TableOrder(table, reader.data.data_seed)
    notes = _checked(table, order, reader)
    if reader.split == "train":
        at = _shuffled(table, order, replace(reader, checks_names=False))
    else:
        at = _in_order(table, order.counted, reader)
    return PromptSource(
        at, count=lambda: order.counted.total, notes=notes, tallies=(reader.tally,), grows=True
    )


def _prompt(table: Table, reader: Reader, place: Place) -> Prompt | None:
    return reader.prompt(place, lambda: table.location(*place), lambda: table.row(*place))


def _shuffled(table: Table, order: TableOrder, reader: Reader) -> Callable[[int], Prompt]:
    def prompt_at(position: int) -> Prompt:
        place: Place | None = order.place(position)
        for attempt in range(MOST_ATTEMPTS):
            if place is not None and (prompt := _prompt(table, reader, place)) is not None:
                return replace(prompt, index=position)
            place = order.substitute(position, attempt)
        raise _nothing_left(reader)

    return prompt_at


def _in_order(table: Table, counted: RowCounts, reader: Reader) -> Callable[[int], Prompt]:
    usable: list[Place] = []
    remaining_places = _places(table, counted)

    def prompt_at(position: int) -> Prompt:
        passed_over = 0
        while len(usable) <= position and passed_over < MOST_PASSED_OVER:
            place = next(remaining_places, None)
            if place is None:
                break
            if _prompt(table, reader, place) is not None:
                usable.append(place)
                passed_over = 0
            else:
                passed_over += 1
        if not usable:
            raise _nothing_left(reader)
        prompt = _prompt(table, reader, usable[position % len(usable)])
        assert prompt is not None  # it made one before
        return replace(prompt, index=position)

    return prompt_at


def _nothing_left(reader: Reader) -> DataError:
    reasons = "; ".join(reader.tally.lines())
    return DataError(f"{reader.source.location}: next to no prompt is left ({reasons})")


def _places(table: Table, counted: RowCounts) -> Iterator[Place]:
    """Yield the places of all rows, in the order of the file."""
    return ((block, number) for block in range(table.num_blocks) for number in range(counted[block]))


def _checked(table: Table, order: TableOrder, reader: Reader) -> tuple[str, ...]:
    """Read some rows; return the lines to print about them."""
    looked = replace(reader, tally=Tally(reader.source.location))
    places = list(itertools.islice(_places(table, order.counted), FIRST_CHECKED))
    if not places:
        raise DataError(f"{reader.source.location}: no prompts in it")
    layout = reader.layout(table.row(*places[0]))
    rng = random.Random(derive_seed("check", reader.source.location))
    for _ in range(SAMPLE_CHECKED):
        block = rng.randrange(table.num_blocks)
        if count := order.counted[block]:
            places.append((block, rng.randrange(count)))
    ids: set[int] = set()
    for place in dict.fromkeys(places):
        looked.prompt(place, partial(table.location, *place), partial(_row_with_new_id, table, place, ids))
    left_out = looked.tally.lines()
    count = len(set(places))
    note = f"{reader.source.location}: large, so {count} rows are checked now and the others when drawn"
    return (
        note,
        *layout_notes(reader.source, [layout]),
        *(f"of the rows checked now, {line}" for line in left_out),
    )


def _without_duplicates(table: Table, reader: Reader) -> Table:
    """Return the table without rows that repeat an earlier question. This reads it through, with progress,
    and so also finds ids that two rows share."""
    seen: set[int] = set()
    ids: set[int] = set()
    left_out: dict[int, list[int]] = {}
    duplicates = 0
    blocks = track(range(table.num_blocks), f"comparing the questions of {reader.source.location}")
    for block in blocks:
        for number in range(table.count(block)):
            try:
                row = table.row(block, number)
            except DataError:
                continue  # the error is raised when the row is drawn
            question = _question(row, reader)
            if question is None:
                continue
            key = derive_seed(normalised(question))
            if key in seen:
                duplicates += 1
                left_out.setdefault(block, []).append(number)
                continue
            seen.add(key)
            try:
                _check_id(row, ids)
            except DataError as error:
                _refuse(reader, (block, number), f"{table.location(block, number)}: {error}")
                left_out.setdefault(block, []).append(number)
    reader.tally.counts[DUPLICATE] = duplicates
    return WithoutRows(table, {block: np.array(numbers, np.int64) for block, numbers in left_out.items()})


def _refuse(reader: Reader, place: Place, reason: str) -> None:
    if not reader.data.skip_bad_rows:
        raise DataError(reason)
    reader.tally.add(BAD_ROW, ("id", place), lambda: reason)


def _row_with_new_id(table: Table, place: Place, ids: set[int]) -> Row:
    row = table.row(*place)
    _check_id(row, ids)
    return row


def _check_id(row: Row, ids: set[int]) -> None:
    """Add the row's id to `ids`, as a hash, since ids may be many."""
    if (row_id := row.get("id")) is not None:
        key = derive_seed(json.dumps(row_id, default=str))
        if key in ids:
            raise DataError(f"id {row_id!r} is also that of an earlier row")
        ids.add(key)


def _question(row: Row, reader: Reader) -> str | None:
    """Return the text of the user's question; None if the row has none that can be compared."""
    layout = known_layout(row, reader.input_key, reader.label_key)
    question = row.get(reader.input_key if layout is None else layout.question)
    if isinstance(question, list) and question and isinstance(question[-1], dict):
        question = question[-1].get("content")
    return question if isinstance(question, str) else None
