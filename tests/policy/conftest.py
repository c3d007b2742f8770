"""Provides the models that trainers are tested with, and runs tests marked `world(N)` on N ranks."""

import inspect

import pytest

from support.ranks import run_ranks
from support.tiny_models import make_qwen3, make_qwen3_next


def pytest_pyfunc_call(pyfuncitem):
    """Run the body of a test marked `world(N)` on each of N forked ranks, whose world comes first."""
    mark = pyfuncitem.get_closest_marker("world")
    if mark is None or not mark.args:
        return None
    first, *given = inspect.signature(pyfuncitem.obj).parameters
    assert first == "world"
    run_ranks(pyfuncitem.obj, *mark.args, *(pyfuncitem.funcargs[name] for name in given), timeout=280)
    return True


@pytest.fixture
def world():
    """Stand for what each rank is given."""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Tiny models whose weights are large enough for gradients to be compared, by name."""
    place = tmp_path_factory.mktemp("models")
    return {
        "dense": make_qwen3(place / "dense", 3, std=0.1),
        "tied": make_qwen3(place / "tied", 5, std=0.1, tie=True),
        "next": make_qwen3_next(place / "next", 4, std=0.1),
        "delta net": make_qwen3_next(place / "delta net", 4, std=0.1, layers=1),
        "deltas": make_qwen3_next(place / "deltas", 4, std=0.1, layers=3),
        "deep": make_qwen3(place / "deep", 3, std=0.1, layers=8, tie=True),
        "other": make_qwen3(place / "other", 6, std=0.1),
    }
