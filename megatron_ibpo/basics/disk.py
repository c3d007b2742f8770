"""Writes that outlast a power loss."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Flush a file's content, or the names in a directory, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
