"""The program in the sandbox of generated tasks: it forks judges, in which reasoning_gym's scorers judge
answers. It imports nothing of the package.

`scorer_sandbox` starts it with its socket as stdin, and sends the filter of a judge's system calls. It
answers with one message, empty if a judge is confined, else what a judge can do. Then it answers every
request, (task, whether its judge is kept, parameters, attempts), with one record for each attempt. The
parameters and each attempt, (answer, entry), are pickles that only a judge opens, after it has given up
nearly every system call (`computing_filter`). It has one descriptor, and ends after one answer unless its
scorer evaluates nothing.
"""

import ctypes
import fractions
import gc
import os
import pickle
import re
import resource
import select
import signal
import socket
import struct
import sys
import time
import types
from contextlib import suppress

TYPE_CHECKING = False  # as in `inside`
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

CREATE_S = 10.0
"""Seconds of processor time in which a task's dataset must be made. The slowest takes half a second."""
JUDGE_S = 2.0
"""Seconds of processor time that one answer may take, see `megatron_ibpo.rewards.math`."""
WALL_S = 30.0
"""Further seconds after which a judge that neither computes nor answers is given up."""
MEMORY_BYTES = 768 << 20
"""Address space of a judge. The library itself takes 200 MiB of it."""

READY, RIGHT, WRONG, RAISED, UNFIT = b"p", b"r", b"w", b"x", b"u"
"""Kinds of records of a judge: its dataset is made; the answer is right, wrong, or the scorer raised; the
dataset cannot be made."""
DIED, SILENT = b"d", b"s"
"""Kinds of this process: the judge died or took too much processor time; it ended or waits for no reason of
its own."""
HEAD = struct.Struct("<cH")
"""Kind of a record, and the length of the text that follows."""
LENGTH = struct.Struct("<I")
LONGEST_TEXT = 300
_MAX_JUDGES = 16
"""Judges that are kept; beyond them the one that was first made ends."""
_LOOK_EVERY_MS = 50
_HIGHEST_DESCRIPTOR = 256
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _FILTER_MODE = 1, 22, 2
_libc = ctypes.CDLL(None)


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("steps", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def main() -> None:
    """Import the library and answer requests until the owner is gone."""
    control = os.dup(0)
    nowhere = os.open("/dev/null", os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    import_library()
    gc.collect()
    gc.freeze()  # a collection in a judge would copy the pages that it shares
    steps = receive(control) or b""
    program = _Program(len(steps) // 8, steps)
    findings = Judge(program, probe).record(CREATE_S)
    broken = findings[1] if findings[0] == READY else b"no process can be forked in it"
    _send(control, broken)
    if broken:
        return
    os.dup2(0, 2)
    serve(control, program)


def import_library() -> None:
    """Import reasoning_gym without matplotlib, with which a package of its draws: a quarter of the time."""
    names = ["matplotlib.pyplot", "matplotlib.animation", "matplotlib.collections", "mpl_toolkits.mplot3d"]
    stand_ins = {
        name: types.ModuleType(name)
        for name in ("matplotlib", "mpl_toolkits", *names)
        if name not in sys.modules
    }
    if "mpl_toolkits.mplot3d" in stand_ins:
        stand_ins["mpl_toolkits.mplot3d"].Axes3D = None  # type: ignore[attr-defined]
    sys.modules.update(stand_ins)
    try:
        import reasoning_gym  # noqa: F401
    finally:
        for name in stand_ins:  # another package of this process may draw
            del sys.modules[name]


_has_used_sympy = False


def _prepare(task: str) -> None:
    """Have sympy import and remember what it needs to compare formulas, before a judge of a task that uses it
    is forked. Once for all judges: it takes most of a second."""
    global _has_used_sympy
    from reasoning_gym.factory import DATASETS

    if _has_used_sympy or task not in DATASETS:
        return
    with open(sys.modules[DATASETS[task][0].__module__].__file__ or "", encoding="utf-8") as source:
        if task not in _EARNS and "sympy" not in source.read():
            return
    _has_used_sympy = True
    import sympy

    x = sympy.Symbol("x")
    formula = sympy.parse_expr("x**2/2 + x*sin(x) + C", local_dict={"x": x})
    sympy.simplify(sympy.diff(formula, x) - sympy.parse_expr("x", local_dict={"x": x}))


def serve(control: int, program: _Program) -> None:
    """Answer the owner's requests."""
    judges: dict[tuple[str, bytes], Judge] = {}
    while (request := receive(control)) is not None:
        task, reuses_judge, parameters, attempts = pickle.loads(request)
        judge, records = judges.pop((task, parameters), None), list[tuple[bytes, bytes]]()
        _prepare(task)
        while len(records) < len(attempts):
            first = len(records)
            answer_records, judge = answer(
                judge, attempts[first : None if reuses_judge else first + 1], task, parameters, program
            )
            kind, _ = answer_records[-1]
            records += answer_records * (len(attempts) - first) if kind == UNFIT else answer_records
            if not reuses_judge or kind not in (RIGHT, WRONG, RAISED):
                judge.end()
                judge = None
        if judge is not None:
            judges[task, parameters] = judge
            if len(judges) > _MAX_JUDGES:
                judges.pop(next(iter(judges))).end()
        _send(control, b"".join(HEAD.pack(kind, len(text)) + text for kind, text in records))


def answer(
    judge: "Judge | None", attempts: "list[bytes]", task: str, parameters: bytes, program: _Program
) -> "tuple[list[tuple[bytes, bytes]], Judge]":
    """Return the records of attempts until the judge fails, and the judge: a new one unless it lives."""
    if judge is not None and not judge.is_alive():
        judge.end()
        judge = None
    if judge is None:
        judge = Judge(program, lambda: score(task, parameters))
        kind, text = judge.record(CREATE_S)
        if kind != READY:
            return [(kind if kind == SILENT else UNFIT, text)], judge
    return judge.ask(attempts), judge


class Judge:
    """A process that judges answers, as this process sees it."""

    def __init__(self, program: _Program, work: "Callable[[], None]"):
        """Fork it, with this filter of its system calls. It calls `work`; its socket is descriptor 0."""
        self.socket, theirs = socket.socketpair()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(WALL_S), 0))
        zygote = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                confine(theirs.fileno(), program, zygote)
                work()
            finally:
                os._exit(0)
        theirs.close()
        self.code: int | None = None
        """Exit code, -N after signal N, once it has ended."""
        self._unread = b""
        self._poll = select.poll()
        self._poll.register(self.socket, select.POLLIN)

    def ask(self, attempts: "list[bytes]") -> "list[tuple[bytes, bytes]]":
        """Return its records of the attempts, up to the first at which it fails."""
        try:
            _send(self.socket.fileno(), *attempts)
        except OSError as error:
            return [(SILENT, f"it takes no question ({error})".encode())]
        records = []
        for _ in attempts:
            record = self.record(JUDGE_S)
            if record[0] in (READY, UNFIT):
                record = DIED, b"it answered nonsense"
            records.append(record)
            if record[0] not in (RIGHT, WRONG, RAISED):
                break
        return records

    def record(self, seconds: float) -> "tuple[bytes, bytes]":
        """Return its next record, within some seconds of processor time."""
        began, deadline = self._processor_time(), time.monotonic() + WALL_S + seconds
        while (record := self._whole_record()) is None:
            if self._poll.poll(_LOOK_EVERY_MS):
                chunk = self.socket.recv(HEAD.size + LONGEST_TEXT)
                if not chunk:
                    return self._exit_record()
                self._unread += chunk
            elif self._processor_time() - began > seconds:
                return DIED, b"it took more than %g s of processor time" % seconds
            elif time.monotonic() > deadline:
                return SILENT, b"no answer within %g s" % (WALL_S + seconds)
        return record

    def _whole_record(self) -> "tuple[bytes, bytes] | None":
        if len(self._unread) < HEAD.size:
            return None
        kind, length = HEAD.unpack_from(self._unread)
        if kind not in (READY, RIGHT, WRONG, RAISED, UNFIT) or length > LONGEST_TEXT:
            return DIED, b"it answered nonsense"
        end = HEAD.size + length
        if len(self._unread) < end:
            return None
        text, self._unread = self._unread[HEAD.size : end], self._unread[end:]
        return kind, text

    def _processor_time(self) -> float:
        try:
            return time.clock_gettime(~self.pid << 3 | 2)  # clock_getcpuclockid(3)
        except OSError:  # it has ended
            return 0.0

    def _exit_record(self) -> "tuple[bytes, bytes]":
        """Return the record of a process that has closed its socket."""
        deadline = time.monotonic() + 1.0
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        if self.code is None:
            return DIED, b"it closed its socket"
        if self.code == -signal.SIGKILL:  # it cannot do that itself
            return SILENT, b"it was killed from outside"
        return DIED, b"it died (%s %d)" % (
            (b"signal", -self.code) if self.code < 0 else (b"status", self.code)
        )

    def is_alive(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is None

    def end(self) -> None:
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.socket.close()


# ---------------------------------------------------------------------------------------------- in a judge


def confine(own_socket: int, program: _Program, zygote: int) -> None:
    """Make this process one that only computes, with its own socket as descriptor 0 and no other."""
    os.dup2(own_socket, 0)
    os.closerange(3, _HIGHEST_DESCRIPTOR)
    for limit, bound in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(limit, (bound, bound))
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != zygote or _libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program)) != 0:
        os._exit(1)


