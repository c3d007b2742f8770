"""Environment variables that are set within a block, for the processes that start there."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables within the block, and touch no other. Native threads read the
    environment whenever they like, and `mock.patch.dict` would take all of it away and put it back."""
    previous = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ |= variables
    try:
        yield
    finally:
        for name in variables.keys() - previous.keys():
            del os.environ[name]
        os.environ |= previous
