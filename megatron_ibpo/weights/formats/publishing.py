"""The last step of whatever writes a checkpoint: all of it is on the disk before it has its name."""

import os
import shutil
from pathlib import Path


def publish(partial: Path, final: Path) -> None:
    """Give the finished directory `partial` the name `final`, beside it, in place of what has it.

    After a loss of power there is the old one, the new one or, between two renames, none under that name;
    never a part of one.
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
    """Have a file's content, or a directory's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
