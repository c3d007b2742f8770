"""The process of one episode: it answers its owner with the methods of one environment."""

import json
import os
import random
import socket
from collections.abc import Callable, Mapping
from typing import Any

from numpy import random as numpy_random  # loaded here, once; numpy itself would load it in each episode

from megatron_ibpo.basics.reward_value import WRONG, ResponseError
from megatron_ibpo.basics.text import fault_text
from megatron_ibpo.environments.protocol import Environment, EpisodeFaultError
from megatron_ibpo.environments.wire import line, opening_value, score_value, turn_value


def serve(connection: socket.socket, make: Callable[[], Environment]) -> None:
    """Answer until the episode is closed or the owner is gone.

    Args:
        make: makes the environment.
    """
    own_pid = os.getpid()
    episode = _Episode(make)
    for received in connection.makefile("rb"):
        method, arguments = json.loads(received)
        answer = _answer(getattr(episode, method), arguments)
        if os.getpid() != own_pid:  # the environment forked, and both returned: one answers
            return
        connection.sendall(answer)
        if method == "close":
            return


class _Episode:
    """The methods that the owner calls, with JSON as arguments and values."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._environment: Environment | None = None

    def reset(self, question: str, label: str, metadata: Mapping[str, Any], seed: int) -> dict[str, Any]:
        seed_generators(seed)
        self._environment = self._make()
        return opening_value(self._environment.reset(question, label, metadata, seed))

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._environment is not None
        return turn_value(self._environment.step(message))

    def score(self) -> dict[str, float]:
        assert self._environment is not None
        try:
            value = self._environment.score()
        except ResponseError:
            value = WRONG
        return score_value(value)

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()


def seed_generators(seed: int) -> None:
    """Seed the global generators, so that an environment that uses them starts alike each time."""
    random.seed(seed)
    numpy_random.seed(seed % 2**32)


def _answer(method: Callable[..., Any], arguments: list[Any]) -> bytes:
    try:
        return line("answer", method(*arguments))
    except EpisodeFaultError as fault:  # an adapter knows more about it
        return line("fault", fault.kind, str(fault))
    except BaseException as error:
        return line("fault", "error", fault_text(error, os.path.dirname(__file__)))
