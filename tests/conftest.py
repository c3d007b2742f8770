"""What holds for all tests."""

from __future__ import annotations

import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor

import pytest
from hypothesis import settings

# `nohup`, and a shell that starts tests in the background, have children ignore these, and tests send them
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("here", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("here")


@pytest.fixture(scope="module")
def planner():
    """A process of its own, since a census leaves Megatron set up for a machine without CUDA."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=120)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny checkpoints of a dense model and of a Qwen3-Next, by these names."""
    from tiny_models import make_qwen3, make_qwen3_next  # most tests need no torch

    place = tmp_path_factory.mktemp("models")
    return {"dense": make_qwen3(place / "dense", 0), "next": make_qwen3_next(place / "next", 0)}


@pytest.fixture(scope="module")
def shapes(models):
    from megatron_ibpo.models import read_hf_config

    return {name: read_hf_config(path) for name, path in models.items()}
