"""Other processes: for one call, or to answer several in the manner of `EngineLink`."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial

TIMEOUT_S = 60.0
SERVED: list = []  # the object of this process, where others call its methods
one_process = partial(ProcessPoolExecutor, 1, mp_context=multiprocessing.get_context("spawn"))


def apart(function, *arguments, **named):
    """Call a function in a process of its own, which a trainer needs: it leaves Megatron's groups behind."""
    with one_process() as pool:
        return pool.submit(function, *arguments, **named).result()


class Link:
    def __init__(self, pool):
        self._pool, self._begun = pool, []

    def begin(self, method, *arguments):
        self._begun.append(self._pool.submit(_answer, method, arguments))

    def result(self, timeout=TIMEOUT_S):
        return self._begun.pop(0).result(timeout)

    def ask(self, method, *arguments):
        self.begin(method, *arguments)
        return self.result()


@contextmanager
def beside(make):
    """An object that another process makes, and whose methods it calls."""
    with one_process(initializer=_serve, initargs=(make,)) as pool:
        yield Link(pool)


def _serve(make):
    SERVED.append(make())


def _answer(method, arguments):
    return getattr(SERVED[0], method)(*arguments)
