"""Executors of programs: in a sandbox on this machine, which is tested before it runs any code of a model, on
a server or, on explicit request, without a sandbox."""

from __future__ import annotations

import functools
import itertools
import json
import re
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ibpo.rewards.http_wires import is_transient, server_url
from megatron_ibpo.rewards.sandbox import Execution, Limits, Process, Reached, SandboxError, inside
from megatron_ibpo.rewards.sandbox.bubblewrap import NOBODY

_ATTEMPTS = 3
_FIRST_WAIT = 1.0
"""Seconds before the first retry of a request to a server; doubled each time."""
_SERVER_SLACK = 30.0
"""Seconds that a server may take beyond the program's own time, for queueing and starting."""
_LARGEST_ANSWER = 64 << 20
_LONG = "\ue000"
_LONG_INTEGER = re.compile(r'"\\ue000(-?\d+)"')
"""A long integer in JSON, where `json.dumps` can write text alone."""
_FAULTS_OF_SERVER = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Errors of a server that cannot be reached, or whose answer does not follow the protocol."""


ArgumentLists = Sequence[list[Any]]


@dataclass(frozen=True)
class Call:
    """The outcome of one call of a function."""

    returned: bool
    result: Any = None
    """Value that the function returned, as JSON represents it."""
    reached: Reached | None = None


class LocalExecutor:
    """An executor that starts processes on this machine. Whatever a program does is a result; an executor
    that fails raises SandboxError."""

    def __init__(self, *, isolated: bool = True):
        """Run each program in its own sandbox if `isolated`; otherwise only its resource limits hold it."""
        self._process = partial(Process, isolated=isolated)

    def run(self, program: str, first: str, stdin: str, limits: Limits) -> Execution:
        """Run the program as one that reads stdin and writes stdout, after `first`, which is Python that runs
        in its namespace."""
        stdin_bytes = stdin.encode(errors="surrogatepass")
        with self._process("program", program, [first], stdin=stdin_bytes, limits=limits) as process:
            return process.finish()

    def call(
        self, program: str, first: str, name: str, arguments: ArgumentLists, limits: Limits, total: float
    ) -> Iterator[Call]:
        """Call one function repeatedly, or a method of `Solution` if the program has such a class. Ends after
        a call that the program did not answer. `limits` are those of one call; all have `total` seconds."""
        requests = _requests(arguments)
        longest = replace(limits, seconds=min(total, limits.seconds * len(arguments)))
        with self._process("calls", program, [first, name], stdin=requests, limits=longest) as process:
            start = 0
            for _ in arguments:
                if not process.read(partial(_has_line, start), time.monotonic() + limits.seconds):
                    yield Call(returned=False, reached=process.reached)
                    return
                end = process.stdout.index(b"\n", start) + 1
                yield _answer(bytes(process.stdout[start:end]))
                start = end

    def check(self, program: str, tests: str, entry_point: str | None, limits: Limits) -> Execution:
        """Run tests written in Python; the status is 0 if the program passes. The two are in sandboxes of
        their own, joined by a socket pair that carries plain values. What the program does to its own process
        cannot reach the code that decides."""
        ours, theirs = socket.socketpair()
        with ours, theirs:  # noqa: SIM117 (the code between the two closes what matters)
            with self._process("serve", program, stdin=theirs.fileno(), limits=limits):
                theirs.close()
                check = self._process("check", tests, [entry_point or ""], stdin=ours.fileno(), limits=limits)
                with check as checker:
                    ours.close()
                    return _passed(checker.finish())


class RemoteExecutor:
    """An executor with the methods of `LocalExecutor`: a server that speaks the HTTP protocol of
    SandboxFusion, https://bytedance.github.io/SandboxFusion/docs/docs/reference/sandbox-run-code."""

    def __init__(self, url: str):
        """Use the server at a URL such as http://sandbox:8080. Raises ValueError if it is not an http(s)
        URL."""
        self._url = server_url("--code-executor", url) + "/run_code"

    def run(self, program: str, first: str, stdin: str, limits: Limits) -> Execution:
        return self._post(_script("program", program, first), stdin, limits)

    def call(
        self, program: str, first: str, name: str, arguments: ArgumentLists, limits: Limits, total: float
    ) -> Iterator[Call]:
        """Make all calls before the first result is known."""
        longest = replace(limits, seconds=min(total, limits.seconds * len(arguments)))
        done = self._post(_script("calls", program, first, name), _requests(arguments).decode(), longest)
        lines = done.stdout.splitlines()[: len(arguments)]
        yield from map(_answer, lines)
        if len(lines) < len(arguments):
            yield Call(returned=False, reached=done.reached)

    def check(self, program: str, tests: str, entry_point: str | None, limits: Limits) -> Execution:
        """Run tests; they and the program are two processes in one sandbox of the server."""
        script = _script("check_here", tests, entry_point or "", _script("serve", program))
        return _passed(self._post(script, "", limits))

    def _post(self, code: str, stdin: str, limits: Limits) -> Execution:
        body: dict[str, Any] = {"code": code, "language": "python", "stdin": stdin}
        body |= {"compile_timeout": limits.seconds, "run_timeout": limits.seconds}
        body |= {"memory_limit_MB": limits.memory_bytes >> 20, "files": {}, "fetch_files": []}
        for attempt in itertools.count(1):
            try:
                return _execution(self._ask(body, limits.seconds + _SERVER_SLACK))
            except (*_FAULTS_OF_SERVER, SandboxError) as error:
                is_final = isinstance(error, urllib.error.HTTPError) and not is_transient(error.code)
                if is_final or attempt == _ATTEMPTS:
                    reason = f"{type(error).__name__}: {error} (attempt {attempt})"
                    raise SandboxError(f"--code-executor {self._url}: {reason}") from None
            time.sleep(_FIRST_WAIT * 2 ** (attempt - 1))
        raise AssertionError  # it counts without end

    def _ask(self, body: dict[str, Any], timeout: float) -> Any:
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            content = response.read(_LARGEST_ANSWER + 1)
        if len(content) > _LARGEST_ANSWER:
            raise ValueError("the answer is too long")
        return json.loads(content)


