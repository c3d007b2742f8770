"""The last step of writing a checkpoint: all of it reaches the disk before it gets its name."""

import os
import shutil
from pathlib import Path


def publish(partial: Path, final: Path) -> None:
    """Rename the finished directory `partial` to `final`, beside it, replacing what has that name.

    After a power loss, that name holds the old directory, the new one or, between two renames, nothing; never
    a part of one.
    """
    for path in [*partial.rglob("*"), partial]:
        flush(path)
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    flush(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def flush(path: Path) -> None:
    """Flush a file's content, or a directory's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
