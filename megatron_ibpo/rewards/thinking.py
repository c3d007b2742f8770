"""Thinking in a response: the marks that open and close it, and the text that follows it."""

import re
from collections import deque
from dataclasses import dataclass

_OPENING = (
    "<think>",
    "<seed:think>",
    "[THINK]",  # Mistral
    "<|START_THINKING|>",  # Cohere
    "<|channel>thought",  # Gemma
)
_CLOSING = ("</think>", "</seed:think>", "[/THINK]", "<|END_THINKING|>", "<channel|>")
_HEADER = r"(?:[^<]{0,100}<\|message\|>)?"
_OPENS = "|".join([*map(re.escape, _OPENING), rf"<\|channel\|>(?:analysis|commentary){_HEADER}"])
_CLOSES = "|".join([*map(re.escape, _CLOSING), rf"<\|channel\|>final{_HEADER}"])
_MARK = re.compile(f"(?P<opens>{_OPENS})|{_CLOSES}")
"""A mark of any family. gpt-oss thinks in channels, and answers in the channel `final`."""
_OPEN_AT_END = re.compile(rf"(?:{_OPENS})\s*\Z")
_LONGEST_END = 300
"""Characters at the end of a text in which a mark at its end begins."""
SPECIAL_MARKS = (*_OPENING[:4], *_CLOSING, "<|channel>", "<|channel|>", "<|message|>")
"""Marks that are special tokens in some tokenizers, which leave them out of a text."""


@dataclass(frozen=True)
class Response:
    """A response as text. The verifiers of this package read `marked`, and functions of users `text`."""

    text: str
    """What the policy wrote, without special tokens."""
    marked: str
    """The same with the marks of its thinking: first the one that its prompt leaves open, if any, and those
    that are special tokens."""


def left_open(text: str) -> str:
    """Return the mark of the thinking in which a text ends; empty if it ends outside of thinking."""
    last = _last_mark(text)
    return last[0] if last is not None and last["opens"] else ""


def open_at_end(text: str) -> str:
    """Return the mark that opens thinking at the very end of a text; empty if there is none."""
    found = _OPEN_AT_END.search(text[-_LONGEST_END:])
    return found[0].strip() if found is not None else ""


def after_thinking(response: str) -> str:
    """Return the text after the last mark, if that closes thinking; nothing if it opens thinking, which then
    has no end; and the whole response without any mark."""
    last = _last_mark(response)
    if last is None:
        return response
    return "" if last["opens"] else response[last.end() :]


def _last_mark(text: str) -> re.Match[str] | None:
    return next(iter(deque(_MARK.finditer(text), maxlen=1)), None)
