"""Other processes: for one call, or to answer several in the manner of `weights.transfer.link.EngineLink`."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 60.0


class PipeLink:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def begin(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def result(self, timeout: float) -> Any:
        if not self._pipe.poll(timeout):
            raise RuntimeError(f"no answer within {timeout:g} seconds")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise RuntimeError(str(answer))
        return answer

    def ask(self, method: str, *arguments: Any) -> Any:
        self.begin(method, *arguments)
        return self.result(TIMEOUT_S)


def apart(function: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
    """Call a function in a process of its own, which a trainer needs: it leaves Megatron's groups behind."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *arguments, **named).result()


@contextmanager
def beside(make: Callable[[], Any]) -> Iterator[PipeLink]:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(there, make), daemon=True)
    process.start()
    try:
        yield PipeLink(here)
    finally:
        process.kill()
        process.join()


def _serve(pipe: Connection, make: Callable[[], Any]) -> None:
    served = make()
    while True:
        method, arguments = pipe.recv()
        try:
            answer = getattr(served, method)(*arguments)
        except Exception as error:
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        pipe.send(answer)
