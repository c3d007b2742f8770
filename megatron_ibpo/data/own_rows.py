"""Prompts from a function of the user's own: `import://package.module:function`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from megatron_ibpo.config import load_hook
from megatron_ibpo.data.errors import DataError

__all__ = ["OWN_SCHEME", "own_rows"]

OWN_SCHEME = "import://"


def own_rows(spec: str, split: Literal["train", "eval"]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(which one, row) of all that function(split) gives; rows as in a JSONL file.

    Raises:
        ValueError: it cannot be loaded; DataError: it raises, or gives other than dictionaries.
    """
    function = load_hook("--prompt-data", spec.removeprefix(OWN_SCHEME))
    try:
        rows = list(function(split))
    except Exception as error:
        raise DataError(f"{spec}: it raised {type(error).__name__}: {error}") from error
    for number, row in enumerate(rows):
        where = f"{spec}, {split} row {number}"
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected a dictionary, found {type(row).__name__}")
        yield where, row
