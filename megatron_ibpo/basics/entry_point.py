"""The handler at the top of every command: any error ends in one line on stderr and an exit status.

The line says what is wrong, where, and what to do. The traceback goes to a file that the line names, unless
the user's input is at fault and the line says everything.
"""

import atexit
import gc
import io
import os
import re
import select
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from functools import partial, reduce, wraps
from operator import or_
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, ParamSpec, get_args

from megatron_ibpo.basics.text import keep_keys_from_logs, place_in_users_code, without_keys

DONE, FAILED, BAD_INPUT, INTERRUPTED, STDOUT_CLOSED = 0, 1, 2, 130, 141
"""Exit statuses. After FAILED another try may help, after BAD_INPUT it does not."""
OF_PATHS = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""System errors that come from a path of the user's, unless the path is in the run's own directory."""
SOURCES = (Path(__file__).resolve().parents[1], Path(__file__).resolve().parents[2] / "tools")
PACKAGE = __name__.partition(".")[0]
READERS = ("json", "yaml")
"""Libraries whose errors mean that a file is malformed."""
FRAME = re.compile(r'File "(.+)", line \d+, in .*\n +(.*)')
ONE_OR_SEVERAL = re.compile(r"(\w+)\|\{(\[\1 .*)\}")
"""tyro's name of a value that is one word or a list of such words, which the list alone says too."""
LOG = "driver.log"
INTERNAL, UNREADABLE = "internal error", "an input cannot be read"
LONGEST = 500
"""Most characters of an internal error's message."""

P = ParamSpec("P")

# Python looks for garbage among all that was imported before it ends; with torch there that takes a second
atexit.register(gc.freeze)


def command(main: Callable[P, int | None]) -> Callable[P, int]:
    """Decorate the main function of a command: it always returns the exit status."""

    @wraps(main)
    def run(*arguments: P.args, **named: P.kwargs) -> int:
        return guarded(partial(main, *arguments, **named))

    return run


def run_tool(main: Callable[[Any], int | None], arguments: Any, description: str | None) -> NoReturn:
    """Parse the command line as the dataclass `arguments`, run `main` with it, and exit."""
    sys.exit(guarded(lambda: main(parsed(arguments, description))))


def parsed(
    arguments: Any, description: str | None, words: Sequence[str] | None = None, *, program: str | None = None
) -> Any:
    """Return the command line, or `words`, as the dataclass `arguments`. `program` is the name in the help,
    by default that of the file that runs. Raises ValueError for wrong flags, where tyro would draw a box."""
    import tyro

    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_optional)
    program = program or Path(sys.argv[0]).name
    read = partial(tyro.cli, arguments, args=words, prog=program, description=description, registry=registry)
    box = io.StringIO()  # no terminal, so that it is drawn without frame and colours
    try:
        with redirect_stdout(box), redirect_stderr(box):
            return read()
    except SystemExit as ended:
        if ended.code in (None, 0):
            return read()  # --help, on the terminal
    _, problem, *_ = re.split("-{9,}", box.getvalue())  # title, what is wrong, the flag's help, where help is
    message = " ".join(problem.split()).replace(" (required)", "").replace("Error parsing ", "")
    message = re.sub("Missing from .*?: ", "missing: ", message).replace(
        "Unrecognized options", "no such flag"
    )
    raise ValueError(f"{message.removesuffix('.')}; --help lists all flags")


def _optional(info: Any) -> Any:
    """Return how tyro reads a value that may be None: as its type, which alone the help shows, or the word
    None; None for other values."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    if not isinstance(info.type, UnionType) or NoneType not in get_args(info.type):
        return None
    type_of_others = reduce(or_, (kind for kind in get_args(info.type) if kind is not NoneType))
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(type_of_others, info.markers))
    if not isinstance(spec, PrimitiveConstructorSpec):
        return spec
    return replace(
        spec,
        metavar=ONE_OR_SEVERAL.sub(r"\2", spec.metavar),
        instance_from_str=lambda words: None if words == ["None"] else spec.instance_from_str(words),
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: ["None"] if value is None else spec.str_from_instance(value),
    )


def guarded(work: Callable[[], int | None], *, logs: Path | None = None, stopped: str = "stopped") -> int:
    """Run `work` and return the exit status; any error has been printed, and `stopped` after a Ctrl-C.
    Tracebacks go to `logs`, which need not exist, in the directory of a run; None: to the temporary
    directory."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the shell, and the next file would get its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    keep_keys_from_logs()
    previous_hook, threading.excepthook = threading.excepthook, partial(_answer_thread, logs)
    try:
        status = work() or DONE
        sys.stdout.flush()
    except KeyboardInterrupt:
        _say(stopped)
        status = INTERRUPTED
    except SystemExit:  # of the parser
        if not _reader_is_gone():
            raise
        status = STDOUT_CLOSED
    except BaseException as error:  # PanicException of libraries in Rust is no Exception
        cut_off = isinstance(error, BrokenPipeError) and _reader_is_gone()
        status = STDOUT_CLOSED if cut_off else _answer(error, logs)
    finally:
        threading.excepthook = previous_hook
    if _reader_is_gone():  # Python would complain at exit about unprinted output
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return status


