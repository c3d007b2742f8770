r"""A response as text: its thinking, with the marks that open and close it, and the answer after that, in the
last `\boxed{}` or where the text announces it."""

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


_BRACE = re.compile(r"(\\f?boxed\s*+\{)|(?<!\\)[{}]")
"""A brace that counts, or the start of a box."""
_BETWEEN_BOXES = re.compile(
    r"""(?: \s | [,;$&] | \band\b | \bor\b
      | \\(?:quad|qquad|text\{\s*+(?:(?:,\s*+)?(?:and|or)|,)\s*+\}|[\\,;:!()\[\] ])
      | [A-Za-z](?:_\w|_\{\w+\})?\s*=
    )*+""",
    re.VERBOSE,
)
"""Separators between boxes that together form one answer."""
_STATED = re.compile(
    r"answer\s+is:?\s*([^\n]+)|^\#{4}\s*([^\n]+)|^[^\w\n]*+(?:(?:final\s+)?answer|A):[\s*]*([^\n]+)",
    re.IGNORECASE | re.MULTILINE,
)
_BOLD = re.compile(r"(?<![\w)}\]])\*\*|\*\*(?![\w({\\+-])")
"""Markdown's marks of bold text, but no powers of Python such as `2**3`."""
_LONGEST_SOUGHT = 200
"""Characters used to find an answer again in a text."""
_SHORTEST_QUOTE = 20
"""Length from which a passage of the prompt, repeated in a response, counts as a quotation."""


def final_part(response: str, prompt: str = "") -> str:
    """Return the text after the thinking, without quotations of the prompt: those answer nothing. Unfinished
    thinking has no final part."""
    final_text = after_thinking(response)
    quoted = prompt.strip()
    return final_text.replace(quoted, "\n") if len(quoted) >= _SHORTEST_QUOTE else final_text


def final_boxes(text: str) -> list[str]:
    r"""Return the contents of the last complete, non-empty `\boxed{...}` or `\fbox{...}`, and of the boxes
    before it with no words between: together they are the answer. Duplicates are dropped."""
    boxes = _boxes(text)
    contents: list[str] = []
    end = None
    for start, stop, content in reversed(boxes):
        if not content.strip():
            continue
        if end is not None and not _BETWEEN_BOXES.fullmatch(text, stop, end):
            break
        contents.append(content.strip())
        end = start
    return list(dict.fromkeys(reversed(contents)))


def stated_answer(text: str) -> str | None:
    """Return the rest of the line after the last "answer is", "answer:" or "####"; None without one."""
    statements = _STATED.findall(text)
    return _BOLD.sub("", "".join(statements[-1])).strip() if statements else None


def answer_place(text: str, answer: str) -> int | None:
    """Return the index at which the last occurrence of the answer begins, ignoring differences in spaces;
    None without one."""
    letters = "".join(answer.split())[:_LONGEST_SOUGHT]
    places = [i for i, letter in enumerate(text) if not letter.isspace()]
    start = "".join(text[i] for i in places).rfind(letters) if letters else -1
    return places[start] if start >= 0 else None


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Return (start, end, content) of every complete box except nested ones. It takes one pass: a text may be
    full of boxes that are never closed."""
    closed: list[tuple[int, int, int]] = []  # positions: the contents of boxes in boxes would fill the memory
    open_braces: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            open_braces.append(brace)
        elif open_braces and (opened := open_braces.pop())[1]:
            closed.append((opened.start(), brace.end(), opened.end()))
    boxes: list[tuple[int, int, int]] = []
    for box in reversed(closed):  # the outer one of two was closed later
        if not boxes or box[1] <= boxes[-1][0]:
            boxes.append(box)
    return [(start, end, text[inner : end - 1]) for start, end, inner in reversed(boxes)]
