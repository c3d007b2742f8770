"""Writing of checkpoints: directories that are complete or absent (disk space first, checksums last, then one
rename), and files that a few threads write at once, in bounded memory."""

import errno
import fcntl
import hashlib
import math
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.basics.user_files import flush
from megatron_ibpo.weights.formats.checkpoint_files import ALGORITHM, write_integrity
from megatron_ibpo.weights.formats.run_state import partial_of

T = TypeVar("T")

BUFFER_BYTES = 8 * 1024**2
"""Bytes collected before they are hashed and written: whole blocks of any disk."""


class DiskSpaceError(OSError):
    """The disk has not enough room for a checkpoint."""

    errno = errno.ENOSPC


def disk_error(error: Exception) -> Exception:
    """Return the disk's own error if it caused this one. torch closes the archive that it could not write,
    and then complains of that: a full disk would be a RuntimeError, "unexpected pos"."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return error


class HashedFile:
    """A new file, written front to back. It is hashed on the way, and is on the disk once it is closed.
    Writes bypass the system's cache if the file system allows it: data that is written once and read later
    would only evict what is being read, and cost a copy and a page of memory each."""

    def __init__(self, path: Path):
        self.path = path
        self.size = 0
        self._file, self._is_direct = _create(path)
        self._hash = hashlib.new(ALGORITHM)
        self._buffer = mmap.mmap(-1, BUFFER_BYTES)
        self._used = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write the data. Raises DiskSpaceError, naming the file, when the disk is full."""
        content, done = memoryview(data).cast("B"), 0
        while done < content.nbytes:
            part = content[done : done + BUFFER_BYTES - self._used]
            self._buffer[self._used : self._used + part.nbytes] = part
            self._used += part.nbytes
            self.size += part.nbytes
            done += part.nbytes
            if self._used == BUFFER_BYTES:
                self._write_out()
        return done

    def _write_out(self) -> None:
        with memoryview(self._buffer) as buffer, buffer[: self._used] as pending:
            self._hash.update(pending)
            done = 0
            try:
                while done < self._used:
                    done += os.write(self._file, pending[done:])
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    num_written = self.size - self._used + done
                    raise DiskSpaceError(f"{self.path}: no room after {num_written} bytes: {error}") from None
                raise
        self._used = 0

    def flush(self) -> None:
        """Do nothing; callers that treat this as an ordinary file need it. The last bytes are kept back until
        `close`."""

    def close(self) -> str:
        """Close the file; return the digest of its content."""
        if self._is_direct:  # the end need not fill a block
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT)
        self._write_out()
        os.fsync(self._file)
        os.close(self._file)
        return self._hash.hexdigest()


def _create(path: Path) -> tuple[int, bool]:
    """Return (descriptor of a new file, whether writes to it bypass the system's cache)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666), hasattr(os, "O_DIRECT")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    path.unlink(missing_ok=True)  # some file systems refuse O_DIRECT after they have made the file
    return os.open(path, flags, 0o666), False


def write_directory(
    target: Path,
    world: World,
    needed: int,
    write: Callable[[Path], T],
    finish: Callable[[Path, list[T]], dict[str, str]],
) -> None:
    """Fill a directory, on all ranks, and put it at `target`. Collective; all ranks share the file system. It
    is filled beside `target` under a hidden name, which a killed run leaves behind and the next run removes.

    Args:
        needed: bytes that the disk must have free, and 1 % more.
        write: writes every rank's own files, without collectives. Its result must pickle.
        finish: writes the remaining files on rank 0, from all ranks' results. Returns the digests that are
            already known, by file name; other files are hashed.

    Raises:
        DiskSpaceError: before anything is written, or when the disk fills up on the way.
        whatever `write` or `finish` raise: nothing is kept then.
    """
    partial = partial_of(target)

    def prepare() -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < needed * 1.01:
            raise DiskSpaceError(
                f"{target.parent}: a checkpoint of {needed / 1e9:.2f} GB does not fit, {free / 1e9:.2f} GB "
                "are free; free some space or write elsewhere"
            )
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()

    world.on_rank_0(prepare)
    try:
        results = world.on_all_ranks(lambda: write(partial))

        def complete() -> None:
            write_integrity(partial, finish(partial, results))
            publish(partial, target)

        world.on_rank_0(complete)
    except BaseException:
        if world.is_rank_0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def publish(partial: Path, final: Path) -> None:
    """Rename the finished directory `partial` to `final`, beside it, replacing what has that name. After a
    power loss, that name holds the old directory, the new one or, between two renames, nothing; never a
    part."""
    for path in [*partial.rglob("*"), partial]:
        flush(path)
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    flush(final.parent)
    shutil.rmtree(old, ignore_errors=True)


THREADS_PER_CORE = 2
"""Threads per core: one computes while the other waits for the disk."""
MAX_THREADS = 8
MEMORY = 768 * 1024**2
"""Bytes of tensors in work at once; only a single larger tensor may exceed it."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Job(Generic[Item]):
    """A file and its content."""

    file: str
    items: Sequence[Item]
    num_bytes: int


class Stopped(Exception):
    """Raised in a thread because another thread failed."""


class WorkingMemory:
    """Memory that threads share to work in. A thread waits until some is free, and ends when another thread
    has failed. It is reused: the kernel takes longer to hand out fresh pages than it takes to fill them."""

    def __init__(self) -> None:
        self._used = 0
        self._free: list[mmap.mmap] = []
        self._stopping = False
        self._changed = threading.Condition()

    @contextmanager
    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield a tensor with undefined content. Raises Stopped when another thread has failed."""
        count = math.prod(shape)
        memory = self._take(max(count * dtype.itemsize, mmap.PAGESIZE))
        try:
            yield torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
        finally:
            with self._changed:
                self._free.append(memory)
                self._changed.notify_all()

    def _take(self, num_bytes: int) -> mmap.mmap:
        with self._changed:
            while not self._stopping:
                fitting = [memory for memory in self._free if len(memory) >= num_bytes]
                if fitting:
                    memory = min(fitting, key=len)
                    self._free.remove(memory)
                    return memory
                self._used -= sum(len(memory) for memory in self._free)  # all of it too small
                self._free.clear()
                if not self._used or self._used + num_bytes <= MEMORY:
                    self._used += num_bytes
                    return huge_pages(num_bytes)
                self._changed.wait()
            raise Stopped

    def check(self) -> None:
        """Raise Stopped when another thread has failed."""
        if self._stopping:
            raise Stopped

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()


def huge_pages(num_bytes: int) -> mmap.mmap:
    """Return fresh memory in huge pages."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def run_jobs(jobs: list[Job[Item]], work: Callable[[Job[Item], WorkingMemory], Result]) -> list[Result]:
    """Run `work` on every job, in threads; the first error ends all of them and is raised."""
    threads = max(1, min(len(jobs), THREADS_PER_CORE * len(os.sched_getaffinity(0)), MAX_THREADS))
    working_memory = WorkingMemory()
    inner = torch.get_num_threads()
    torch.set_num_threads(1)  # the threads here are enough
    try:
        with ThreadPoolExecutor(threads) as pool:
            futures = [pool.submit(work, job, working_memory) for job in jobs]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                working_memory.stop()
    finally:
        torch.set_num_threads(inner)
    for future in futures:
        if (error := future.exception()) is not None and not isinstance(error, Stopped):
            raise error
    return [future.result() for future in futures]
