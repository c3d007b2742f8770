"""Files of users: refused unless regular and not too large for their kind; a policy's digest; and files of
records, one line of JSON each, to which a writer appends that may die at any moment.

A last line of records without a newline is unfinished: readers skip it, and a writer cuts it off.
"""

import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_ibpo.basics.strict_json import read_json

KIB, MIB, GIB = 1024, 1024**2, 1024**3
RECIPE_BYTES = 256 * KIB
"""Largest YAML file; Python reads about 50 KB of it per second."""
JSON_BYTES = 64 * MIB
"""Largest JSON file of a model, a checkpoint or a study. The largest known tokenizers have half of it."""
RECORD_BYTES = GIB
"""Largest file of records that is read whole: a recorded step, metrics, rows, pickled metadata."""
LINE_BYTES = 512 * MIB
"""Longest line of a file that is read line by line. LiveCodeBench's tests take tens of MB."""
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class Lines(Protocol):
    """An open file that is read by lines."""

    def readline(self, size: int, /) -> bytes: ...


class UserFileError(ValueError):
    """A file of the user's that is refused; the text says which and why."""


def check_user_file(path: Path, most_bytes: float = float("inf")) -> None:
    """Raise UserFileError for anything but a regular file, which may never end, and for a file that is too
    large; OSError if there is none."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "no file")
        raise UserFileError(f"{path} is {kind}; expected a regular file")
    if status.st_size > most_bytes:
        raise UserFileError(
            f"{path} has {status.st_size:,} bytes; such a file may have at most {most_bytes:,}"
        )


def read_user_file(path: Path, most_bytes: int) -> bytes:
    """Return the content of a user's file. Raises as `check_user_file` does."""
    check_user_file(path, most_bytes)
    return path.read_bytes()


def read_json_file(path: Path, most_bytes: int = JSON_BYTES) -> Any:
    """Return the value of a user's JSON file. Raises as `check_user_file` and `read_json` do."""
    return read_json(read_user_file(path, most_bytes))


def read_json_object(path: Path, refusal: type[ValueError]) -> dict[str, Any]:
    """Return the object of a user's JSON file. Raises `refusal`, with file and reason, if it holds none."""
    try:
        content = read_json_file(path)
    except (OSError, UserFileError) as error:
        raise refusal(f"{path} cannot be read: {error}") from None
    except ValueError as error:
        raise refusal(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise refusal(f"{path} must hold a JSON object, holds a {type(content).__name__}")
    return content


def user_lines(file: Lines, name: Path) -> Iterator[bytes]:
    """Yield the lines of an open file. Raises UserFileError for one longer than LINE_BYTES."""
    while line := file.readline(LINE_BYTES + 1):
        if len(line) > LINE_BYTES:
            raise UserFileError(f"{name}: a line is longer than {LINE_BYTES // MIB} MiB")
        yield line


def record_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield each finished line after its place, `PATH, line N`. Raises as `check_user_file` does."""
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
    """Append all of `data` to an unbuffered file, or nothing if that raises: FileNotFoundError if the file
    was deleted while it was open, perhaps with the directory of its run, or another OSError."""
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


_PIECES, _PIECE_BYTES = 64, 64 * 1024
"""Number and size of the pieces of each weight file that are read. Training changes nearly every number, so a
few megabytes distinguish two policies without reading a checkpoint of 160 GB."""


def policy_digest(hf_dir: Path) -> str:
    """Return 16 hexadecimal digits from the configuration and names, sizes and pieces of weight files."""
    digest = hashlib.blake2b(digest_size=8)
    files = sorted(file for kind in ("*.safetensors", "*.bin") for file in hf_dir.glob(kind))
    for file in [hf_dir / "config.json", *files]:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            for piece in range(_PIECES):
                content.seek(piece * max(0, size - _PIECE_BYTES) // (_PIECES - 1))
                digest.update(content.read(_PIECE_BYTES))
                if size <= _PIECE_BYTES:
                    break
    return digest.hexdigest()
