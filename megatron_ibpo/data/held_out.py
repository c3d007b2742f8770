"""Prompts that are held out of training for evaluation, where the user names none: a part of the data set
made for that if it has one, otherwise a small share of its questions.

A question's hash decides, so equal questions are on one side, and the seed and the files alone settle which.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, starmap
from pathlib import Path
from typing import Literal

from megatron_ibpo.basics.text import counted
from megatron_ibpo.data.files import LazyRow, as_lazy_row, chosen_files, each_row, open_table, small_rows
from megatron_ibpo.data.large_files import prompts_of_table
from megatron_ibpo.data.prompts import PromptSource
from megatron_ibpo.data.row_prompts import Reader, Rows, read_prompts
from megatron_ibpo.data.sources import Division, question_hash
from megatron_ibpo.data.tables import Row
from megatron_ibpo.data.tokenizer import DataError

SHARE_OF_SMALL, SHARE_OF_LARGE = 0.05, 0.01
"""Share of the questions of a file that is read whole, and of a larger one. Small, since they are lost to
training."""
MOST_HELD_OUT = 2048
"""Most held-out prompts that are evaluated: finding one in a large file means reading a hundred rows."""
MOST_ROWS_READ, MOST_CHARACTERS = 2**20, 2**31
"""Rows and characters of questions that are read to find them; fewer are held out if that is not enough."""
_HASHES = 2**63

Question = Callable[[Row], str]
"""Returns the text by which a row's question is compared; raises DataError for a row that has none."""


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


def small_division(rows: Iterable[Row | DataError], question: Question, seed: int, name: str) -> Division:
    """Return the division of rows that are all known.

    Raises:
        DataError: they have fewer than two questions.
    """
    hashes = sorted({question_hash(text, seed) for row in rows if (text := _text(row, question)) is not None})
    if len(hashes) < 2:
        raise DataError(
            f"{name}: too few questions to hold some out for evaluation; name others by --eval-prompt-data, "
            "or turn evaluation off by --eval-num-prompts 0"
        )
    return Division(seed, hashes[max(1, round(SHARE_OF_SMALL * len(hashes))) - 1])


def large_division(seed: int) -> Division:
    """Return the division of rows that are not all read."""
    return Division(seed, int(SHARE_OF_LARGE * _HASHES))


def training_rows(
    rows: Sequence[tuple[str, Row | DataError]], division: Division, question: Question
) -> list[tuple[str, Row | DataError]]:
    """Return the rows that are trained on, including rows that cannot be read."""
    return [
        (location, row)
        for location, row in rows
        if (text := _text(row, question)) is None or not division.holds_out(text)
    ]


def held_out_rows(
    rows: Iterable[LazyRow], division: Division, question: Question
) -> Iterator[tuple[str, Row | DataError]]:
    """Yield the rows that are held out with their places, each question once."""

    def held_out() -> Iterator[tuple[str, Row | DataError]]:
        seen: set[str] = set()
        characters = 0
        for location, read in islice(rows, MOST_ROWS_READ):
            with suppress(DataError):  # a row that cannot be read is training's
                row = read()
                text = question(row)
                if (characters := characters + len(text)) > MOST_CHARACTERS:
                    return
                if text not in seen and division.holds_out(text):
                    seen.add(text)
                    yield location(), row

    return islice(held_out(), MOST_HELD_OUT)


def _text(row: Row | DataError, question: Question) -> str | None:
    if isinstance(row, DataError):
        return None
    try:
        return question(row)
    except DataError:
        return None


def _divided_prompts(files: list[Path], rows: Rows | None, reader: Reader) -> tuple[PromptSource, str]:
    """Return one side of files that are divided, and its description; None: they are not read whole."""
    seed = reader.data.data_seed
    if rows is None:
        division = large_division(seed)
        if reader.split == "train":
            return _all_prompts(files, None, replace(reader, division=division)), ""
        rows = held_out_rows(each_row(files, reader.columns), division, reader.question)
    else:
        rows = list(rows)
        division = _checked_division(rows, reader)
        if reader.split == "train":
            rows = training_rows(rows, division, reader.question)
            return read_prompts(rows, reader), ""
        rows = held_out_rows(starmap(as_lazy_row, rows), division, reader.question)
    prompts = read_prompts(rows, reader)
    return prompts, f"{counted(len(prompts), 'prompt')} of it, which are not trained on"


def _checked_division(rows: list[tuple[str, Row | DataError]], reader: Reader) -> Division:
    """Return the division of rows. Rows that cannot be used are the better reason for a failure."""
    try:
        contents = [row for _, row in rows]
        return small_division(contents, reader.question, reader.data.data_seed, reader.source.location)
    except DataError:
        read_prompts(rows, reader)
        raise


def _all_prompts(files: list[Path], rows: Rows | None, reader: Reader) -> PromptSource:
    """Return the prompts of all rows of files; None: the files are too large to be read whole."""
    if rows is not None:
        return read_prompts(rows, reader)
    return prompts_of_table(open_table(files, reader.columns), reader)
