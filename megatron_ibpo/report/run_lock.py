"""The lock on a run's directory: one run at a time."""

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ibpo.config import ConfigError

LOCK_FILE = "run.lock"

log = logging.getLogger(__name__)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold `run_dir`, which is created, until the end of the block or of this process, however it ends.

    The kernel holds the lock; the file stays and only names the holder. On NFS the lock works across machines
    if the file system supports locks; if it does not, a line says so.

    Raises:
        ConfigError: another run holds it, which is named; or it cannot be written.
    """
    path = run_dir / LOCK_FILE
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")  # not truncated: it may name another holder
    except OSError as error:
        raise ConfigError(f"--run-dir: {run_dir} cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                holder = path.read_text(encoding="utf-8").strip() or "another process"
                raise ConfigError(
                    f"--run-dir: {run_dir} is in use by {holder}; wait for that run, stop it, or choose "
                    "another directory"
                ) from None
            log.warning(
                "%s: locks do not work here (%s), so a second run in this directory would not be noticed",
                run_dir,
                error.strerror,
            )
        else:
            file.truncate(0)
            started = time.strftime("%Y-%m-%d %H:%M:%S %z")
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {started}\n")
            file.flush()
        yield
