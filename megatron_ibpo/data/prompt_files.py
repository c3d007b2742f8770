"""Prompts of files. In those that are too large to be read whole, some rows are checked at the start and the
others when drawn. Where the user names no prompts for evaluation, a part of the data set that is made for it,
or else a small share of the questions, is held out of training; the seed and the files alone settle which."""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from rich.progress import track

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.basics.text import counted
from megatron_ibpo.data.files import chosen_files, each_row, open_table
from megatron_ibpo.data.prompts import PromptSource
from megatron_ibpo.data.row_prompts import (
    Budget,
    FirstPlaces,
    LazyRow,
    Reader,
    layout_notes,
    read_prompts,
    unique_id,
)
from megatron_ibpo.data.sources import BAD_ROW, DUPLICATE, Division, Tally, question_hash
from megatron_ibpo.data.tables import Place, Row, Table, TableOrder, WithoutRows
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
    table = open_table(files, reader.columns)
    if is_divided:
        return _divided_prompts(files, table, reader)
    prompts = (
        read_prompts(_all_rows(files, reader), reader) if table is None else _table_prompts(table, reader)
    )
    return prompts, f"its own held-out part, {files[0].name}"


def divided_files(path: Path, role: Literal["train", "eval"], split: str | None) -> tuple[list[Path], bool]:
    """Return (the files for the role, True if their rows must be divided). A part of a directory that is
    named by `split` is divided. Raises DataError if there is nothing to train on."""
    train = chosen_files(path, "train", split)
    if split is None:
        with suppress(DataError):
            held_out = chosen_files(path, "eval", None)
            if not {*train} & {*held_out}:
                return (train if role == "train" else held_out), False
    return train, True


def _all_rows(files: Sequence[Path], reader: Reader) -> list[LazyRow]:
    """Return the rows of files that are read whole. That they hold too much takes a second to find out before
    any is parsed; to make prompts of all rows up to that point would take a minute."""
    return list(each_row(files, reader.columns, Budget()))


def _divided_prompts(files: Sequence[Path], table: Table | None, reader: Reader) -> tuple[PromptSource, str]:
    """Return one side of files that are divided, and its description. Files without a table are small enough
    to be read whole."""
    rows: Iterable[LazyRow]
    if table is not None:
        division = Division(reader.data.data_seed, int(SHARE_OF_LARGE * _HASHES))
        if reader.split == "train":
            return _table_prompts(table, replace(reader, division=division)), ""
        rows = each_row(files, reader.columns)
    else:
        rows = [(place, cache(read)) for place, read in _all_rows(files, reader)]
        questions = [_comparable_question(read, reader) for _, read in rows]
        division = _small_division(rows, questions, reader)
        if reader.split == "train":  # rows that cannot be read are training's
            pairs = zip(rows, questions, strict=True)
            rows = [row for row, text in pairs if text is None or not division.holds_out(text)]
            return read_prompts(rows, reader), ""
    prompts = read_prompts(islice(_held_out_rows(rows, division, reader), MOST_HELD_OUT), reader)
    return prompts, f"{counted(len(prompts), 'prompt')} of it, which are not trained on"


def _small_division(rows: Iterable[LazyRow], questions: Iterable[str | None], reader: Reader) -> Division:
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


def _comparable_question(read: Callable[[], Row], reader: Reader) -> str | None:
    """Return the text by which the row's question is compared; None for a row without one."""
    with suppress(DataError):
        return reader.question(read())
    return None


def _held_out_rows(rows: Iterable[LazyRow], division: Division, reader: Reader) -> Iterator[LazyRow]:
    """Yield the rows that are held out, each question once. A row that cannot be read is training's."""
    seen_questions: set[str] = set()
    characters = 0
    for place, read in islice(rows, MOST_ROWS_READ):
        if (text := _comparable_question(read, reader)) is None:
            continue
        if (characters := characters + len(text)) > MOST_CHARACTERS:
            return
        if text not in seen_questions and division.holds_out(text):
            seen_questions.add(text)
            yield place, read


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
        at = _in_order(table, order, reader)
    return PromptSource(at, count=lambda: order.total, notes=notes, tallies=(reader.tally,), grows=True)


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


def _in_order(table: Table, order: TableOrder, reader: Reader) -> Callable[[int], Prompt]:
    usable: list[Place] = []
    remaining_places = order.places()

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


def _checked(table: Table, order: TableOrder, reader: Reader) -> tuple[str, ...]:
    """Read some rows; return the lines to print about them."""
    looked = replace(reader, tally=Tally(reader.source.location))
    places = list(islice(order.places(), FIRST_CHECKED))
    if not places:
        raise DataError(f"{reader.source.location}: no prompts in it")
    layout = reader.layout(table.row(*places[0]))
    rng = random.Random(derive_seed("check", reader.source.location))
    for _ in range(SAMPLE_CHECKED):
        block = rng.randrange(table.num_blocks)
        if count := order.count(block):
            places.append((block, rng.randrange(count)))
    ids: FirstPlaces = {}
    for place in dict.fromkeys(places):
        location = partial(table.location, *place)
        looked.prompt(place, location, unique_id(partial(table.row, *place), location, ids))
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
    keys: set[int] = set()
    """Hashes of questions and of ids, which may be many."""
    left_out: dict[int, list[int]] = {}
    for block in track(range(table.num_blocks), f"comparing the questions of {reader.source.location}"):
        for number in range(table.count(block)):
            try:
                row = table.row(block, number)
                key = derive_seed(reader.question(row))
            except DataError:
                continue  # the error is raised when the row is drawn
            row_id = row.get("id")
            id_key = derive_seed("id", json.dumps(row_id, default=str))
            if key in keys:
                reader.tally.counts[DUPLICATE] += 1
            elif row_id is not None and id_key in keys:
                fault = f"{table.location(block, number)}: id {row_id!r} is also that of an earlier row"
                if not reader.data.skip_bad_rows:
                    raise DataError(fault)
                reader.tally.add(BAD_ROW, ("id", block, number), partial(str, fault))
            else:
                keys |= {key, id_key}
                continue
            left_out.setdefault(block, []).append(number)
    return WithoutRows(table, {block: np.array(numbers, np.int64) for block, numbers in left_out.items()})
