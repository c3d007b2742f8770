"""LiveCodeBench's rows (arXiv 2403.07974), with packed tests and two kinds of programs."""

import base64
import binascii
import io
import json
import pickle
import zlib
from datetime import date
from typing import Any

from megatron_ibpo.basics.strict_json import read_json

FIRST_DAY, LAST_DAY = date(2025, 2, 1), date(2025, 5, 31)
"""First and last contest_date of the window 25.02-25.05."""
_MOST_BYTES = 2**28
"""Limit of one problem's private tests in bytes, unpacked. It is far more than any problem has; a small file
could expand to more."""


def in_window(contest_date: str) -> bool:
    """Return whether a problem is in the window. Raises ValueError unless the date is an ISO date."""
    return FIRST_DAY <= date.fromisoformat(contest_date[:10]) <= LAST_DAY


def code_label(row: dict[str, Any]) -> str:
    """Return the label for the verifier `code`: all tests of a row, public ones first.

    Raises:
        ValueError: the tests cannot be unpacked, or there are none; the message names the field.
    """
    tests = [*_tests(row, "public_test_cases"), *_tests(row, "private_test_cases")]
    if not tests:
        raise ValueError("it has no tests")
    label: dict[str, Any] = {
        "inputs": [test["input"] for test in tests],
        "outputs": [test["output"] for test in tests],
    }
    if (name := function_name(row)) is not None:
        label["fn_name"] = name
    return json.dumps(label)


def function_name(row: dict[str, Any]) -> str | None:
    """Return the name of the method that the tests call; None for a program that reads stdin. Raises
    ValueError."""
    try:
        metadata = read_json(row.get("metadata", ""))
        name = metadata.get("func_name")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"field 'metadata' must be the text of a JSON object: {error}") from None
    return name or None


def _tests(row: dict[str, Any], field: str) -> list[dict[str, str]]:
    try:
        tests = read_json(_text(row[field]))
    except KeyError:
        raise ValueError(f"no field {field!r}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"field {field!r}: its tests cannot be read: {error}") from None
    fine = isinstance(tests, list) and all(
        isinstance(test, dict) and isinstance(test.get("input"), str) and isinstance(test.get("output"), str)
        for test in tests
    )
    if not fine:
        raise ValueError(f"field {field!r} must be a list of objects with texts 'input' and 'output'")
    return tests


def _text(packed: str) -> str:
    """Return JSON text that is given as it is, or as base64 of zlib of a pickle of it."""
    if packed.lstrip().startswith("["):
        return packed
    try:
        content = _unzipped(base64.b64decode(packed, validate=True))
        text = _TextUnpickler(io.BytesIO(content)).load()
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, IndexError, KeyError) as error:
        raise ValueError(f"neither JSON nor base64 of zlib of a pickled text: {error}") from None
    if isinstance(text, bytes):
        return text.decode()
    if not isinstance(text, str):
        raise ValueError(f"its pickle holds a {type(text).__name__}, where a text must be")
    return text


def _unzipped(data: bytes) -> bytes:
    stream = zlib.decompressobj()
    content = stream.decompress(data, _MOST_BYTES)
    if stream.unconsumed_tail:
        raise ValueError(f"unpacked it has more than {_MOST_BYTES:,} bytes")
    if not stream.eof:
        raise ValueError("it is cut off")
    return content


class _TextUnpickler(pickle.Unpickler):
    """An unpickler for texts only. Other pickles may run code through the names they look up, so every lookup
    is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only a text may be in it")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside, and only a text may be in it")
