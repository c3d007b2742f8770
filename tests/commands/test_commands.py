"""A command ends an error in one line, with a status that says whether another try may help; recipes."""

import errno
import importlib
import json
import math
import pickle
import re
import runpy
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

from megatron_ibpo import __version__
from megatron_ibpo.basics.entry_point import BAD_INPUT, FAILED, INTERRUPTED, STDOUT_CLOSED, guarded
from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.cluster.actor import original_error
from megatron_ibpo.commands import choose_recipe as choosing
from megatron_ibpo.commands import main, train
from megatron_ibpo.commands.choose_recipe import Devices, choose, estimated_parameters, find_devices
from megatron_ibpo.config import ConfigError, load_hook
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.report import RewardErrorRateError
from megatron_ibpo.weights import CheckpointError
from support.checkpoint_bytes import cut_in_half
from support.paths import ROOT
from support.published_recipes import ONE_GPU
from support.tiny_models import make_qwen3_moe


def ends(capsys, work, **options):
    """(exit status, the one line on stderr) of a function, or of one that raises this error."""

    def failing():
        raise work

    status = guarded(failing if isinstance(work, BaseException) else work, **options)
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return status, said.removesuffix("\n")


def test_bad_input_takes_one_line_and_failures_name_their_log(capsys, tmp_path):
    assert [guarded(lambda own=own: own) for own in (None, 0, 1, 5)] == [0, 0, 1, 5]  # type: ignore[misc]
    logs = tmp_path / "logs"
    answer = ends(capsys, ConfigError("--lr: must be above 0"), logs=logs)
    assert answer == (BAD_INPUT, "error: --lr: must be above 0")
    assert not logs.exists()
    for _ in range(2):
        answer = ends(capsys, RewardErrorRateError("the verifier failed"), logs=logs)
        assert answer == (FAILED, f"error: the verifier failed; the traceback is in {logs}/driver.log")
    kept = (logs / "driver.log").read_text()
    assert kept.count("RewardErrorRateError: the verifier failed") == 2, "earlier ones stay"


def test_a_bug_asks_for_a_report(capsys, tmp_path):
    bugs = {"TypeError: unsupported operand": lambda: 1 + "a\nb", "ValueError: invalid": lambda: int("x")}
    for says, bug in bugs.items():
        status, line = ends(capsys, bug, logs=tmp_path / "gone/logs")
        said = rf"error: internal error: {says}.*; the traceback is in (\S+?\.log).*; please report it"
        kept = Path(re.fullmatch(said, line)[1])  # in the temporary directory where there is no run's
        assert status == FAILED, (says, bug)
        assert "Traceback (most recent call last)" in kept.read_text(), (says, bug)
        kept.unlink()
    assert ends(capsys, lambda: read_json("[NaN]")) == (BAD_INPUT, "error: NaN is no number in JSON")


def test_a_fault_in_a_users_module_names_its_line(capsys, tmp_path):
    (tmp_path / "own_estimator.py").write_text("def advantages(rewards):\n    return {}[len(rewards)]\n")
    advantages = load_hook("--advantages", f"{tmp_path}/own_estimator.py:advantages")
    status, line = ends(capsys, lambda: advantages([1.0]), logs=tmp_path / "logs")
    place = f"{tmp_path}/own_estimator.py:2 in advantages"
    assert (status, line) == (
        FAILED, f"error: KeyError: 1 ({place}); the traceback is in {tmp_path}/logs/driver.log"
    )  # fmt: skip


def test_other_errors_name_their_subject(capsys, tmp_path):
    missing = errno.ENOENT, "No such file or directory"
    for error, status, said in (
        (FileNotFoundError(*missing, "a.json"), 2, "a.json: No such file"),
        (FileNotFoundError(*missing, f"{tmp_path}/x"), 1, f"{tmp_path}/x: No such file"),  # in the run
        (OSError(errno.EIO, "Input/output error", "a.json"), 1, "a.json: Input/output error"),
        (MemoryError(), 1, "out of memory"),
        (RecursionError("too deep"), 1, "internal error: RecursionError: too deep"),
        (json.JSONDecodeError("Expecting value", "", 0), 2, "an input cannot be read: JSON"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), 2, "an input cannot be read: "),
    ):
        found, line = ends(capsys, error, logs=tmp_path / "logs")
        assert found == status, error
        assert line.startswith(f"error: {said}")
    # where the run was deleted, trainers that start again may be the first to find it
    lost = CheckpointError(f"{tmp_path}/run/checkpoints/step_000010 holds no Megatron checkpoint")
    found, line = ends(capsys, lost, logs=tmp_path / "run/logs")
    assert (found, "the run's directory is gone" in line) == (FAILED, True)
    (tmp_path / "run").mkdir()
    found, line = ends(capsys, lost, logs=tmp_path / "run/logs")
    assert (found, "the run's directory is gone" in line) == (BAD_INPUT, False)


