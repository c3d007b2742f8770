"""tyro's markers for fields. Trainers read no flags, so they work without tyro."""

from contextlib import suppress
from typing import Any

UseAppendAction: Any = None
"""Marks a flag that may be repeated."""
NO_FLAG: tuple[Any, ...] = (None,)
"""Marks a field that is not a flag."""
with suppress(ModuleNotFoundError):
    import tyro

    UseAppendAction = tyro.conf.UseAppendAction
    NO_FLAG = (tyro.conf.Fixed, tyro.conf.Suppress)
