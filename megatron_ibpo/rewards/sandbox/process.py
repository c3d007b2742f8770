"""One program in a sandbox: start it, bound it, read its output and end it from outside."""

from __future__ import annotations

import fcntl
import functools
import marshal
import os
import re
import resource
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ibpo.basics.supervised import adopt_orphans
from megatron_ibpo.rewards.sandbox import inside
from megatron_ibpo.rewards.sandbox.bubblewrap import (
    ENVIRONMENT,
    NOBODY,
    SandboxError,
    bare_python_command,
    bubblewrap_command,
)
from megatron_ibpo.rewards.sandbox.control_groups import control_groups
from megatron_ibpo.rewards.sandbox.seccomp import seccomp_filter

Mode = Literal["program", "calls", "serve", "check"]
"""Ways in which `inside` uses the source that it is given."""
Reached = Literal["time", "output"]

_SETUP_TIMEOUT = 30.0
"""Seconds until a sandbox is ready. It takes milliseconds; on a machine that swaps, much more."""
_END_TIMEOUT = 30.0
"""Seconds until the kernel has ended all processes of a sandbox."""
_LONGEST_STDERR = 4096
_CHUNK = 1 << 16
_KERNEL_BYTES = 64 << 20
"""Memory for what the kernel holds for a sandbox, besides the program's memory and files."""
_TASKS_OF_SANDBOX = 4
"""Tasks of the sandbox itself: bwrap's and the program's first, with room to spare."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    seconds: float = 6.0
    """Wall-clock time from the moment the sandbox is ready, and processor time of all its threads (in whole
    seconds). 6: LiveCodeBench's."""
    memory_bytes: int = 1 << 30
    """Address space. 1 GiB: what most judges of programs allow."""
    output_bytes: int = 8 << 20
    """Output on stdout. A program that writes more is ended."""
    disk_bytes: int = 16 << 20
    """Disk space of its working directory, which is in memory."""
    tasks: int = 32
    descriptors: int = 64


@dataclass(frozen=True)
class Execution:
    """The end of a program and its output."""

    stdout: bytes
    stderr: str
    status: int | None
    """Exit status, 128 + N after signal N; None: it was ended for a limit."""
    reached: Reached | None = None


