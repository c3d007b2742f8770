"""Keys of servers, kept out of every message, log and traceback.

A server, or a library that quotes what it received, may repeat a key in any spelling and cut it anywhere. So
any eight consecutive characters of a spelling are replaced wherever they occur.
"""

import base64
import html
import json
import logging
import os
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any
from urllib.parse import quote, quote_plus

KEYS = ("IBPO_RM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "RAY_AUTH_TOKEN")
"""Environment variables whose values are never shown."""
REPLACEMENT = "[key]"
_PIECE = 8
"""Fewest characters of a spelling that are recognised; a shorter one is recognised as a whole."""
_SHORTEST = 4
"""Shorter spellings, of keys of a few characters, would be found everywhere."""


def without_keys(text: str) -> str:
    """Return the text with every key of the environment replaced, in time linear in the text."""
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
    """Return whether this part of the text is no part of a longer word. A short key of letters is a made-up
    one, such as `token`, which is not hidden in `tokenizer`."""
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
