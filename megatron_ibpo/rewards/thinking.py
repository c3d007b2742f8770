"""Thinking in a response: the marks that open and close it, and the text that follows it."""

import re
from dataclasses import dataclass
from typing import NamedTuple

_OPENING = (
    "<think>",
    "<seed:think>",
    "[THINK]",  # Mistral
    "<|START_THINKING|>",  # Cohere
    "<|channel>thought",  # Gemma
)
_CLOSING = ("</think>", "</seed:think>", "[/THINK]", "<|END_THINKING|>", "<channel|>")
_QUOTES = "`'\""
_CHANNEL_MARK = "<|channel|>"
_CHANNEL = re.compile(r"<\|channel\|>(?:(?P<opens>analysis|commentary)|final)(?:[^<]{0,100}<\|message\|>)?")
"""The start of a channel of gpt-oss, which thinks in some of them, and answers in `final`."""
_OPEN_AT_END = re.compile(
    rf"(?:{'|'.join(map(re.escape, _OPENING))}|<\|channel\|>(?:analysis|commentary)(?:<\|message\|>)?)\s*\Z"
)
_LONGEST_END = 300
"""Characters at the end of a text in which a mark at its end begins."""
SPECIAL_MARKS = (*_OPENING[:4], *_CLOSING, "<|channel>", _CHANNEL_MARK, "<|message|>")
"""Marks that are special tokens in some tokenizers, which leave them out of a text."""


@dataclass(frozen=True)
class Response:
    """A response as text. The verifiers of this package read `marked`, and functions of users `text`."""

    text: str
    """Text that the policy wrote, without special tokens."""
    marked: str
    """The same with the marks of its thinking: first the one that its prompt leaves open, if any, and those
    that are special tokens."""


def left_open(text: str) -> str:
    """Return the mark of the thinking in which a text ends; empty if it ends outside of thinking."""
    last = _last_mark(text)
    return last.text if last is not None and last.opens else ""


def open_at_end(text: str) -> str:
    """Return the mark that opens thinking at the very end of a text; empty if there is none."""
    match = _OPEN_AT_END.search(text[-_LONGEST_END:])
    return match[0].strip() if match is not None else ""


def after_thinking(response: str) -> str:
    """Return the text after the last mark, if that closes thinking; nothing if it opens thinking, which then
    has no end; and the whole response without any mark."""
    last = _last_mark(response)
    if last is None:
        return response
    return "" if last.opens else response[last.start + len(last.text) :]


class _Mark(NamedTuple):
    start: int
    text: str
    opens: bool


def _last_mark(text: str) -> _Mark | None:
    # `in` is ten times as fast as `rfind`, and most marks are in no text
    marks = [_Mark(text.rfind(mark), mark, opens=False) for mark in _CLOSING if mark in text]
    openings = [(_last_unquoted(mark, text), mark) for mark in _OPENING if mark in text]
    marks += [_Mark(start, mark, opens=True) for start, mark in openings if start >= 0]
    if _CHANNEL_MARK in text and (channel := _last_channel(text)) is not None:
        marks.append(channel)
    return max(marks, default=None)


def _last_unquoted(mark: str, text: str) -> int:
    """Return where the last mark without quotation marks or backticks around it begins; -1 if there is none.
    An answer that mentions `<think>` opens no thinking."""
    end = len(text)
    while (start := text.rfind(mark, 0, end)) > 0:
        mark_end = start + len(mark)
        if text[start - 1] not in _QUOTES or text[start - 1] != text[mark_end : mark_end + 1]:
            break
        end = start
    return start


def _last_channel(text: str) -> _Mark | None:
    end = len(text)
    while (start := text.rfind(_CHANNEL_MARK, 0, end)) >= 0:
        if (match := _CHANNEL.match(text, start)) is not None:
            return _Mark(start, match[0], match["opens"] is not None)
        end = start
    return None