class Process(AbstractContextManager["Process"]):
    """A running program, in a sandbox or without one. Used in a `with`, which ends it. `stdout` is what has
    been read of its output, `reached` the limit for which it is ended, and `first` the process id, as seen
    from here, of the first process of the sandbox."""

    def __init__(
        self,
        mode: Mode,
        source: str,
        arguments: Sequence[str] = (),
        *,
        stdin: bytes | int = b"",
        limits: Limits,
        isolated: bool = True,
        packages: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        forks: bool = False,
    ):
        """Start the program, and return once it is about to run its source. Raises SandboxError if the
        sandbox does not start.

        Args:
            source: text of a program, or of tests if the mode is `check`.
            arguments: arguments of the mode.
            stdin: input text, or a descriptor that becomes its stdin.
            isolated: run it in a sandbox.
            packages: files and directories of installed packages that it can read in the sandbox.
            environment: further variables in the sandbox.
            forks: in the sandbox too it may start processes by a fork.
        """
        self.stdout = bytearray()
        self._stderr = bytearray()
        self._limits = limits
        self.reached: Reached | None = None
        self._isolated = isolated
        self._packages, self._environment, self._forks = packages, environment, forks
        self._handle = -1
        self._ends = ExitStack()
        """Actions left to do at the end, in reverse order."""
        try:
            self._start(mode, source, arguments, stdin)
        except BaseException:
            self.end()
            raise
        self._deadline = time.monotonic() + limits.seconds

    def _start(self, mode: Mode, source: str, arguments: Sequence[str], stdin: bytes | int) -> None:
        deadline = time.monotonic() + _SETUP_TIMEOUT
        as_root = self._isolated and os.geteuid() == 0
        limits, groups = self._limits, list[Path]()
        if self._isolated:
            memory = limits.memory_bytes + limits.disk_bytes + _KERNEL_BYTES
            tasks = limits.tasks + _TASKS_OF_SANDBOX
            groups = self._ends.enter_context(control_groups(memory, tasks))
        with ExitStack() as theirs:
            ready, ready_theirs = _pipe(self._ends, theirs)
            self._out, out = _pipe(self._ends, theirs)
            self._err, err = _pipe(self._ends, theirs)
            program = source.encode(errors="surrogatepass")
            passed = [_file_in_memory(theirs, _runner()), _file_in_memory(theirs, program), ready_theirs]
            build, sandbox_fds = list[str](), tuple[int, ...]()
            if self._isolated:
                info, info_theirs = _pipe(self._ends, theirs)
                block_theirs, block = _pipe(theirs, self._ends)
                sandbox_fds = info_theirs, block_theirs, _file_in_memory(theirs, _filter(self._forks))
                contents = limits.disk_bytes, self._packages, self._environment
                build = bubblewrap_command(*sandbox_fds, *contents, as_root=as_root)
            inherited = [*passed, *sandbox_fds]
            words = [*passed, max(inherited), NOBODY if as_root else -1, mode, *arguments]
            command = build + bare_python_command(inside.STUB, [str(word) for word in words])
            _adopt()
            process = subprocess.Popen(
                command,
                stdin=stdin if isinstance(stdin, int) else _file_in_memory(theirs, stdin),
                stdout=out,
                stderr=err,
                pass_fds=inherited,
                env={} if self._isolated else ENVIRONMENT,
                cwd="/" if self._isolated else self._ends.enter_context(tempfile.TemporaryDirectory()),
                # a sandbox stays in the process group of its owner, and so is killed with a verifier's
                start_new_session=not self._isolated,
            )
            self._process = process
            self._ends.callback(self._end_processes)
        self.first = first = self._first_process(info, deadline) if self._isolated else process.pid
        self._handle = os.pidfd_open(first)
        _bound(first, limits)
        if self._isolated:
            _enter(groups, first)
            _map_users(first, as_root=as_root)
            os.write(block, b"1")
        if _read(ready, deadline) != b"1":
            raise self.failure("does not start a program")

    def _first_process(self, info: int, deadline: float) -> int:
        """Return the process id, as seen from here, of the first process, which takes all others down."""
        info_json = b""
        while not info_json.rstrip().endswith(b"}"):
            if not (chunk := _read(info, deadline)):
                raise self.failure("cannot be built")
            info_json += chunk
        match = re.search(rb'"child-pid": *(\d+)', info_json)
        assert match is not None
        return int(match[1])

    def failure(self, problem: str) -> SandboxError:
        """Return the error of a sandbox that fails, with the last line that it has written to stderr."""
        with suppress(BlockingIOError):
            os.set_blocking(self._err, False)
            self._stderr += os.read(self._err, _CHUNK)
        lines = self._stderr.decode(errors="replace").split("\n")
        last_line = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
        return SandboxError(f"the sandbox {problem}: {last_line}")

    def read(self, enough: Callable[[bytearray], bool], deadline: float) -> bool:
        """Read until there is enough output; False if the program ended, or reached a limit or the deadline
        (as of `time.monotonic()`), before."""
        return enough(self.stdout) or self._pump(enough, min(deadline, self._deadline))

    def finish(self) -> Execution:
        """Read to the end of the program, or to a limit, and end it."""
        self._pump(lambda _: False, self._deadline)
        status = None
        if self.reached is None:
            with suppress(subprocess.TimeoutExpired):
                status = self._process.wait(_END_TIMEOUT)
        self.end()
        status = status if status is None or status >= 0 else 128 - status
        return Execution(bytes(self.stdout), self._stderr.decode(errors="replace"), status, self.reached)

    def _pump(self, enough: Callable[[bytearray], bool], deadline: float) -> bool:
        """Read until there is enough output, all has ended and is read, or a limit is reached."""
        poll = select.poll()
        for descriptor in (self._out, self._err, self._handle):
            poll.register(descriptor, select.POLLIN)
        waited_for = {self._out, self._err, self._handle}
        while waited_for:
            seconds_left = deadline - time.monotonic()
            ready = poll.poll(max(0.0, seconds_left) * 1e3) if seconds_left > 0 else []
            if not ready:
                self.reached = "time"
                return False
            for descriptor, _ in ready:
                if descriptor == self._handle or not self._take(descriptor):
                    waited_for.discard(descriptor)
                    poll.unregister(descriptor)
            if len(self.stdout) > self._limits.output_bytes:
                self.reached = "output"
                return False
            if enough(self.stdout):
                return True
        return False

    def _take(self, descriptor: int) -> bool:
        """Read some of the available output; False at the end."""
        read = os.read(descriptor, _CHUNK)
        if descriptor == self._out:
            self.stdout += read
        else:
            self._stderr += read
            del self._stderr[:-_LONGEST_STDERR]
        return bool(read)

    def end(self) -> None:
        """End all its processes, and wait until they have ended."""
        self._ends.close()

    def _end_processes(self) -> None:
        """End the sandbox's first process: bwrap then ends, and all other processes with it."""
        if self._handle < 0:
            self._process.kill()
        elif self._isolated:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        else:
            with suppress(ProcessLookupError):
                os.killpg(self.first, signal.SIGKILL)
        try:
            self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._handle >= 0:
            os.close(self._handle)
            with suppress(ChildProcessError):
                os.waitpid(self.first, 0)  # adopted, once bwrap has ended

    def __exit__(self, *_: object) -> None:
        self.end()


