"""Large libraries are imported without a search for garbage among their modules."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import torch, Megatron or vLLM within this block, a sixth faster: Python would look for garbage among
    all that has been imported again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