def score(task: str, parameters: bytes) -> None:
    """Judge answers of one task until the socket closes."""
    try:
        dataset = _dataset(task, pickle.loads(parameters))
    except BaseException as error:
        _tell(UNFIT, error)
        return
    _tell(READY)
    while (ask := receive(0)) is not None:
        try:
            answer, entry = pickle.loads(ask)
            verdict = RIGHT if is_right(dataset, task, answer, entry) else WRONG
        except BaseException as error:
            _tell(RAISED, error)
        else:
            _tell(verdict)


_ENDLESS = re.compile(r"[eE][+-]?[0-9_]{4}")


def is_right(dataset: "Any", task: str, answer: str, entry: "dict[str, Any]") -> bool:
    """Return whether the scorer of a task gives full marks to an answer, and the answer earns them. To some
    answers the library's scorer gives full marks for another reason."""
    if task == "coin_flip" and _ENDLESS.search(answer):  # a fraction of 1e99999999 has as many digits
        return False
    if not dataset.score_answer(answer, entry) >= 1.0:
        return False
    earns = _EARNS.get(task)
    return earns is None or earns(answer, entry)


def _is_close(answer: str, entry: "dict[str, Any]") -> bool:
    """Check an answer to coin_flip. The library gives full marks to any beginning of the label, such as 0."""
    label_value, value = (
        float(fractions.Fraction(text.replace(",", ""))) for text in (entry["answer"], answer)
    )
    return abs(value - label_value) <= 1e-4  # the library's tolerance


