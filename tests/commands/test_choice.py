"""A model gets the recipe and layout that fit its devices."""

import json
import shutil

import pytest

from megatron_ibpo.commands import choose_recipe as choosing
from megatron_ibpo.commands.choose_recipe import Devices, choose, estimated_parameters, find_devices
from megatron_ibpo.models import read_hf_config
from support.paths import ROOT
from support.tiny_models import make_qwen3_moe

MODELS, TINY = ROOT / "examples/models", ROOT / "examples/tiny_qwen3"
SMALL_CACHE = ("--vllm-kv-cache-bytes", str(6 * 1024**3))


def chosen(hf_dir, nodes, gpus, memory=80.0, *flags):
    choice = choose(hf_dir, Devices(nodes, gpus, memory), flags)
    words = dict(zip(choice.layout[::2], choice.layout[1::2], strict=False))
    return choice.recipe.stem, choice.trainers_per_node, words.get("--tensor-model-parallel-size")


def test_parameters_are_counted_from_the_shape():
    for name, expected in {
        "qwen3_0_6b": 0.596e9,
        "qwen3_30b_a3b": 30.2e9,  # of 30.5 B; input embeddings of its own are left out
        "qwen3_32b": 32.0e9,  # Qwen3-32B has 32.8 B, .78 B of them input embeddings
        "qwen3_next_80b_a3b": 79.4e9,
        "qwen3_235b_a22b": 234.5e9,  # of 235.1 B
    }.items():
        assert estimated_parameters(read_hf_config(MODELS / name)) == pytest.approx(expected, rel=0.01)


def test_small_models_run_on_cpus_and_on_as_many_gpus_as_there_are_and_others_as_their_recipes_say(tmp_path):
    cpu, tiny_next = ("small_cpu", 1, None), "tiny_qwen3_next_ibpo"
    for model, nodes, gpus, expected in (
        ("tiny_qwen3", 1, 0, cpu),
        ("tiny_qwen3", 1, 8, cpu),
        ("tiny_qwen3_next", 1, 0, (tiny_next, 2, None)),
        ("tiny_qwen3_next", 1, 1, (tiny_next, 1, "1")),
        ("tiny_qwen3_next", 1, 8, (tiny_next, 2, None)),
        ("models/qwen3_0_6b", 1, 4, ("qwen3_0_6b_ibpo", 4, None)),
        ("models/qwen3_30b_a3b", 1, 8, ("qwen3_30b_a3b_ibpo", 8, None)),
        ("models/qwen3_32b", 4, 8, ("qwen3_32b_ibpo", 8, None)),
    ):
        assert chosen(ROOT / "examples" / model, nodes, gpus) == expected
    assert chosen(make_qwen3_moe(tmp_path / "moe", 0), 1, 0) == cpu, "a mixture of another family"
    odd = json.loads((ROOT / "examples/tiny_qwen3_next/config.json").read_text()) | {"num_experts": 3}
    (tmp_path / "config.json").write_text(json.dumps(odd))
    assert chosen(tmp_path, 1, 0) == (tiny_next, 1, "1")


def test_a_model_that_is_too_large_for_cpus_is_refused_and_one_that_is_slow_there_told_what_to_set():
    assert "--lr (1e-6 is usual)" not in choose(TINY, Devices(1, 0, 80.0), []).why
    why = choose(MODELS / "qwen3_0_6b", Devices(1, 0, 80.0), []).why
    assert "596 million" in why
    assert "--lr (1e-6 is usual)" in why
    with pytest.raises(ValueError, match=r"about 32\.. B parameters are too many for CPUs.*--dry-run"):
        chosen(MODELS / "qwen3_32b", 1, 0)


def test_the_recipe_follows_kind_and_size_of_the_model_and_how_many_gpus_there_are():
    def taken(model, *gpus):
        return {choosing.choose_recipe(read_hf_config(MODELS / model), number).name for number in gpus}

    assert taken("qwen3_4b", 1, 7) == {"qwen3_0_6b_ibpo"}
    assert taken("qwen3_4b", 8, None) == {"qwen3_4b_ibpo"}
    assert taken("qwen3_32b", 1, 32, 512) == {"qwen3_32b_ibpo"}
    assert taken("qwen3_30b_a3b", 1, 8, 64) == {"qwen3_30b_a3b_ibpo"}
    assert taken("qwen3_next_80b_a3b", 8) == {"qwen3_next_80b_a3b_ibpo"}
    assert taken("qwen3_235b_a22b", 32, 64, 128) == {"qwen3_235b_a22b_ibpo"}


def test_a_plan_without_gpus_gets_those_of_the_recipe(monkeypatch):
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    shapes = [read_hf_config(MODELS / name) for name in ("qwen3_0_6b", "qwen3_4b", "qwen3_32b")]
    assert [find_devices(None, None, shape).gpus for shape in shapes] == [0, 8, 32]
    assert find_devices(None, None, None).gpus == 0
    assert find_devices(2, 4, shapes[2]) == Devices(2, 4, 80.0), "what the user names"


def test_a_layout_saves_as_much_memory_as_is_needed_and_flags_of_the_user_win():
    model = MODELS / "qwen3_4b"
    offloaded = choose(model, Devices(1, 1, 80.0)).layout
    assert offloaded == ("--use-precision-aware-optimizer", "--optimizer-cpu-offload"), "nothing else fits"
    assert chosen(model, 1, 8, 48.0, *SMALL_CACHE) == ("qwen3_4b_ibpo", 8, "2")
    assert chosen(model, 1, 8, 24.0, *SMALL_CACHE) == ("qwen3_4b_ibpo", 8, "8"), "4 leave no room"
    flags = ["--tensor-model-parallel-size=8", "--sequence-parallel", "--rollout-num-gpus-per-engine=8"]
    assert chosen(model, 1, 8, 24.0, *SMALL_CACHE, *flags)[2] is None, "what is tried first works with them"
    for asked in (
        "--help",
        "--help lr",
        "-h",
        "--help-all",
        "--print-config",
    ):  # questions are left to the run
        assert chosen(model, 1, 8, 80.0, *SMALL_CACHE, *asked.split())[0].startswith("qwen3")
    with pytest.raises(ValueError, match=r"not fit on 1 GPU of 24 GiB with .*: training takes .*NNODES="):
        chosen(MODELS / "qwen3_32b", 1, 1, 24.0)


def test_what_was_chosen_is_said_and_that_a_model_without_data_trains_on_a_demonstration(tmp_path, capsys):
    devices = ["--nodes", "1", "--gpus-per-node", "8"]
    assert choosing.main(["--hf-checkpoint", str(MODELS / "qwen3_4b"), *devices, "--"]) == 0
    said = capsys.readouterr().err
    for words in (
        "on 8 GPUs of 80 GiB",
        "qwen3_4b_ibpo.yaml",
        "for dense models up to 9 B parameters, written for 8 GPUs",
        "8 trainers",
        "NNODES and GPUS_PER_NODE name",
    ):
        assert words in said
    shutil.copytree(TINY, tmp_path / "mine")
    mine = ["--hf-checkpoint", str(tmp_path / "mine"), "--gpus-per-node", "0", "--"]
    assert choosing.main(mine) == 0
    demonstration = "No PROMPT_DATA is given: this trains on a demonstration task, reasoning_gym://"
    assert capsys.readouterr().err.startswith(demonstration)
    assert choosing.main([*mine, "--prompt-data", "train.jsonl"]) == 0
    assert "demonstration" not in capsys.readouterr().err
