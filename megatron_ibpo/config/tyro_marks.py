"""tyro's marks of fields. A trainer reads no flags, so that it does without tyro."""

from contextlib import suppress
from typing import Any

UseAppendAction: Any = None
"""A flag that may be repeated."""
NO_FLAG: tuple[Any, ...] = (None,)
"""A field that is no flag."""
with suppress(ModuleNotFoundError):
    import tyro

    UseAppendAction = tyro.conf.UseAppendAction
    NO_FLAG = (tyro.conf.Fixed, tyro.conf.Suppress)
