"""Text for messages and logs: counts, lists, values, errors and faults of users' code, without keys."""

import base64
import html
import json
import logging
import os
import reprlib
import sysconfig
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus


def counted(count: int, noun: str) -> str:
    """Return the count with its noun, a plural on a plain -s: "1 rank", "2,048 prompts"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200


def shown(value: object) -> str:
    """Return the value for a message, short even if it is long, contains itself or repeats others."""
    return _SHORT.repr(value)


def listed(names: Sequence[str], separator: str = ", ", *, most: int) -> str:
    """Return the first `most` names and the number of others, to keep messages readable."""
    num_omitted = len(names) - most
    return separator.join(names[:most]) + (f" and {num_omitted} more" if num_omitted > 0 else "")


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return each setting that differs, with both values."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"{name} was {old.get(name)!r}, is {new.get(name)!r}" for name in names]


KEYS = ("IBPO_RM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "RAY_AUTH_TOKEN")
"""Environment variables whose values are never shown."""
REPLACEMENT = "[key]"
_PIECE = 8
"""Fewest characters of a spelling that are recognised; a shorter one is recognised as a whole."""
_SHORTEST = 4
"""Shorter spellings, of keys of a few characters, would be found everywhere."""


def without_keys(text: str) -> str:
    """Return the text with every key of the environment replaced, in time linear in the text. A server or a
    library may quote a key in any spelling and cut it anywhere: any eight characters of one are replaced."""
    keys = [key for name in KEYS if (key := os.environ.get(name, "").strip())]
    if not keys:
        return text
    hidden = bytearray(len(text))
    lowered = _lowered(text)
    for piece in (piece for key in keys for piece in _pieces(key)):
        searched = text if len(piece) < _PIECE else lowered
        place = searched.find(piece)
        while place >= 0:
            end = place + len(piece)
            if len(piece) >= _PIECE or not piece.isalpha() or _is_word(text, place, end):
                hidden[place:end] = b"\1" * len(piece)
            place = searched.find(piece, place + 1)
    return "".join(_parts(text, hidden))


def _is_word(text: str, start: int, end: int) -> bool:
    """Return whether this part of the text is no part of a longer word: a short made-up key such as `token`
    is not hidden in `tokenizer`."""
    preceding, following = text[max(0, start - 2) : start], text[end : end + 1]
    return not following.isalnum() and (preceding in (r"\n", r"\r", r"\t") or not preceding[-1:].isalnum())


def _parts(text: str, hidden: bytearray) -> Iterator[str]:
    """Yield what is shown of the text, with the replacement for each stretch that is hidden."""
    place = 0
    while (start := hidden.find(1, place)) >= 0:
        yield text[place:start] + REPLACEMENT
        end = hidden.find(0, start)
        place = len(text) if end < 0 else end
    yield text[place:]


@cache
def _pieces(key: str) -> frozenset[str]:
    """Return what is searched for: all pieces of all spellings, in small letters; short ones as they are."""
    short_spellings = {text for text in _spellings(key) if len(text) < _PIECE}
    long = (_lowered(text) for text in _spellings(key) if len(text) >= _PIECE)
    return frozenset(
        short_spellings
        | {text[start : start + _PIECE] for text in long for start in range(len(text) - _PIECE + 1)}
    )


def _lowered(text: str) -> str:
    """Return the text in small letters, as many as it has characters: only this one becomes two."""
    return text.replace("İ", "I").lower()


def _spellings(key: str) -> set[str]:
    """Return the key as it may stand in a text: plain, in JSON, HTML, URLs, Python's literals, base64 and
    hexadecimal, and those within JSON or a literal again."""
    content = key.encode(errors="surrogateescape")
    once = {
        key, content.decode("latin-1"), content.hex(), html.escape(key), quote_plus(content),
        quote(content, safe=""), quote(content), *_literals(key), *_in_base64(content),
    }  # fmt: skip
    nested = {literal for text in once for literal in _literals(text)}
    return {key} | {text for text in once | nested if len(text) >= _SHORTEST}


def _literals(text: str) -> set[str]:
    """Return the text within quotation marks, without them."""
    content = text.encode(errors="surrogateescape")
    escaped = {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
    return escaped | {json.dumps(text)[1:-1].replace("/", "\\/"), repr(text)[1:-1], repr(content)[2:-1]}


def _in_base64(content: bytes) -> Iterator[str]:
    """Yield the base64 of any content with the key in it, as far as the key alone settles its letters."""
    for num_before in range(3):
        padded = b"\0" * num_before + content
        end = len(padded) - len(padded) % 3
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(padded[:end]).decode()[(0, 2, 3)[num_before] :]


class _Record(logging.LogRecord):
    """A record without keys, whatever handler writes it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if isinstance(self.exc_info, tuple) and self.exc_info[0] is not None:
            self.exc_text = without_keys(logging.Formatter().formatException(self.exc_info))

    def getMessage(self) -> str:
        return without_keys(super().getMessage())


