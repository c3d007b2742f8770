"""Files of records, one line of JSON each. They are appended to by a writer that may die at any moment.

Metrics, samples of evaluations and pass rates are in such files and not in a journal, since users search them
and the page finds a sample by its byte offset. A last line without a newline is unfinished: readers skip it,
and a writer cuts it off.
"""

import errno
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.user_files import RECORD_BYTES, check_user_file, user_lines


def record_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the place of each finished line, as `PATH, line N` for messages, and the line.

    Raises:
        OSError, UserFileError: as `check_user_file` does.
    """
    check_user_file(path, RECORD_BYTES)
    with path.open("rb") as file:
        for number, line in enumerate(finished_lines(file, path), start=1):
            yield f"{path}, line {number}", line


def finished_lines(file: io.BufferedReader, path: Path) -> Iterator[bytes]:
    """Yield the lines of an open file from its position on, without an unfinished one at the end."""
    return (line for line in user_lines(file, path) if line.endswith(b"\n"))


def open_records(path: Path) -> io.FileIO:
    """Open a file to append records; it need not exist. An unfinished line at its end is cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab+", buffering=0)
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)
    return file


def append_record(file: io.FileIO, record: Mapping[str, Any]) -> None:
    """Append a record to an unbuffered file. Raises what `append_whole` raises."""
    append_whole(file, (json.dumps(record, allow_nan=False) + "\n").encode())


def append_whole(file: io.FileIO, data: bytes) -> None:
    """Append all of `data` to an unbuffered file, or nothing if that raises.

    Raises:
        FileNotFoundError: the file was deleted while it was open, perhaps with the directory of its run.
        OSError: the file cannot be written.
    """
    end = file.seek(0, io.SEEK_END)
    remaining = memoryview(data)
    try:
        while remaining:
            remaining = remaining[file.write(remaining) :]
    except OSError as error:
        file.truncate(end)  # needs no room
        raise OSError(error.errno, error.strerror, str(file.name)) from None
    if os.fstat(file.fileno()).st_nlink == 0:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file.name))


def flush(path: Path) -> None:
    """Flush a file's content, or the names in a directory, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
