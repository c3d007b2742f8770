"""Provides the models that trainers are tested with."""

import pytest

from support.tiny_models import make_qwen3, make_qwen3_next


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Tiny models whose weights are large enough for gradients to be compared, by name."""
    directory = tmp_path_factory.mktemp("models")
    return {
        "dense": make_qwen3(directory / "dense", 3, std=0.1),
        "tied": make_qwen3(directory / "tied", 5, std=0.1, tie=True),
        "next": make_qwen3_next(directory / "next", 4, std=0.1),
    }