def keep_keys_from_logs() -> None:
    """Have every log of this process, and every warning, be written without keys."""
    logging.setLogRecordFactory(_Record)
    if warnings.formatwarning is not _formatted:
        warnings.formatwarning = _formatted


def _formatted(*arguments: Any, **named: Any) -> str:
    return without_keys(_format_warning(*arguments, **named))


_format_warning = warnings.formatwarning


_LONGEST_ERROR = 500


def error_text(error: BaseException) -> str:
    """Return the type and message of any exception, of 500 characters at most, for a log, without keys."""
    try:
        message = str(error)
    except Exception as in_turn:  # a user's exception may fail at that too
        message = f"it cannot be shown, which fails with {type(in_turn).__name__}"
    message = message[: 2 * _LONGEST_ERROR]  # a key at the end of this is not cut in pieces that are shown
    return printable(without_keys(f"{type(error).__name__}: {message}")[:_LONGEST_ERROR])


def printable(text: str) -> str:
    """Return lone surrogates as escapes: no log can write them."""
    return text.encode(errors="backslashreplace").decode()


def legible(text: str) -> str:
    """Return the text with escapes for what is invisible, turns text around or a terminal would obey."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1] for letter in text
    )


REWARD_FAULTS = "reward_faults.log"
"""File of tracebacks in the folder logs/ of a run's directory."""
_LONGEST_TRACE = 20_000
"""Characters of a traceback that are kept: the last ones, which name the cause."""
_MOST_BYTES = 1 << 20
"""Size to which a log of tracebacks may grow."""
user_files: set[str] = set()
"""Files of the user's code that this process has loaded by import paths."""
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})


def fault_text(error: BaseException, *ours: str) -> str:
    """Return an error with the user's line that raised it: `KeyError: 'answer' (rewards.py:12 in score)`.
    `ours` are folders and files whose lines only call the user's code."""
    return f"{error_text(error)}{fault_place(error, *ours)}"


def fault_place(error: BaseException, *ours: str) -> str:
    """Return " (file:line in function)" of the user's last line before the error: outside of `ours` and, if
    there is one, outside of installed libraries; "" if there is none."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in ours and os.path.dirname(frame.filename) not in ours
    ]
    user_frames = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<frozen "))]
    last = (user_frames or frames)[-1:]
    return "".join(f" ({frame.filename}:{frame.lineno} in {frame.name})" for frame in last)


def place_in_users_code(error: BaseException) -> str:
    """Return " (file:line in function)" of the last line of one of `user_files` before the error, if any."""
    frames = traceback.extract_tb(error.__traceback__)
    last = [frame for frame in frames if frame.filename in user_files][-1:]
    return "".join(f" ({frame.filename}:{frame.lineno} in {frame.name})" for frame in last)


def trace_text(error: BaseException) -> str:
    """Return the traceback of any exception, shortened at its beginning."""
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:  # such as of an exception group that cannot be shown
        trace = "".join(traceback.format_tb(error.__traceback__))
    return printable(without_keys(trace)[-_LONGEST_TRACE:])


def append_trace(path: Path, title: str, trace: str) -> None:
    """Append a traceback to a log while that is small. Nothing depends on it: a full disk is no error."""
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        if path.exists() and path.stat().st_size > _MOST_BYTES:
            return
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(title)}\n{trace.rstrip()}\n\n")