def test_a_remote_error_keeps_its_remote_traceback(capsys, tmp_path):
    for work, status in ((lambda: read_json("[NaN]"), BAD_INPUT), (lambda: int("x"), FAILED)):
        with pytest.raises(ValueError) as raised:  # noqa: PT011 of any text
            work()
        text = "".join(traceback.format_exception(raised.value))
        raised.value.__traceback__ = None
        error = original_error(RayTaskError("_Process.call", text, raised.value), "trainer 1")
        found, line = ends(capsys, error, logs=tmp_path / "logs")
        assert found == status
        assert f"; the traceback is in {tmp_path}/logs/driver.log" in line, (work, status)
        assert "in trainer 1:\n" in (tmp_path / "logs/driver.log").read_text(), (work, status)


def test_an_interrupt_has_its_status_and_full_disks_lose_tracebacks(capsys, monkeypatch):
    assert ends(capsys, KeyboardInterrupt(), stopped="stopped") == (INTERRUPTED, "stopped")
    monkeypatch.setattr("tempfile.mkstemp", lambda **_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    assert ends(capsys, MemoryError()) == (FAILED, "error: out of memory")


def test_a_closed_output_is_no_error():
    printing = """
from megatron_ibpo.basics.entry_point import command
raise SystemExit(command(lambda: [print(line) for line in range(100_000)] and 0)())
"""
    for command_line, output in (
        (f'"$0" -c "{printing}" | head -1; echo "${{PIPESTATUS[0]}}"', ["0", str(STDOUT_CLOSED)]),
        ('"$0" -m megatron_ibpo.commands.main --help >&-', []),
    ):
        words = ["bash", "-c", command_line, sys.executable]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
        assert (done.stdout.split(), done.stderr) == (output, "")


def test_versions_are_printed_and_main_can_be_pickled(capsys):
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"megatron_ibpo {__version__}")
    for words in (["--help"], ["convert"], ["convert", "--help"]):
        assert main.main(words) == 0
        assert "convert to-megatron" in capsys.readouterr().out, words
    assert pickle.loads(pickle.dumps(train.main)) is train.main, "studies start runs in other processes"


TINY, MODELS = ROOT / "examples/tiny_qwen3", ROOT / "examples/models"


