"""The whole loop with every family, adapters, multi-token prediction, and methods that sample further."""

import math
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from support.checkpoint_bytes import with_mtp
from support.documented_modules import write_modules
from support.example_runs import finished, rows_of, start_script, train_three_steps
from support.paths import ROOT
from support.tiny_models import (
    LLAMA_3,
    make_glm4_moe,
    make_gpt_oss,
    make_llama,
    make_olmo2,
    make_qwen2,
    make_qwen3_moe,
)

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(2000)]

NEXT = ROOT / "examples/tiny_qwen3_next"
MODELS = {
    "llama": partial(make_llama, seed=1, biased=True, rope=LLAMA_3),
    "qwen2": partial(make_qwen2, seed=3, tie=True),
    "qwen3_moe": partial(make_qwen3_moe, seed=4, std=0.02),
    "glm4_moe": partial(make_glm4_moe, seed=5, std=0.05),
    "olmo2": partial(make_olmo2, seed=7, biased=True),
    "gpt_oss": partial(make_gpt_oss, seed=6, std=0.05),
}


def weights_of(*directories):
    found = [load_file(directory / "model.safetensors") for directory in directories]
    assert found[0].keys() == found[1].keys()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_three_steps_of_the_loop(tmp_path, name):
    model = MODELS[name](tmp_path / "model")
    experts = ["--expert-model-parallel-size", "2"] if "moe" in name or name == "gpt_oss" else []
    for row in train_three_steps(tmp_path, model, *experts):
        assert row["logprob_diff_abs_max"] < 1e-4  # of vLLM's and the trainer's, both in float32
    before, after = weights_of(model, tmp_path / "run/hf")
    same = {tensor for tensor in before if torch.equal(before[tensor], after[tensor])}
    assert same == {tensor for tensor in before if tensor.endswith("e_score_correction_bias")}


def run_next(run_dir, *flags):
    words = [
        "-m", "megatron_ibpo.commands.train", "--run-dir", run_dir, "--hf-checkpoint", NEXT,
        "--config", "examples/recipes/tiny_qwen3_next_ibpo.yaml", "--rollout-batch-size", "8",
        "--eval-num-prompts", "8", "--check-weight-update-equal", *flags,
    ]  # fmt: skip
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True, timeout=280)
    rows = rows_of(run_dir)
    for row in rows:
        assert row["grad_norm"] > 0
        assert row["logprob_diff_abs_mean"] < 0.01  # the engine computes in bfloat16
    return rows


def test_adapters_are_trained_sampled_from_resumed_and_read_by_peft(tmp_path):
    """TP2 and EP2. What PEFT makes of the last adapters is the exported model."""
    import transformers
    from peft import PeftModel

    lora = ["--lora-rank", "4", "--lr", "3e-3", "--save-interval", "2"]
    rows = run_next(tmp_path / "run", "--num-rollout", "2", *lora)
    again = ["--num-rollout", "3", "--load", tmp_path / "run" / "checkpoints"]
    rows += run_next(tmp_path / "resumed", *lora, *again)
    assert [row["step"] for row in rows] == [1, 2, 3]
    origin, merged = weights_of(NEXT, tmp_path / "resumed/hf")
    moved = {name for name in origin if not torch.equal(origin[name], merged[name])}
    assert any("experts.3.down_proj" in name for name in moved)
    assert any("in_proj_qkvz" in name for name in moved)
    assert not [name for name in moved if "norm" in name or "embed" in name or ".gate." in name]
    tokens = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(0))
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        exported = load(tmp_path / "resumed/hf", dtype=torch.float32)(tokens).logits
        base = load(NEXT, dtype=torch.float32)
        plain = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "resumed/hf/adapter")(tokens).logits
    # sums of another order, in float32: 7.6e-6 was seen
    assert (exported - adapted).abs().max() < 2e-5 * exported.abs().max()
    assert (plain - adapted).abs().max() > 1


def test_the_layer_for_multi_token_prediction_learns_beside_the_policy(tmp_path):
    model = shutil.copytree(NEXT, tmp_path / "model")
    with_mtp(model, seed=1)
    flags = ["--hf-checkpoint", model, "--mtp-num-layers", "1", "--num-rollout", "4"]
    first, *_, last = (row["mtp_loss"] for row in run_next(tmp_path / "run", *flags))
    assert last < first
    before, after = weights_of(model, tmp_path / "run/hf")
    assert all(not torch.equal(before[name], after[name]) for name in before if name.startswith("mtp."))


def steps_of(run_dir, *flags, directory=ROOT):
    small = "--num-rollout 3 --rollout-batch-size 8 --n-samples-per-prompt 4 --num-trainers 1"
    small += " --num-steps-per-rollout 1 --eval-num-prompts 0 --vllm-dtype float32"
    process = start_script(run_dir, *small.split(), *flags, script="run.sh", directory=directory)
    status, output = finished(process, 900)
    assert status == 0, output[-5000:]
    rows = rows_of(run_dir)
    assert rows[-1]["step"] == 3
    assert all(math.isfinite(row[name]) for row in rows for name in ("loss", "grad_norm", "entropy"))
    assert all(row["updates_skipped"] == 0 for row in rows)
    return rows


@pytest.mark.parametrize(("name", "counted"), [
    ("critique_grpo", "joined_corrections"),
    ("self_teacher", "teacher_tokens"),
    ("reset_groups", "reset_suffixes"),
])  # fmt: skip
def test_methods_that_ask_for_further_samples_or_passes_get_them(name, counted, tmp_path):
    recipe = ROOT / f"examples/algorithms/{name}.yaml"
    rows = steps_of(tmp_path / "run", "--no-save", "--config", str(recipe))
    assert sum(row[counted] for row in rows) > 0
    assert all(row.get("reset_reward_errors", 0) == 0 for row in rows)


def test_an_engine_of_ones_own_samples_a_run_under_ray(tmp_path):
    """The one of docs/extending.md, as its page says: a file in the directory where one stands."""
    write_modules(tmp_path)
    steps_of(tmp_path / "run", "--rollout-backend", "counted_engine:CountedEngine", directory=tmp_path)
    counts = (tmp_path / "run/logs/engine_0.requests").read_text().split()
    assert sum(map(int, counts)) >= 3 * 8 * 4, "every response and correction"
