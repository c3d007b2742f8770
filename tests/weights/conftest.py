"""Tests that ask for `world` run on every rank of one, of the size that their mark or their `ranks` say."""

import inspect

import pytest

from support.ranks import run_ranks


@pytest.fixture
def world():
    """A rank's own; in the test's process there is none. Other fixtures must pickle."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    given = [pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters]
    if "world" not in pyfuncitem.funcargs:
        return None
    size = pyfuncitem.funcargs.get("ranks") or pyfuncitem.get_closest_marker("world").args[0]
    run_ranks(pyfuncitem.obj, size, *given[1:], timeout=280)
    return True
