"""The answers that a mathematical label accepts: one, several in a list, or those inside of an object."""

import ast
import functools
import json
import re
import warnings
from typing import Any

from megatron_ibpo.basics.reward_value import LabelError
from megatron_ibpo.basics.text import listed

ANSWER_KEYS = (
    *("target", "answer", "answers", "final_answer", "expected_answer"),
    *("ground_truth", "label", "value"),
)
"""Keys of an object under which the accepted answers may be."""
_ABOUT = frozenset({"style"})
"""Keys of an object that say nothing about the answer, such as verl's `style` beside `ground_truth`."""
MAX_ANSWERS = 1000
_LONGEST_KEPT = 1000
"""Longest label in characters whose answers are cached."""
_LONGEST_PYTHON = 20_000
"""Longest label in characters that is read as Python's notation."""
_MOST_WRAPPED = 3
"""Layers of text in JSON text, or of objects in objects, that are opened."""
_QUOTED = re.compile(r"[\[{(\s]*+['\"]")
"""The start of a list or object of texts; mathematics has no quotation marks there."""
_NO_COMMA = re.compile(r"['\"]\s+['\"]")
_LETTERS = {"\b": r"\b", "\f": r"\f", "\t": r"\t", "\r": r"\r"}
_ESCAPED = re.compile(r"[\b\f\t\r](?=[A-Za-z])")
"""Characters that JSON makes of a single backslash in LaTeX: `["\\frac12"]` with one backslash has a form
feed."""
_HINT = "write the answer as text, or several accepted ones as a list of texts"


class _Number(str):
    """A number of JSON, as it is written."""


def accepted_answers(label: str) -> tuple[str, ...]:
    """Return the answers that a label accepts; mostly the label itself.

    A label that is JSON (or Python's notation of it) is read as follows. A list with a text in it has the
    accepted answers, each a text or number. A list of numbers alone is mathematics, an interval or a list. An
    object has under one of ANSWER_KEYS an answer or the list of accepted ones, here also as numbers. A text
    in quotation marks is its content. Raises LabelError for a structure of another kind, with what to do.
    """
    return _read_once(label) if len(label) <= _LONGEST_KEPT else _distinct(label)


def _distinct(label: str) -> tuple[str, ...]:
    try:
        return tuple(dict.fromkeys(_accepted(label, _MOST_WRAPPED)))
    except RecursionError:
        raise LabelError(f"it is nested too deeply; {_HINT}") from None


_read_once = functools.lru_cache(maxsize=4096)(_distinct)


def _accepted(label: str, layers: int) -> list[str]:
    if label.strip() == "null":
        raise LabelError(f"it is null; {_HINT}")
    value = _read(label)
    if value is None:
        return [label]
    if isinstance(value, list) and _is_mathematics(value):
        # [5] may be the list of the one accepted answer 5
        return [label, *(number for number in value if len(value) == 1 and isinstance(number, str))]
    return _answers_in(value, layers)


def _answers_in(value: Any, layers: int) -> list[str]:
    if layers == 0:
        raise LabelError(f"it is nested too deeply; {_HINT}")
    if isinstance(value, _Number):
        return [value]
    if isinstance(value, str):
        return _accepted(_with_backslashes(value), layers - 1)
    if isinstance(value, dict):
        return _answers_in(_content(value), layers - 1)
    if isinstance(value, list):
        return _answers_of_list(value, layers)
    raise LabelError(f"it is or holds {_named(value)}, which is no answer; {_HINT}")


def _answers_of_list(values: list[Any], layers: int) -> list[str]:
    if not values:
        raise LabelError(f"it is or holds an empty list, so no answer is right; {_HINT}")
    if len(values) > MAX_ANSWERS:
        raise LabelError(f"it is a list of {len(values):,} answers; at most {MAX_ANSWERS:,} are compared")
    accepted: list[str] = []
    for value in values:
        if not isinstance(value, str):
            raise LabelError(f"it is a list with {_named(value)} in it; {_HINT}")
        is_text = not isinstance(value, _Number)
        accepted += _accepted(_with_backslashes(value), layers - 1) if is_text else [value]
    return accepted


def _with_backslashes(text: str) -> str:
    return _ESCAPED.sub(lambda match: _LETTERS[match[0]], text)


def _content(label: dict[Any, Any]) -> Any:
    """Return the value of an object's one key that has answers; keys without a value do not count."""
    keys = [key for key, value in label.items() if value is not None and key not in _ABOUT]
    if len(keys) == 1 and keys[0] in ANSWER_KEYS:
        return label[keys[0]]
    key_list = listed([repr(key)[:60] for key in label], most=5) or "no keys"
    raise LabelError(
        f"it is an object with {key_list}; one with a single key out of {', '.join(ANSWER_KEYS)} is "
        "understood, or give the --rm-type that grades it"
    )


def _read(label: str) -> Any:
    """Return the list, object or text in a label that is JSON or Python's notation; None for other labels."""
    text = label.strip()
    if not text or text[0] not in '[{"':
        return None
    try:
        value = json.loads(text, parse_int=_Number, parse_float=_Number, parse_constant=_refuse)
    except ValueError:
        value = None if text[0] == '"' else _python_value(text)
    return value if isinstance(value, list | dict | str) else None


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _python_value(text: str) -> Any:
    """Return the list or object of a text in Python's notation; None for other text."""
    if "'" not in text and '"' not in text:
        return None
    try:
        if len(text) > _LONGEST_PYTHON or _NO_COMMA.search(text):  # without commas Python joins the texts
            raise ValueError(text)
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # of a single backslash
            value = _as_json(ast.literal_eval(text))
    except (ValueError, SyntaxError, MemoryError, TypeError):
        if not _QUOTED.match(text):
            return None
        raise LabelError(
            f"it begins as a list or object of texts, and is neither JSON nor Python; {_HINT}"
        ) from None
    return value if isinstance(value, list | dict) else None


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    return _Number(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _is_mathematics(values: list[Any]) -> bool:
    """Return whether a list has numbers alone, also in lists of numbers such as a matrix."""
    return bool(values) and all(
        _is_mathematics(value) if isinstance(value, list) else isinstance(value, _Number) for value in values
    )


def _named(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, list) else f"a {type(value).__name__}"
