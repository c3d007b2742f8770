"""Files and directories of rows: which files to read, and whether they are small enough to read whole."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from megatron_ibpo.basics.user_files import check_user_file
from megatron_ibpo.config import nearest, searched
from megatron_ibpo.data.arrow_tables import ArrowFile, Parquet
from megatron_ibpo.data.row_prompts import LARGEST_COMPRESSED, Budget, Rows, check_budget, read_jsonl
from megatron_ibpo.data.tables import Files, JsonLines, Row, Table
from megatron_ibpo.data.tokenizer import DataError, read_object

SMALL_ROWS = 8192
"""Rows up to which a source is read and checked whole before the run starts."""
SMALL_BYTES = 64 * 1024**2
LINES = (".jsonl", ".jsonl.gz")
SUFFIXES = (*LINES, ".parquet", ".arrow")
T = TypeVar("T")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
HELD_OUT = ("test", "validation", "eval", "dev", "held_out")
"""Names of a held-out part, in the order in which they are tried."""


def chosen_files(path: Path, role: str, split: str | None) -> list[Path]:
    """Return the files to read, in order.

    Args:
        path: a file; or a directory, as `datasets` saves it or as the Hugging Face hub lays it out.
        role: "train" or "eval".
        split: part of a directory, by name; None: the role decides.

    Raises:
        DataError: there is nothing there, or the part is missing or ambiguous.
    """
    if not path.exists():
        raise DataError(f"prompt file {path}: no such file{searched(path)}")
    if not path.is_dir():
        check_user_file(path)
        if not path.name.endswith(SUFFIXES):
            raise DataError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}")
        return [path]
    if (path / "dataset_dict.json").exists():
        names = {name: path / name for name in _names_in(path / "dataset_dict.json", "splits")}
        return _saved_files(_part(names, path, role, split))
    if (path / "state.json").exists():
        return _saved_files(path)
    by_split: dict[str, list[Path]] = {}
    for file in sorted(found for found in path.rglob("*") if found.name.endswith(SUFFIXES)):
        by_split.setdefault(_split_of(file, path), []).append(file)
    if not by_split:
        raise DataError(f"{path}: holds no data set: no file that ends in {', '.join(SUFFIXES)}")
    files = next(iter(by_split.values()))
    if split is not None or len(by_split) > 1:
        files = _part(by_split, path, role, split)
    for file in files:
        check_user_file(file)
    if len(folders := {file.parent for file in files}) > 1:
        raise DataError(
            f"{path}: several data sets ({', '.join(sorted(map(str, folders)))}); name one of them"
        )
    return files


def small_rows(files: Sequence[Path], columns: Sequence[str]) -> Rows | None:
    """Return the rows if they are few enough to be checked whole, else None.

    Raises:
        DataError: a file is damaged.
    """
    size = sum(file.stat().st_size for file in files)
    if any(file.name.endswith(".gz") for file in files):
        if size > LARGEST_COMPRESSED:
            raise DataError(
                f"{files[0].parent}: more than {LARGEST_COMPRESSED // 1024**2} MiB, with compressed files, "
                "which are read whole; `gunzip`"
            )
        check_budget(file for file in files if file.name.endswith(LINES))
        return _all_rows(files, columns)
    if size > SMALL_BYTES:
        return None
    table = open_table(files, columns)
    rows = 0
    for block in range(table.num_blocks):
        rows += table.count(block)
        if rows > SMALL_ROWS:
            return None
    return _all_rows(files, columns)


def open_table(files: Sequence[Path], columns: Sequence[str]) -> Table:
    """Open the rows of the files as one table. Raises DataError for a file that is damaged or of another
    format."""
    tables = [_table(file, columns) for file in files]
    return tables[0] if len(tables) == 1 else Files(tables)


def _table(file: Path, columns: Sequence[str]) -> Table:
    if file.suffix == ".parquet":
        return Parquet(file, columns)
    if file.suffix == ".arrow":
        return ArrowFile(file, columns)
    if file.suffix == ".gz":
        raise DataError(f"{file}: a compressed file is read whole; `gunzip` it to mix it with large ones")
    return JsonLines(file)


def _all_rows(files: Sequence[Path], columns: Sequence[str]) -> Iterator[tuple[str, Row | DataError]]:
    budget = Budget()
    for file in files:
        if file.name.endswith(LINES):
            yield from read_jsonl(file, budget)
        else:
            yield from _rows_of(_table(file, columns))


LazyRow = tuple[Callable[[], str], Callable[[], Row]]
"""(function that returns a row's place, function that returns the row); both are called only on demand."""


def each_row(files: Sequence[Path], columns: Sequence[str]) -> Iterator[LazyRow]:
    """Yield the rows of all files in order, whatever their size."""
    for file in files:
        if file.name.endswith(".gz"):
            yield from (as_lazy_row(where, row) for where, row in read_jsonl(file))
            continue
        table = _table(file, columns)
        for block in range(table.num_blocks):
            for number in range(table.count(block)):
                place = (block, number)
                yield partial(table.where, *place), partial(table.row, *place)


def as_lazy_row(where: str, found: Row | DataError) -> LazyRow:
    """Return a lazy row for a row already read, or for the error in its place."""

    def read() -> Row:
        if isinstance(found, DataError):
            raise found
        return found

    return lambda: where, read


def _rows_of(table: Table) -> Iterator[tuple[str, Row | DataError]]:
    for block in range(table.num_blocks):
        for number in range(table.count(block)):
            found: Row | DataError
            try:
                found = table.row(block, number)
            except DataError as error:
                found = error
            yield table.where(block, number), found


def _part(parts: Mapping[str, T], path: Path, role: str, split: str | None) -> T:
    """Return the part of a directory for a role and split."""
    wanted = [split] if split is not None else ["train"] if role == "train" else list(HELD_OUT)
    for name in wanted:
        if name in parts:
            return parts[name]
    said = f"no part {split!r}{nearest(split, parts)}" if split is not None else f"no part for {role}"
    raise DataError(f"{path}: {said}; it has {', '.join(parts)}; ?split=NAME chooses one")


def _saved_files(path: Path) -> list[Path]:
    """Return the files of one data set that `datasets` saved."""
    state = path / "state.json"
    if not state.exists():
        raise DataError(f"{path}: holds no state.json, as `save_to_disk` writes it")
    content = read_object(state)
    if content.get("_indices_data_files"):
        raise DataError(
            f"{path}: was saved after select() or shuffle(), with its rows elsewhere; "
            "flatten_indices() before save_to_disk()"
        )
    files = content.get("_data_files")
    if not isinstance(files, list) or not all(isinstance(f, dict) and "filename" in f for f in files):
        raise DataError(f"{state}: lacks _data_files, as `save_to_disk` writes it")
    named = [path / str(file["filename"]) for file in files]
    for file in named:
        if not file.is_file():
            raise DataError(f"{file}: is missing, and {state} names it")
    return named


def _names_in(path: Path, key: str) -> list[str]:
    names = read_object(path).get(key)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{path}: lacks a list of {key}")
    return names


def _stem(file: Path) -> str:
    return next(file.name.removesuffix(suffix) for suffix in SUFFIXES if file.name.endswith(suffix))


def _split_of(file: Path, root: Path) -> str:
    """Return the split in a file's name: train for data/train-00000-of-00002.parquet, train.jsonl and
    train/a.parquet."""
    stem = _SHARD.sub("", _stem(file))
    known = ("train", *HELD_OUT)
    if stem in known or file.parent == root or file.parent.name not in known:
        return stem
    return file.parent.name
