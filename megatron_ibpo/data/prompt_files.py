"""Prompts of files. Files that are too large to be read whole are tables: some rows are checked at the start,
the others when drawn.

Where the user names no prompts for evaluation, some are held out of training: a part of the data set made for
that if it has one, otherwise a small share of its questions. A question's hash decides, so equal questions
are on one side, and the seed and the files alone settle which.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice, starmap
from pathlib import Path
from typing import Literal

import numpy as np
from rich.progress import track

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.basics.text import counted
from megatron_ibpo.data.files import chosen_files, each_row, open_table, small_rows
from megatron_ibpo.data.layouts import known_layout
from megatron_ibpo.data.prompts import PromptSource
from megatron_ibpo.data.row_prompts import (
    LazyRow,
    Reader,
    Rows,
    as_lazy_row,
    layout_notes,
    normalised,
    read_prompts,
)
from megatron_ibpo.data.sources import BAD_ROW, DUPLICATE, Division, Tally, question_hash
from megatron_ibpo.data.tables import Place, Row, RowCounts, Table, TableOrder, WithoutRows
from megatron_ibpo.data.tokenizer import DataError

SHARE_OF_SMALL, SHARE_OF_LARGE = 0.05, 0.01
"""Share of the questions of a file that is read whole, and of a larger one. Small, since they are lost to
training."""
MOST_HELD_OUT = 2048
"""Most held-out prompts that are evaluated: finding one in a large file means reading a hundred rows."""
MOST_ROWS_READ, MOST_CHARACTERS = 2**20, 2**31
"""Rows and characters of questions that are read to find them; fewer are held out if that is not enough."""
_HASHES = 2**63
FIRST_CHECKED, SAMPLE_CHECKED = 64, 192
"""Rows checked before the run starts: the first ones, and a sample from the whole file."""
MOST_ATTEMPTS = 1000
"""Rows that are tried for one position; if so many in a row are left out, almost none can be used."""
MOST_PASSED_OVER = 2**20
"""Rows in the order of the file that may be left out in a row; after that, its first prompts are repeated."""


def file_prompts(reader: Reader, *, holds_out: bool) -> tuple[PromptSource, str]:
    """Return the prompts of files, and a description of those that are held out.

    Args:
        holds_out: both splits are opened from these files, which are divided unless a part of them is made
            for evaluation.

    Raises:
        DataError: the files or one of their prompts cannot be used.
    """
    path, part = Path(reader.source.location), reader.source.split
    if holds_out:
        files, is_divided = divided_files(path, reader.split, part)
    else:
        files, is_divided = chosen_files(path, reader.split, part), False
    rows = small_rows(files, reader.columns)
    if is_divided:
        return _divided_prompts(files, rows, reader)
    return _all_prompts(files, rows, reader), f"its own held-out part, {files[0].name}"


def divided_files(path: Path, role: Literal["train", "eval"], split: str | None) -> tuple[list[Path], bool]:
    """Return (the files for the role, True if their rows must be divided).

    Args:
        split: part of a directory, by name, which is then divided.

    Raises:
        DataError: there is nothing to train on.
    """
    train = chosen_files(path, "train", split)
    if split is None:
        with suppress(DataError):
            held_out = chosen_files(path, "eval", None)
            if not {*train} & {*held_out}:
                return (train if role == "train" else held_out), False
    return train, True


def _divided_prompts(files: list[Path], rows: Rows | None, reader: Reader) -> tuple[PromptSource, str]:
    """Return one side of files that are divided, and its description. Rows that are None are not read
    whole."""
    if rows is None:
        division = Division(reader.data.data_seed, int(SHARE_OF_LARGE * _HASHES))
        if reader.split == "train":
            return _all_prompts(files, None, replace(reader, division=division)), ""
        lazy_rows = each_row(files, reader.columns)
    else:
        rows = list(rows)
        texts = [_comparable_question(row, reader) for _, row in rows]
        division = _small_division(rows, texts, reader)
        if reader.split == "train":  # rows that cannot be read are training's
            pairs = zip(rows, texts, strict=True)
            rows = [row for row, text in pairs if text is None or not division.holds_out(text)]
            return read_prompts(rows, reader), ""
        lazy_rows = starmap(as_lazy_row, rows)
    prompts = read_prompts(islice(_held_out_rows(lazy_rows, division, reader), MOST_HELD_OUT), reader)
    return prompts, f"{counted(len(prompts), 'prompt')} of it, which are not trained on"


def _small_division(rows: Rows, questions: Iterable[str | None], reader: Reader) -> Division:
    """Return the division of rows that are all known, by their questions."""
    seed = reader.data.data_seed
    hashes = sorted({question_hash(text, seed) for text in questions if text is not None})
    if len(hashes) < 2:
        read_prompts(rows, reader)  # rows that cannot be used are the better reason
        raise DataError(
            f"{reader.source.location}: too few questions to hold some out for evaluation; name others by "
            "--eval-prompt-data, or turn evaluation off by --eval-num-prompts 0"
        )
    return Division(seed, hashes[max(1, round(SHARE_OF_SMALL * len(hashes))) - 1])


def _comparable_question(row: Row | DataError, reader: Reader) -> str | None:
    """Return the text by which the row's question is compared; None for a row without one."""
    with suppress(DataError):
        return None if isinstance(row, DataError) else reader.question(row)
    return None


def _held_out_rows(
    rows: Iterable[LazyRow], division: Division, reader: Reader
) -> Iterator[tuple[str, Row | DataError]]:
    """Yield the rows that are held out with their places, each question once."""
    seen_questions: set[str] = set()
    characters = 0
    for location, read in islice(rows, MOST_ROWS_READ):
        with suppress(DataError):  # a row that cannot be read is training's
            row = read()
            text = reader.question(row)
            if (characters := characters + len(text)) > MOST_CHARACTERS:
                return
            if text not in seen_questions and division.holds_out(text):
                seen_questions.add(text)
                yield location(), row


def _all_prompts(files: list[Path], rows: Rows | None, reader: Reader) -> PromptSource:
    """Return the prompts of all rows of files; None: the files are too large to be read whole."""
    if rows is not None:
        return read_prompts(rows, reader)
    return _table_prompts(open_table(files, reader.columns), reader)


def _table_prompts(table: Table, reader: Reader) -> PromptSource:
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
    places = list(islice(_places(table, order.counted), FIRST_CHECKED))
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
    seen_keys: set[int] = set()
    ids: set[int] = set()
    left_out: dict[int, list[int]] = {}
    duplicates = 0
    for block in track(range(table.num_blocks), f"comparing the questions of {reader.source.location}"):
        for number in range(table.count(block)):
            try:
                row = table.row(block, number)
            except DataError:
                continue  # the error is raised when the row is drawn
            question = _question(row, reader)
            if question is None:
                continue
            key = derive_seed(normalised(question))
            if key in seen_keys:
                duplicates += 1
                left_out.setdefault(block, []).append(number)
                continue
            seen_keys.add(key)
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
