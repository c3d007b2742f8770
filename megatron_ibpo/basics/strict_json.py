"""JSON in strict accordance with its standard. Python's own reader also accepts NaN, Infinity, numbers that
become infinite and lone surrogates, and fails with a RecursionError if brackets nest too deep."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

DEEPEST = 100
"""Deepest nesting of brackets: more than anything here needs, and few enough for later walks."""

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""The escape of a surrogate, half of a character beyond U+FFFF."""


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is not JSON in UTF-8, has a number that is not
    finite or a lone surrogate, or nests deeper than DEEPEST."""
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise _too_deep() from None
    if text.count("[") + text.count("{") > DEEPEST:
        _check_depth(value)
    if _HALF.search(text):
        _check_characters(value)
    return value


def json_value(value: Any, levels: int = DEEPEST) -> Any:
    """Return a value that JSON can hold: times and bytes become text, NaN and infinity become null. Raises
    ValueError if it nests deeper than `levels`, or holds itself."""
    if isinstance(value, Mapping | list | tuple) and levels == 0:
        raise ValueError(f"nests deeper than {DEEPEST} levels")
    if isinstance(value, Mapping):
        return {str(key): json_value(item, levels - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item, levels - 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number in JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def _too_deep() -> ValueError:
    return ValueError(f"its brackets nest deeper than {DEEPEST} levels")


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST + 1):
        items = (item for box in level for item in (box.values() if isinstance(box, dict) else box))
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise _too_deep()


def _check_characters(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"it holds half a character (\\u{ord(half):04x} without its other half)") from None
