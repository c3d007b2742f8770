"""Which recipe and layout a model gets on which devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_ibpo.shape import read_hf_config

from megatron_ibpo.choice import Devices, choose, count_parameters

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "examples/models"


@pytest.fixture
def small(tmp_path) -> Path:
    """The shape of Qwen3-4B."""
    content = json.loads((MODELS / "qwen3_32b/config.json").read_text())
    content |= {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32}
    content |= {"intermediate_size": 9728, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(content))
    return tmp_path


def chosen(hf_dir: Path, nodes: int, gpus: int, memory: float = 80.0, *flags: str):
    choice = choose(hf_dir, Devices(nodes, gpus, memory), flags)
    words = dict(zip(choice.layout[::2], choice.layout[1::2], strict=False))
    return choice.recipe.stem, choice.trainers_per_node, words.get("--tensor-model-parallel-size")


def test_parameters_are_counted_from_the_shape():
    counts = {
        "qwen3_32b": 32.0e9,  # Qwen3-32B has 32.8 B, .78 B of them input embeddings
        "qwen3_next_80b_a3b": 79.4e9,
    }
    for name, expected in counts.items():
        assert count_parameters(read_hf_config(MODELS / name)) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("tiny_qwen3", ("small_dense_cpu", 1, None)),
        ("tiny_qwen3_next", ("tiny_qwen3_next_ibpo", 2, None)),
    ],
)
def test_small_models_run_on_cpus(model, expected):
    assert chosen(ROOT / "examples" / model, 1, 0) == expected


def test_a_small_model_of_an_odd_shape_gets_one_process(tmp_path):
    content = json.loads((ROOT / "examples/tiny_qwen3_next/config.json").read_text())
    content["num_experts"] = 3
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert chosen(tmp_path, 1, 0) == ("tiny_qwen3_next_ibpo", 1, "1")


def test_a_large_model_is_refused_on_cpus():
    with pytest.raises(ValueError, match=r"about 32\.. B parameters are too many for CPUs.*--dry-run"):
        chosen(MODELS / "qwen3_32b", 1, 0)


def test_a_large_recipe_keeps_its_layout_on_its_cluster():
    assert chosen(MODELS / "qwen3_32b", 4, 8) == ("qwen3_32b_ibpo", 8, None)


def test_tensor_parallelism_is_as_small_as_memory_allows(small):
    assert chosen(small, 1, 8) == ("small_dense_gpu", 8, "1")
    assert chosen(small, 1, 8, 24.0) == ("small_dense_gpu", 8, "8")


def test_flags_of_the_user_win(small):
    flags = ("--tensor-model-parallel-size", "8", "--sequence-parallel", "--rollout-num-gpus-per-engine", "8")
    assert chosen(small, 1, 8, 24.0, *flags)[2] == "1", (
        "what is tried first, and works with those flags after it"
    )


def test_what_does_not_fit_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"does not fit on 1 GPU of 24 GiB: training takes .*NNODES="):
        chosen(MODELS / "qwen3_32b", 1, 1, 24.0)


def run_script(*flags: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(ROOT / "examples/run.sh"), *flags],
        cwd=cwd,
        env=os.environ | {"IBPO_PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_script_says_what_it_chose_and_how_to_choose_otherwise(small):
    devices = {"NNODES": "1", "GPUS_PER_NODE": "8"}
    done = run_script("--dry-run", "--hf-checkpoint", str(small), cwd=small.parent, **devices)
    assert done.returncode == 0, done.stderr
    for words in (
        "on 8 GPUs of 80 GiB",
        "small_dense_gpu.yaml",
        "8 trainers",
        "NNODES and GPUS_PER_NODE name",
    ):
        assert words in done.stderr
    assert "This fits." in done.stdout


def test_the_script_refuses_what_is_no_model(tmp_path):
    done = run_script(cwd=tmp_path, HF_CHECKPOINT="mine")
    assert done.returncode == 2
    assert f"no checkpoint directory {tmp_path}/mine" in done.stderr
