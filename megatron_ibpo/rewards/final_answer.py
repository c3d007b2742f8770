r"""The answer of a response: after its thinking, in the last `\boxed{}`, or where the text announces it."""

import re

from megatron_ibpo.rewards.thinking import after_thinking

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
