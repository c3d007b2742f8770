"""Models that trainers are tested with."""

import pytest

import support.no_compiler  # noqa: F401
from support.tiny_models import make_qwen3, make_qwen3_next


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
