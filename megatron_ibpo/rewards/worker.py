"""A worker process: run reward functions on the owner's requests until the owner is gone.

Started as `python -m megatron_ibpo.rewards.worker FD OWNER MODULE:FUNCTION…` by `supervisor`, the OWNER. It
answers ("ready", (its process id, the batched functions)) or ("failed", why) once. Then it answers every
message, (function, a list of tuples of arguments), with ("outcomes", an `Answer` for each), or ("error",
(why, the traceback or None)) if there are none.

A function gets (prompt text, response text, label, metadata) of one response, or if its attribute `batched`
is true four lists over many, and returns a value for each: a number, or a mapping with the number as `score`
and further numbers. Its attribute `prepare_worker`, if there is one, is called once it is loaded.
"""

import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from megatron_ibpo.basics.reward_value import WRONG, ResponseError, read_reward
from megatron_ibpo.basics.supervised import die_with
from megatron_ibpo.basics.text import error_text, fault_text, printable, trace_text
from megatron_ibpo.config import ConfigError, load_hook

Answer = tuple[float | None, dict[str, float], str | None]
"""(the reward, further numbers, None), or (None, {}, the reason why there is no reward)."""
_Function = Callable[..., Any]
_OURS = "megatron_ibpo."


def main() -> None:
    """Serve until the connection closes."""
    fd, owner, targets = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    die_with(owner)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    connection = Connection(fd)
    functions: dict[str, _Function] = {}
    for target in targets:
        try:
            functions[target] = _load(target)
        except BaseException as error:
            is_refused = isinstance(error, ConfigError)
            reason = printable(str(error)) if is_refused else f"--rm-type {target}: {error_text(error)}"
            connection.send(("failed", reason))
            return
    own_pid = os.getpid()
    connection.send(("ready", (own_pid, [target for target in targets if _is_batched(functions[target])])))
    while True:
        try:
            target, calls = connection.recv()
        except (EOFError, OSError):
            return
        answer = _answer(target, functions, calls)
        if os.getpid() != own_pid:  # a function forked, and both returned: one answers
            os._exit(0)
        connection.send(answer)


def _load(target: str) -> _Function:
    function = load_hook("--rm-type", target)
    if not callable(function):
        raise ConfigError(f"--rm-type {target}: is not a function")
    if (prepare := getattr(function, "prepare_worker", None)) is not None:
        prepare()
    return function


def _is_batched(function: _Function) -> bool:
    return bool(getattr(function, "batched", False))


def _answer(
    target: str, functions: dict[str, _Function], calls: list[tuple[Any, ...]]
) -> tuple[str, tuple[str, str | None] | list[Answer]]:
    try:
        if target not in functions:
            functions[target] = _load(target)
        return "outcomes", [_outcome(value) for value in _values(functions[target], calls)]
    except BaseException as error:
        if type(error).__module__.startswith(_OURS):  # its text says all
            return "error", (error_text(error), None)
        return "error", (fault_text(error, __file__), trace_text(error))


def _values(function: _Function, calls: list[tuple[Any, ...]]) -> Sequence[Any]:
    """Return a value for each call. One call alone, as the owner makes it of a function that is not batched,
    or again of each in a batch that failed, is wrong if it raises ResponseError."""
    try:
        if not _is_batched(function):
            return [function(*arguments) for arguments in calls]
        values = list(function(*map(list, zip(*calls, strict=True))))
    except ResponseError:
        if len(calls) > 1:
            raise
        return [WRONG]
    if len(values) != len(calls):
        raise ValueError(f"expected {len(calls)} numbers, got {len(values)}")
    return values


def _outcome(value: Any) -> Answer:
    """Return the reward in a function's value, or why it is not a reward."""
    try:
        return *read_reward(value), None
    except (TypeError, ValueError) as error:
        return None, {}, error_text(error)


if __name__ == "__main__":
    main()
