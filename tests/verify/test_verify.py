"""ibpo verify: rows, verdicts and exit status; and the default recipe, in which everything is right."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from megatron_ibpo.policy.logits_check import transformers_model
from megatron_ibpo.verify.rows import (
    CHECKS,
    NotCheckedError,
    Row,
    as_json,
    attempted,
    exact,
    largest,
    measured,
    table,
)
from support.paths import ROOT
from support.tiny_models import make_qwen3


def test_a_figure_is_right_up_to_its_bound():
    verdicts = [measured("split", figure, 1.0, "", "").verdict for figure in (0, 1, 1.1, math.nan, math.inf)]
    assert verdicts == ["right", "right", "wrong", "wrong", "wrong"]
    assert measured("memory: main", 2, 1, "", "the ratio").reason == "the ratio; look at ibpo plan"
    assert measured("memory: main", 1, 1, "", "the ratio").reason == "the ratio"


def test_one_fault_is_wrong_and_named():
    assert exact("memory", [], "ids").verdict == "right"
    row = exact("memory", ["a", "b", "c", "d"], "ids")
    assert (row.verdict, row.figure, row.reason) == ("wrong", 4, "ids: a; b; c; look at ibpo plan")


def test_a_sampled_padding_id_has_a_gradient_in_the_reference(tmp_path):
    padding = 3
    hf_dir = make_qwen3(tmp_path / "model", 0)
    config = json.loads((hf_dir / "config.json").read_text())
    (hf_dir / "config.json").write_text(json.dumps(config | {"pad_token_id": padding}))
    model = transformers_model(hf_dir, torch.float64)
    ids = torch.tensor([[4, padding, 5]])
    logits = model(ids).logits[0, -1]
    (gradient,) = torch.autograd.grad(logits[7], model.get_input_embeddings().weight)
    assert gradient[padding].any()


def test_a_nan_is_the_largest_difference():
    assert largest({"a": 1.0, "b": 2.0}) == (2.0, "b")
    gap, name = largest({"a": 1.0, "b": math.nan, "c": math.inf})
    assert math.isnan(gap)
    assert name == "b"


@pytest.mark.parametrize("side", [0, 1])
def test_tensor_gaps_are_relative_and_keep_nan(side):
    import torch  # takes a second

    from megatron_ibpo.verify.trainer import tensor_gaps  # imports torch

    ones = {"equal": torch.ones(2), "none": torch.zeros(2)}
    assert tensor_gaps(ones, ones, 0.0) == {"equal": 0.0}
    pair = [{"far": torch.tensor([4.0, 1.0]), "bad": torch.ones(2)}, {"far": torch.tensor([4.0, 3.0])}]
    pair[1]["bad"] = torch.tensor([1.0, math.nan])
    gaps = tensor_gaps(pair[side], pair[1 - side], 0.0)
    assert gaps["far"] == 0.5
    assert math.isnan(gaps["bad"])


def test_tensor_gaps_of_nothing_are_not_checked():
    import torch  # takes a second

    from megatron_ibpo.verify.trainer import tensor_gaps  # imports torch

    with pytest.raises(NotCheckedError, match="all tensors are 0"):
        tensor_gaps({"a": torch.zeros(2)}, {"a": torch.zeros(2)}, 0.0)
    with pytest.raises(KeyError, match="b"):
        tensor_gaps({"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2)}, 0.0)


def test_an_impossible_check_is_not_a_pass_and_errors_fail():
    def rows(error):
        yield measured("data: first", 0, 1, "", "")
        raise error

    first, why = attempted("data", lambda: rows(NotCheckedError("it is a recording")))
    assert (first.verdict, why.verdict, why.reason) == ("right", "not checked", "it is a recording")
    _, failed = attempted("data", lambda: rows(RuntimeError("no such tensor")))
    assert failed.verdict == "wrong"
    assert "no such tensor" in failed.reason


def test_verification_rows_are_complete_in_json():
    rows = [Row(f"{name}: x", "right", 0.5, 1.0, "here", "it is") for name in CHECKS]
    content = json.loads(as_json([*rows, Row("data", "wrong", math.inf)], {"full": False}))
    assert content["full"] is False
    assert content["checks"][0] == {
        "check": "split: x", "verdict": "right", "figure": 0.5, "bound": 1.0, "bound_from": "here",
        "reason": "it is",
    }  # fmt: skip
    assert table(rows).endswith(f"{len(CHECKS)} right, 0 wrong, 0 not checked")


@pytest.mark.parametrize("seed", ["0", "1", "4294967295", "random"])
def test_a_second_reading_has_another_hash_seed(monkeypatch, seed):
    from megatron_ibpo.verify.inputs import with_other_hashes  # imports torch

    monkeypatch.setenv("PYTHONHASHSEED", seed)
    printed = [sys.executable, "-c", "print(hash('a prompt'))"]
    hash_value = int(subprocess.run(printed, capture_output=True, check=True).stdout)
    first, second = (with_other_hashes(hash, "a prompt") for _ in range(2))
    assert first == second != hash_value
    assert os.environ["PYTHONHASHSEED"] == seed


@pytest.mark.slow
def test_the_reduced_model_of_packed_weights_is_unpacked(tmp_path):
    """gpt-oss is published in MXFP4: vLLM would look for kernels of that format."""
    from megatron_ibpo.verify.small_run import cut_down  # imports torch

    published = ROOT / "examples/models/gpt_oss_20b"
    assert "quantization_config" in json.loads((published / "config.json").read_text())
    small = json.loads((cut_down(published, tmp_path / "small", seed=0) / "config.json").read_text())
    assert "quantization_config" not in small
    assert (small["model_type"], small["num_hidden_layers"]) == ("gpt_oss", 2)


def verify(directory, *flags, timeout=700):
    """Return (exit status, rows of verify.json, output) of the command."""
    save = directory / "verify.json"
    command = [sys.executable, "-m", "megatron_ibpo.commands.verify", *flags, "--save", str(save)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert save.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    return done.returncode, json.loads(save.read_text())["checks"], done.stdout


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_default_recipe_passes_every_check(tmp_path, seed):
    recipe, model = ROOT / "examples/recipes/small_cpu.yaml", ROOT / "examples/tiny_qwen3"
    flags = ["--config", str(recipe), "--hf-checkpoint", str(model), "--seed", str(seed)]
    status, rows, output = verify(tmp_path, *flags)
    assert status == 0, output
    assert {row["check"].partition(":")[0] for row in rows if row["verdict"] == "right"} == set(CHECKS), (
        output
    )
    assert [row["check"] for row in rows if row["verdict"] == "wrong"] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rows_of_other_trainers_are_read_and_wrong_rewards_noticed(tmp_path):
    """verl's parquet and TRL's columns; a reward that pays for any text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = [(a, b) for a in range(2, 9) for b in range(2, 9)]
    verl = [
        {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "data_source": "sums", "ability": "math",
         "reward_model": {"style": "rule", "ground_truth": str(a + b)}, "extra_info": {"index": i}}
        for i, (a, b) in enumerate(numbers)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(verl), tmp_path / "verl.parquet")
    trl = [{"prompt": f"{a}+{b}=", "solution": str(a + b)} for a, b in numbers]
    (tmp_path / "trl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in trl))
    recipe = ["--config", str(ROOT / "examples/recipes/small_cpu.yaml"), "--only", "data,rewards"]
    plain = ["--hf-checkpoint", str(ROOT / "examples/tiny_qwen3")]
    chat = ["--hf-checkpoint", str(ROOT / "examples/tiny_qwen3_agent"), "--apply-chat-template"]
    for name, own in {"verl.parquet": chat, "trl.jsonl": [*plain, "--label-key", "solution"]}.items():
        data = ["--prompt-data", str(tmp_path / name), "--rm-type", "math", *own]
        status, rows, output = verify(tmp_path, *recipe, *data)
        assert status == 0, output
        right = {row["check"] for row in rows if row["verdict"] == "right"}
        assert right >= {"data: rows", "data: epochs", "rewards: labels"}, output
    (tmp_path / "generous.py").write_text("def score(p, r, label, m):\n    return float(bool(r))\n")
    generous = ["--rm-type", f"{tmp_path / 'generous.py'}:score"]
    status, rows, output = verify(
        tmp_path,
        *recipe,
        *plain,
        "--prompt-data",
        str(tmp_path / "trl.jsonl"),
        "--label-key",
        "solution",
        *generous,
    )
    assert status == 1, output
    assert [row["check"] for row in rows if row["verdict"] == "wrong"] == ["rewards: wrong answers"]
