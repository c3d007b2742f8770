"""What holds for all tests."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
from hypothesis import settings

settings.register_profile("here", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("here")


@pytest.fixture(scope="module")
def planner():
    """A process of its own, since a census leaves Megatron set up for a machine without CUDA."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=120)
