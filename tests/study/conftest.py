"""Provides the file of a study, and runs without training."""

import pytest
import yaml

from megatron_ibpo.study import runs
from support import stand_in_training
from support.paths import ROOT


@pytest.fixture(autouse=True)
def nothing_imported_for_training(monkeypatch):
    """Preload only what a stand-in for training needs."""
    monkeypatch.setattr(runs, "PRELOADED", [runs.__name__, stand_in_training.__name__])


@pytest.fixture
def written(tmp_path):
    """Write a study of two methods and two seeds with these changes, and return its path; None leaves a key
    out."""

    def write(**changes):
        content = {
            "recipe": str(ROOT / "examples/recipes/tiny_qwen3_study.yaml"),
            "budget": 1e11,
            "budget-unit": "flops",
            "baseline": "gspo",
            "seeds": [0, 1],
            "common": {"hf-checkpoint": str(ROOT / "examples/tiny_qwen3")},
            "methods": {"gspo": {"advantage-estimator": "gspo"}, "dr": {"advantage-estimator": "dr-grpo"}},
        } | changes
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
        return path

    return write