def _reader_is_gone() -> bool:
    """Return whether stdout is a pipe without a reader, as after `| head -1`."""
    stdout = select.poll()
    stdout.register(1, 0)
    return any(event & select.POLLERR for _, event in stdout.poll(0))


def _answer_thread(logs: Path | None, failed: threading.ExceptHookArgs) -> None:
    """Print the error that ended a thread; the command continues. (A thread that keeps its error, as
    TensorBoard's writer does, has it raised where the thread is used next.)"""
    stored_error = getattr(failed.thread, "exception", None)
    if isinstance(failed.exc_value, Exception) and failed.exc_value is not stored_error:
        _answer(failed.exc_value, logs)


def _answer(error: BaseException, logs: Path | None) -> int:
    """Print an error; return the exit status."""
    message, status = _line_and_status(error, logs)
    # a note is the traceback from another process
    if status == FAILED or message.startswith(UNREADABLE) or hasattr(error, "__notes__"):
        trace_file = _write_traceback(error, logs)
        message = message.partition("\n")[0] + (f"; the traceback is in {trace_file}" if trace_file else "")
    _say(f"error: {message}{'; please report it' if message.startswith(INTERNAL) else ''}")
    return status


def _line_and_status(error: BaseException, logs: Path | None) -> tuple[str, int]:
    """Return the line for an error, and the exit status."""
    filename = getattr(error, "filename", "")
    name = os.fsdecode(filename) if isinstance(filename, str | bytes) else ""
    within_run = logs and Path(name).is_relative_to(logs.parent)
    if logs and not logs.parent.is_dir() and (within_run or f"{logs.parent}{os.sep}" in str(error)):
        return f"{logs.parent}: the run's directory is gone", FAILED
    if isinstance(error, OSError) and error.errno is not None:
        prefix = f"{name}: " if name else ""
        status = BAD_INPUT if isinstance(error, OF_PATHS) and not within_run else FAILED
        return f"{prefix}{error.strerror}", status
    library, kind = type(error).__module__.partition(".")[0], type(error).__name__
    if isinstance(error, ValueError | OSError) and (library == PACKAGE or _is_raised_here(error)):
        return str(error), BAD_INPUT
    if library == PACKAGE:
        return str(error), FAILED
    if library in READERS or isinstance(error, UnicodeError):
        return f"{UNREADABLE}: {kind}: {error}", BAD_INPUT
    if kind in ("MemoryError", "OutOfMemoryError"):  # torch has one of its own
        return str(error) or "out of memory", FAILED
    if place := place_in_users_code(error):
        return f"{kind}: {str(error)[:LONGEST]}{place}", FAILED
    return f"{INTERNAL}: {kind}: {str(error)[:LONGEST]}", FAILED


def _is_raised_here(error: BaseException) -> bool:
    """Return whether a `raise` of this project made the error. A ValueError from a library or from Python
    itself is a bug of this project, since the user's input is checked before."""
    stack = "".join(traceback.format_exception(type(error), error, error.__traceback__, chain=False))
    file, line = FRAME.findall(stack)[-1]  # of the process that raised it: notes come last
    return line.startswith("raise ") and any(Path(file).resolve().is_relative_to(place) for place in SOURCES)


def _write_traceback(error: BaseException, logs: Path | None) -> Path | None:
    """Append the traceback to a file and return its path; None if no disk accepts it."""
    trace = without_keys("".join(traceback.format_exception(error)))
    text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(sys.argv)}\n{trace}\n".encode(errors="replace")
    if logs is not None and logs.parent.is_dir():
        with suppress(OSError):
            logs.mkdir(exist_ok=True)
            with (logs / LOG).open("ab") as file:
                file.write(text)
            return logs / LOG
    with suppress(OSError):
        descriptor, name = tempfile.mkstemp(prefix="ibpo-", suffix=".log")
        with open(descriptor, "wb") as file:
            file.write(text)
        return Path(name)
    return None


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        print(without_keys(text), file=sys.stderr, flush=True)