def _makes_target(answer: str, entry: "dict[str, Any]") -> bool:
    """Check an answer to countdown. The library's scorer also takes what differs by a hundred-thousandth, so
    that numbers that are left over can be divided away."""
    return _equals(answer, entry["metadata"]["target"])


def _makes_24(answer: str, entry: "dict[str, Any]") -> bool:
    """Check an answer to puzzle24: the library's scorer takes any four numbers, and 24.9 for 24."""
    used = sorted(map(int, re.findall(r"[0-9]+", answer)))
    return used == sorted(entry["metadata"]["numbers"]) and _equals(answer, 24)


def _equals(expression: str, number: float) -> bool:
    import sympy

    return bool(sympy.parse_expr(expression.strip()) == sympy.Rational(number))


def _names_no_nan(answer: str, _: "dict[str, Any]") -> bool:
    """Return whether an answer names no NaN, which the tasks that use this would find close to any number."""
    return "nan" not in answer.replace(" ", "").lower()


_EARNS: "dict[str, Callable[[str, dict[str, Any]], bool]]" = {
    "coin_flip": _is_close,
    "complex_arithmetic": _names_no_nan,
    "countdown": _makes_target,
    "number_sorting": _names_no_nan,
    "puzzle24": _makes_24,
}


def _dataset(task: str, parameters: "dict[str, Any]") -> "Any":
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise LookupError(f"reasoning_gym has no task {task!r}")
    # one item: some tasks make them all when they are opened
    return reasoning_gym.create_dataset(task, seed=0, size=1, **parameters)


def _tell(kind: bytes, error: "BaseException | None" = None) -> None:
    text = b""
    if error is not None:
        name = "" if type(error) is LookupError else f"{type(error).__name__}: "
        text = f"{name}{error}".encode(errors="replace")[:LONGEST_TEXT]
    os.write(0, HEAD.pack(kind, len(text)) + text)


def probe() -> None:
    """Try what a judge must not be able to do, and tell the first of these that succeeds."""
    zygote = os.getppid()

    def fork() -> None:
        if os.fork() == 0:
            os._exit(0)

    def use_descriptors() -> None:
        for number in range(3, _HIGHEST_DESCRIPTOR):
            with suppress(OSError):
                os.fstat(number)
                return
        raise OSError

    attempts: dict[str, Callable[[], object]] = {
        "start processes": fork,
        "signal another process": lambda: os.kill(zygote, 0),
        "bound another process": lambda: resource.prlimit(zygote, resource.RLIMIT_CPU),
        "write files": lambda: os.open("file", os.O_WRONLY | os.O_CREAT),
        "make directories": lambda: os.mkdir("directory"),
        "make sockets": socket.socket,
        "use other descriptors": use_descriptors,
        "wait": lambda: time.sleep(0),
        "see files of the host": lambda: os.listdir("/proc"),
    }
    for action, attempt in attempts.items():
        try:
            attempt()
        except OSError:
            continue
        os.write(0, HEAD.pack(READY, len(action)) + action.encode())
        return
    os.write(0, HEAD.pack(READY, 0))


# ------------------------------------------------------------------------------------------------ messages


def _send(descriptor: int, *contents: bytes) -> None:
    message = memoryview(b"".join(LENGTH.pack(len(content)) + content for content in contents))
    while message:
        message = message[os.write(descriptor, message) :]


def receive(descriptor: int) -> "bytes | None":
    """Return the next message; None at the end."""
    head = _read(descriptor, LENGTH.size)
    return None if head is None else _read(descriptor, *LENGTH.unpack(head))


def _read(descriptor: int, size: int) -> "bytes | None":
    parts = []
    while size:
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main()