def test_a_wrong_input_is_one_line_and_status_2(tmp_path, capsys, monkeypatch, subtests):
    recipe, compare = str(ROOT / "examples/recipes/tiny_qwen3_study.yaml"), "tools/compare_methods.py"
    study = {"methods": {"a": {}, "b": {}}, "baseline": "a", "budget": 3}
    for name, content in {
        "missing.yaml": {"methods": {}},
        "task.yaml": study | {"tasks": {"t": {"settings": {}, "warm-start": 3}}},
        "wrong.json": [],
        "bad.jsonl": {"prompt": "1+2"},
        "whole.yaml": study | {"recipe": recipe},
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
    for name in ("malformed", "truncated"):
        shutil.copytree(TINY, tmp_path / name)
    (tmp_path / "malformed/config.json").write_text("{")
    cut_in_half(tmp_path / "truncated/model.safetensors")
    monkeypatch.setenv("IBPO_CWD", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    # all of it is found before Ray starts
    monkeypatch.delattr("megatron_ibpo.run.on_cluster.open_ray")

    def status_of_tool(program, *words):
        monkeypatch.setattr("sys.argv", [program, *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / program), run_name="__main__")
        return ended.value.code

    a_run = ["--config", recipe, "--run-dir", "run"]
    lean = [*a_run, "--rollout-backend", "lean"]  # whose data and weights are read at once, without Ray
    save = ["--save", "out"]
    for program, words, says in [
        ("train", [*a_run, "--hf-checkpoint", "malformed"], "malformed/config.json is"),
        ("train", [*a_run, "--tensor-model-parallel-size", "3"],
         "--tensor-model-parallel-size=3 does not divide the attention heads (4)"),
        ("train", [*a_run, "--load", "."], "there is no step_N"),
        ("train", [*lean, "--hf-checkpoint", "truncated"], "truncated/model.safetensors"),
        ("train", [*lean, "--prompt-data", "bad.jsonl"], "line 1"),
        ("train", [*lean, "--rm-type", "no_such_module:score"], "no_such_module"),
        ("train", [*lean, "--run-dir", "/proc/run"], "/proc/run"),
        ("evaluate", ["nowhere"], "nowhere is not a policy"),
        ("search", ["--gpus", "8", "--hardware", "h100", "--hf-checkpoint", "nowhere"], "nowhere"),
        ("search", [], "missing: --gpus"),
        ("page", ["page", "nowhere", "--weird"], "no such flag: --weird; --help lists"),
        ("loss", ["gspo", "--width", "x"], "--width: could not convert string to float"),
        ("pass_rates", a_run, "--pass-rates: required"),
        ("choose_recipe", ["--hf-checkpoint", "nowhere"], "nowhere"),
        ("main", ["konvert"], "convert to-megatron, convert to-hf"),
        ("main", ["trian"], "did you mean 'train'?"),
        (compare, [], "missing: --save PATH"),
        (compare, ["missing.yaml", *save], "a study needs baseline, budget"),
        (compare, ["task.yaml", *save], "task t: warm-start must be `key: value` lines"),
        (compare, ["wrong.json", *save], "wrong.json: holds no results of a study"),
        ("tools/audit_credit.py", ["nowhere"], "nowhere holds no config.yaml"),
        ("tools/operator_skill.py", ["nowhere"], "nowhere holds no policy"),
        ("tools/inspect_checkpoint.py", ["nowhere"], "nowhere"),
        ("tools/inspect_data.py", ["--hf-checkpoint", str(TINY), "--prompt-data", "a.jsonl"], "no such file"),
        ("tools/convert_hf_to_megatron.py", ["--hf-checkpoint", "nowhere", *save], "nowhere"),
        ("tools/convert_megatron_to_hf.py", ["--load", "nowhere", *save], "nowhere"),
        ("tools/convert_gguf_to_hf.py", ["--gguf", "nowhere.gguf", *save], "no file nowhere.gguf"),
    ]:  # fmt: skip
        with subtests.test(program, words=words):
            if program.endswith(".py"):
                status = status_of_tool(program, *words)
            else:
                status = importlib.import_module(f"megatron_ibpo.commands.{program}").main(words)
            stderr = capsys.readouterr().err
            assert status == BAD_INPUT, stderr
            assert "traceback" not in stderr.lower(), "what was given is at fault, and the line says it all"
            (line,) = (line for line in stderr.splitlines() if line.startswith("error: "))
            assert says in stderr[stderr.index(line) :]
    # what a study would cost is an answer and no failure
    assert status_of_tool(compare, "whole.yaml", "--runs-at-most", "0", *save) == 0
    assert "runs are there already" in capsys.readouterr().out


def chosen(hf_dir, nodes, gpus, memory=80.0, *flags):
    choice = choose(hf_dir, Devices(nodes, gpus, memory), flags)
    words = dict(zip(choice.layout[::2], choice.layout[1::2], strict=False))
    return choice.recipe.stem, choice.trainers_per_node, words.get("--tensor-model-parallel-size")


def test_the_recipe_follows_the_model_and_the_number_of_gpus(monkeypatch):
    def taken(model, *gpus, memory=80):
        shape = read_hf_config(MODELS / model)
        return {choosing.choose_recipe(shape, number, memory).name for number in gpus}

    assert taken("qwen3_4b", 1, 7) == {"qwen3_4b_one_gpu"}
    assert taken("qwen3_4b", 8, math.inf) == {"qwen3_4b_ibpo"}
    assert taken("qwen3_0_6b", 1, 7, memory=79.6) == {"qwen3_0_6b_ibpo"}
    assert taken("qwen3_0_6b", 1, 8, memory=22.5) == {"qwen3_0_6b_one_gpu"}, "an L4 reports less than 24 GB"
    assert taken("qwen3_32b", 1, 32, 512) == {"qwen3_32b_ibpo"}
    assert taken("qwen3_30b_a3b", 1, 8, 64) == {"qwen3_30b_a3b_ibpo"}
    assert taken("qwen3_next_80b_a3b", 8) == {"qwen3_next_80b_a3b_ibpo"}
    assert taken("qwen3_235b_a22b", 32, 64, 128) == {"qwen3_235b_a22b_ibpo"}
    shapes = [read_hf_config(MODELS / name) for name in ("qwen3_0_6b", "qwen3_30b_a3b", "qwen3_32b")]
    # of 30.5 B and 32.8 B; input embeddings of their own are left out
    assert [*map(estimated_parameters, shapes[1:])] == pytest.approx([30.2e9, 32.0e9], rel=0.01)
    monkeypatch.setenv("PATH", "")  # no nvidia-smi: a plan gets the GPUs of the recipe
    assert [find_devices(None, None, shape).gpus for shape in (*shapes, None)] == [0, 8, 32, 0]
    assert find_devices(2, 4, shapes[2]) == Devices(2, 4, 80.0), "what the user names"


def test_small_models_run_anywhere_and_too_large_ones_are_refused(tmp_path):
    cpu, tiny_next = ("small_cpu", 1, None), "tiny_qwen3_next_ibpo"
    for model, nodes, gpus, expected in (
        ("tiny_qwen3", 1, 0, cpu),
        ("tiny_qwen3_next", 1, 0, (tiny_next, 2, None)),
        ("tiny_qwen3_next", 1, 1, (tiny_next, 1, "1")),
        ("models/qwen3_0_6b", 1, 4, ("qwen3_0_6b_ibpo", 4, None)),
        ("models/qwen3_32b", 4, 8, ("qwen3_32b_ibpo", 8, None)),
    ):
        assert chosen(ROOT / "examples" / model, nodes, gpus) == expected
    assert chosen(make_qwen3_moe(tmp_path / "moe", 0), 1, 0) == cpu, "a mixture of another family"
    odd = json.loads((ROOT / "examples/tiny_qwen3_next/config.json").read_text()) | {"num_experts": 3}
    (tmp_path / "config.json").write_text(json.dumps(odd))
    assert chosen(tmp_path, 1, 0) == (tiny_next, 1, "1")
    with pytest.raises(ValueError, match=r"about 32\.. B parameters are too many for CPUs.*--dry-run"):
        chosen(MODELS / "qwen3_32b", 1, 0)


@pytest.mark.parametrize(("recipe", "model", "memory"), [(k, *v) for k, v in ONE_GPU.items()], ids=[*ONE_GPU])
def test_one_gpu_recipes_are_unchanged_for_their_model_and_card(recipe, model, memory):
    reported = memory * 0.995  # GiB, as nvidia-smi says
    choice = choose(MODELS / model, Devices(1, 1, reported))
    assert (choice.recipe.stem, choice.layout) == (recipe, ())


def test_a_dry_run_chooses_by_the_memory_named_by_flags(capsys):
    model = ["--hf-checkpoint", str(MODELS / "qwen3_0_6b"), "--gpus-per-node", "1", "--", "--dry-run"]
    assert choosing.main([*model, "--dry-run-gpu-memory-gib=24"]) == 0
    assert "qwen3_0_6b_one_gpu.yaml" in capsys.readouterr().out


def test_layouts_save_memory_where_needed_and_explicit_flags_win():
    model, small_cache = MODELS / "qwen3_4b", ("--vllm-kv-cache-bytes", str(6 * 1024**3))
    offloaded = choose(MODELS / "qwen3_1_7b", Devices(1, 1, 24.0)).layout
    assert offloaded == ("--use-precision-aware-optimizer", "--optimizer-cpu-offload"), "nothing else fits"
    assert chosen(model, 1, 8, 48.0) == ("qwen3_0_6b_one_gpu", 8, None)
    assert chosen(model, 1, 8, 24.0) == ("qwen3_0_6b_one_gpu", 8, "4")
    assert chosen(model, 1, 8, 24.0, *small_cache, "--rollout-max-context-len", "32768")[2] == "8"
    flags = ["--tensor-model-parallel-size=8", "--sequence-parallel", "--rollout-num-gpus-per-engine=8"]
    assert chosen(model, 1, 8, 24.0, *small_cache, *flags)[2] is None, "what is tried first works with them"
    for asked in ("--help", "--help lr", "-h", "--help-all", "--print-config"):  # are left to the run
        assert chosen(model, 1, 8, 80.0, *small_cache, *asked.split())[0].startswith("qwen3")
    with pytest.raises(ValueError, match=r"not fit on 1 GPU of 24 GiB with .*: training takes .*NNODES="):
        chosen(MODELS / "qwen3_32b", 1, 1, 24.0)


def test_the_choice_is_printed_with_the_demonstration_task(tmp_path, capsys):
    shutil.copytree(TINY, tmp_path / "mine")
    mine = ["--hf-checkpoint", str(tmp_path / "mine"), "--gpus-per-node", "0", "--"]
    assert choosing.main(mine) == 0
    said = capsys.readouterr().err
    assert said.startswith("No PROMPT_DATA is given: this trains on a demonstration task, reasoning_gym://")
    assert "small_cpu.yaml" in said
    assert choosing.main([*mine, "--prompt-data", "train.jsonl"]) == 0
    assert "demonstration" not in capsys.readouterr().err