def _pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    read, write = os.pipe()
    reader.callback(os.close, read)
    writer.callback(os.close, write)
    return read, write


def _file_in_memory(stack: ExitStack, content: bytes) -> int:
    """Return a descriptor of content that can be read and never changed."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, descriptor)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    fcntl.fcntl(
        descriptor,
        fcntl.F_ADD_SEALS,
        fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE,
    )
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


@functools.cache
def _runner() -> bytes:
    """Return `inside`, compiled; programs run on the same Python version as this process."""
    path = Path(inside.__file__)
    return marshal.dumps(compile(path.read_text(encoding="utf-8"), "inside.py", "exec", dont_inherit=True))


@functools.cache
def _filter(forks: bool) -> bytes:
    try:
        return seccomp_filter(forks=forks)
    except ValueError as error:
        raise SandboxError(str(error)) from None


def _read(descriptor: int, deadline: float) -> bytes:
    """Return the next bytes of a pipe; empty at its end or at the deadline."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
        return b""
    return os.read(descriptor, _CHUNK)


def _bound(process: int, limits: Limits) -> None:
    """Set the limits of a process and of everything it starts."""
    seconds = int(limits.seconds) + 1
    for limit, bound in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.disk_bytes),
        (resource.RLIMIT_NPROC, limits.tasks),
        (resource.RLIMIT_NOFILE, limits.descriptors),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.prlimit(process, limit)
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.prlimit(process, limit, (bound, bound))


def _enter(groups: Sequence[Path], process: int) -> None:
    try:
        for group in groups:
            (group / "cgroup.procs").write_text(str(process))
    except OSError as error:
        raise SandboxError(f"the sandbox cannot enter its control group: {error}") from None


def _map_users(process: int, *, as_root: bool) -> None:
    """Map the users of a process's user namespace. Root builds the sandbox as root, which then becomes
    NOBODY; a user without rights can map only itself, to NOBODY."""
    uid, gid = os.getuid(), os.getgid()
    try:
        if not as_root:
            Path(f"/proc/{process}/setgroups").write_text("deny")
        for name, own_id in (("uid_map", uid), ("gid_map", gid)):
            lines = f"0 {own_id} 1\n{NOBODY} {NOBODY} 1\n" if as_root else f"{NOBODY} {own_id} 1\n"
            Path(f"/proc/{process}/{name}").write_text(lines)
    except OSError as error:
        raise SandboxError(f"users cannot be mapped in the sandbox's user namespace: {error}") from None


@functools.cache
def _adopt() -> None:
    """Become the parent of orphaned descendants. bwrap ends without waiting for the first process of its
    sandbox, which would stay as a zombie if the machine's (or container's) first process does not reap
    orphans."""
    adopt_orphans()