Executor = LocalExecutor | RemoteExecutor


def _execution(answer: Any) -> Execution:
    if answer["status"] not in ("Success", "Failed"):
        raise SandboxError(f"{answer['status']}: {answer.get('message')}")
    result = answer["run_result"]
    stdout, stderr = (result["stdout"] or "").encode(errors="surrogatepass"), result["stderr"] or ""
    if result["status"] == "TimeLimitExceeded":
        return Execution(stdout, stderr, None, "time")
    if result["status"] != "Finished":
        raise SandboxError(f"{result['status']}: {stderr[-500:]}")
    return Execution(stdout, stderr, int(result["return_code"]))


def _has_line(start: int, output: bytearray) -> bool:
    return output.find(b"\n", start) >= 0


def _requests(arguments: ArgumentLists) -> bytes:
    lines = (
        json.dumps(call_arguments, default=lambda digits: f"{_LONG}{digits}") for call_arguments in arguments
    )
    return b"".join(_LONG_INTEGER.sub(r"\1", line).encode() + b"\n" for line in lines)


def long_integer(digits: str) -> int | Decimal:
    """Return an integer of JSON. One of more than 4,300 digits is a Decimal: Python refuses to read it as an
    int, which would take time quadratic in its length. The two are equal if their values are."""
    return int(digits) if len(digits) <= sys.int_info.default_max_str_digits else Decimal(digits)


def _answer(line: bytes) -> Call:
    """Return what a program reports as the result of its call; it may report anything."""
    try:
        returned, result = json.loads(line, parse_int=long_integer)
    except (ValueError, TypeError, RecursionError):
        return Call(returned=False)
    return Call(returned is True, result)


def _passed(checker: Execution) -> Execution:
    """Return status 0 only if the tests ran to their end."""
    passed = checker.stdout.decode(errors="replace").splitlines()[-1:] == [inside.PASSED]
    return checker if passed or checker.status != 0 else replace(checker, status=1)


@functools.cache
def _definitions() -> str:
    """Return the text of `inside` without its last lines, which run it."""
    return Path(inside.__file__).read_text(encoding="utf-8").partition('\nif __name__ == "__main__":')[0]


def _script(mode: str, *arguments: str) -> str:
    """Return one program that does what a mode of `inside` does."""
    return f"{_definitions()}\nrun({', '.join(map(ascii, (mode, *arguments)))})\n"


@functools.cache
def open_executor(url: str | None, *, unsafe: bool) -> Executor:
    """Open the executor for programs, and try it once. Raises SandboxError with what to do if no sandbox can
    be had on this machine, and ConfigError if `url` is not a URL."""
    if url is not None:
        return RemoteExecutor(url)
    if not unsafe:
        check_isolation()
    return LocalExecutor(isolated=not unsafe)


_HINT = (
    "It needs bubblewrap (apt-get install bubblewrap) and user namespaces; docs/code_rewards.md says how to "
    "allow them, also in a container. Or name a server that runs the code (--code-executor URL) or, only "
    "where the machine itself may be lost, give --unsafe-code-execution."
)
_PROBE = """
import json, os, resource, socket

def refused(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        return True
    return False

def fork():
    if os.fork() == 0:
        os._exit(0)

print(json.dumps({
    "runs as nobody": (os.getuid(), os.getgid()) == (%(nobody)d, %(nobody)d),
    "has process numbers of its own": os.getpid() < 10,
    "sees no file of the host": refused(open, %(file)r) and refused(os.listdir, "/proc"),
    "cannot write to its root": refused(open, "/file", "w"),
    "can write to its directory": os.getcwd() == "/tmp" and not refused(open, "file", "w"),
    "cannot start processes": refused(fork),
    "has no network": refused(socket.socket, socket.AF_INET),
    "has a bounded address space": resource.getrlimit(resource.RLIMIT_AS)[1] == %(memory)d,
    "has a bounded number of threads": resource.getrlimit(resource.RLIMIT_NPROC)[1] == %(tasks)d,
    "has no environment": "PATH" not in os.environ or os.environ["PATH"] == "/nonexistent",
    "has no more descriptors": refused(os.fstat, 3),
}))
"""


def check_isolation() -> None:
    """Run a program in a sandbox that tries each forbidden action. Takes about 0.2 s. Raises SandboxError
    with what to do if one succeeded, or if there is no sandbox."""
    limits = Limits()
    with tempfile.NamedTemporaryFile() as file:
        values = {"nobody": NOBODY, "file": file.name}
        probe = _PROBE % (values | {"memory": limits.memory_bytes, "tasks": limits.tasks})
        try:
            execution = LocalExecutor().run(probe, "", "", Limits(seconds=30))
        except SandboxError as error:
            raise SandboxError(f"{error}. {_HINT}") from None
    try:
        findings: dict[str, bool] = json.loads(execution.stdout)
    except ValueError:
        output = execution.stderr.strip() or f"status {execution.status}"
        raise SandboxError(f"the sandbox cannot run Python: {output}. {_HINT}") from None
    if broken := [action for action, holds in findings.items() if not holds]:
        raise SandboxError(f"the sandbox does not isolate: this check failed: a program {broken[0]}. {_HINT}")
