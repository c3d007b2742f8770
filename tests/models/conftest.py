"""Tests that ask for `world` run on every rank of one, of the size that their mark or their `ranks` say."""

import inspect
import pickle

import pytest

from support.ranks import run_ranks


class Pickled:
    """Arrives as the value itself. Without it torch would share the memory of tensors, of up to 250."""

    def __init__(self, value):
        self.data = pickle.dumps(value)

    def __reduce__(self):
        return pickle.loads, (self.data,)


@pytest.fixture
def world():
    """A rank has its own; in the process of the test there is none."""


def pytest_pyfunc_call(pyfuncitem):
    parameters = [*inspect.signature(pyfuncitem.obj).parameters]
    if parameters[:1] == ["world"]:
        given = [Pickled(pyfuncitem.funcargs[name]) for name in parameters[1:]]
        size = pyfuncitem.funcargs.get("ranks") or pyfuncitem.get_closest_marker("world").args[0]
        return run_ranks(pyfuncitem.obj, size, *given, timeout=280)
    return None
