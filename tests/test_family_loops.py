"""Every family goes through the whole loop: three steps of a tiny random model with vLLM, in two processes,
each update compared with what the engine holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from test_loop import ROOT, rows_of
from tiny_models import LLAMA_3, make_glm4_moe, make_llama, make_qwen2, make_qwen3_moe

RECIPE = ROOT / "examples/recipes/small_dense_cpu.yaml"

EVEN = """
def score(question, response, label, metadata):
    return float(sum(map(ord, response)) % 2 == 0)
"""
"""What a random model is right about every other time."""

FLAGS = [
    "--num-trainers", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel",
    "--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
    "--rollout-max-response-len", "32", "--rollout-max-context-len", "256", "--eval-num-prompts", "8",
    "--check-weight-update-equal", "--rm-type", "even:score", "--reward-threshold", "1",
]  # fmt: skip

MODELS = {
    "llama": lambda directory: make_llama(directory, 1, biased=True, rope=LLAMA_3),
    "llama tied": lambda directory: make_llama(directory, 2, tie=True),
    "qwen2": lambda directory: make_qwen2(directory, 3),
    "qwen3_moe": lambda directory: make_qwen3_moe(directory, 4, std=0.02),
    "glm4_moe": lambda directory: make_glm4_moe(directory, 5, std=0.05),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_three_steps_of_the_loop(tmp_path, name):
    (tmp_path / "even.py").write_text(EVEN)
    model = MODELS[name](tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(ROOT / "examples/tiny_qwen3" / file, model)
    experts = ["--expert-model-parallel-size", "2"] if "moe" in name else []
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "megatron_ibpo.train", "--config", str(RECIPE)]
    command += ["--hf-checkpoint", str(model), "--run-dir", str(run_dir), *FLAGS, *experts]
    subprocess.run(command, cwd=ROOT, check=True, timeout=400, env={**os.environ, "IBPO_CWD": str(tmp_path)})
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["grad_norm"] > 0
        assert row["logprob_diff_abs_max"] < 1e-4  # of vLLM's and the trainer's, both in float32
    before, after = (load_file(path / "model.safetensors") for path in (model, run_dir / "hf"))
    assert before.keys() == after.keys()
    same = {tensor for tensor in before if torch.equal(before[tensor], after[tensor])}
    assert same == {tensor for tensor in before if tensor.endswith("e_score_correction_bias")}
