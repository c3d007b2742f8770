"""Tests that ask for `world` run on every rank of one, of the size that their mark or their `ranks` say."""

import inspect

import pytest

from support.ranks import run_ranks


@pytest.fixture
def world():
    """A rank has its own; in the process of the test there is none. Its other fixtures must pickle."""


def pytest_pyfunc_call(pyfuncitem):
    parameters = [*inspect.signature(pyfuncitem.obj).parameters]
    if parameters[:1] == ["world"]:
        given = [pyfuncitem.funcargs[name] for name in parameters[1:]]
        size = pyfuncitem.funcargs.get("ranks") or pyfuncitem.get_closest_marker("world").args[0]
        return run_ranks(pyfuncitem.obj, size, *given, timeout=280)
    return None
