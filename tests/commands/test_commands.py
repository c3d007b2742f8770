"""Every command ends an error in one line, with the exit status that says whether another try may help."""

import errno
import importlib
import json
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
from megatron_ibpo.basics.entry_point import BAD_INPUT, FAILED, INTERRUPTED, STDOUT_CLOSED, command, guarded
from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.cluster.actor import original_error
from megatron_ibpo.commands import main, train
from megatron_ibpo.config import ConfigError
from megatron_ibpo.report import RewardErrorRateError
from megatron_ibpo.weights.weight_errors import CheckpointError
from support.checkpoint_bytes import cut_in_half
from support.paths import ROOT


def ends(capsys, work, **options):
    """(exit status, the one line on stderr) of a function, or of one that raises this error."""

    def failing():
        raise work

    status = guarded(failing if isinstance(work, BaseException) else work, **options)
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return status, said.removesuffix("\n")


def test_bad_input_is_one_line_and_no_file_and_a_failure_names_its_log(capsys, tmp_path):
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


def test_a_bug_asks_for_a_report_and_a_value_error_is_one_where_others_raise_it(capsys, tmp_path):
    bugs = {"TypeError: unsupported operand": lambda: 1 + "a\nb", "ValueError: invalid": lambda: int("x")}
    for says, bug in bugs.items():
        status, line = ends(capsys, bug, logs=tmp_path / "gone/logs")
        said = rf"error: internal error: {says}.*; the traceback is in (\S+?\.log).*; please report it"
        kept = Path(re.fullmatch(said, line)[1])  # in the temporary directory where there is no run's
        assert status == FAILED
        assert "Traceback (most recent call last)" in kept.read_text()
        kept.unlink()
    assert ends(capsys, lambda: read_json("[NaN]")) == (BAD_INPUT, "error: NaN is no number in JSON")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a.json"), 2, "a.json: No such file"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "{run}/x"), 1, "{run}/x: No such file"),
        (OSError(errno.EIO, "Input/output error", "a.json"), 1, "a.json: Input/output error"),
        (OSError(errno.EMFILE, "Too many open files"), 1, "Too many open files"),
        (MemoryError(), 1, "out of memory"),
        (RecursionError("too deep"), 1, "internal error: RecursionError: too deep"),
        (json.JSONDecodeError("Expecting value", "", 0), 2, "an input cannot be read: JSON"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), 2, "an input cannot be read: "),
    ],
    ids=str,
)
def test_other_errors_say_what_they_are_about(capsys, tmp_path, error, status, said):
    if isinstance(error, OSError) and error.filename:
        error.filename = error.filename.format(run=tmp_path)
    found, line = ends(capsys, error, logs=tmp_path / "logs")
    assert found == status
    assert line.startswith("error: " + said.format(run=tmp_path))


def test_a_checkpoint_that_is_missing_because_the_run_was_deleted_is_no_bad_input(tmp_path, capsys):
    """Trainers that start again may be the first to find it."""
    missing = CheckpointError(f"{tmp_path}/run/checkpoints/step_000010 holds no Megatron checkpoint")
    status, line = ends(capsys, missing, logs=tmp_path / "run/logs")
    assert (status, "the run's directory is gone" in line) == (FAILED, True)
    (tmp_path / "run").mkdir()
    status, line = ends(capsys, missing, logs=tmp_path / "run/logs")
    assert (status, "the run's directory is gone" in line) == (BAD_INPUT, False)


@pytest.mark.parametrize(("work", "status"), [(lambda: read_json("[NaN]"), 2), (lambda: int("x"), 1)])
def test_an_error_in_a_rays_process_comes_with_its_traceback_there(capsys, tmp_path, work, status):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 of any text
        work()
    there = RayTaskError("_Process.call", "".join(traceback.format_exception(raised.value)), raised.value)
    raised.value.__traceback__ = None

    def driver():
        raise original_error(there, "trainer 1") from None

    found, line = ends(capsys, driver, logs=tmp_path / "logs")
    assert found == status
    assert f"; the traceback is in {tmp_path}/logs/driver.log" in line
    assert "in trainer 1:\n" in (tmp_path / "logs/driver.log").read_text()


def test_ctrl_c_has_its_own_status_and_a_traceback_that_no_disk_takes_is_left_out(capsys, monkeypatch):
    assert ends(capsys, KeyboardInterrupt(), stopped="stopped") == (INTERRUPTED, "stopped")
    monkeypatch.setattr("tempfile.mkstemp", lambda **_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    assert ends(capsys, MemoryError()) == (FAILED, "error: out of memory")


PRINTING = """
from megatron_ibpo.basics.entry_point import command
@command
def main():
    for line in range(100_000):
        print(line)
raise SystemExit(main())
"""


def test_a_reader_that_goes_and_a_closed_stdout_are_no_errors():
    piped = ["bash", "-c", '"$0" -c "$1" | head -1; echo "${PIPESTATUS[0]}"', sys.executable, PRINTING]
    done = subprocess.run(piped, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    assert (done.stdout.split(), done.stderr) == (["0", str(STDOUT_CLOSED)], "")
    closed = ["bash", "-c", '"$0" -m megatron_ibpo.commands.main --help >&-', sys.executable]
    done = subprocess.run(closed, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    assert done.stderr == ""


def test_versions_and_both_ways_to_convert_are_told_and_main_can_be_pickled(capsys):
    """Studies start runs in processes of their own."""
    assert main.main(["--version"]) == 0
    own, libraries = capsys.readouterr().out.splitlines()
    assert own.startswith(f"megatron_ibpo {__version__}")
    assert re.fullmatch(r"torch 2\.\S+, megatron-core \S+, vllm \S+, transformers 5\.\S+", libraries)
    for words in (["--help"], ["convert"], ["convert", "--help"]):
        assert main.main(words) == 0
        said = capsys.readouterr().out
        assert "convert to-megatron" in said
        assert "convert to-hf" in said
        assert ("train" in said) == (words == ["--help"])
    assert pickle.loads(pickle.dumps(train.main)) is train.main
    assert command(lambda: 3)() == 3


TINY, RECIPE = ROOT / "examples/tiny_qwen3", ROOT / "examples/recipes/tiny_qwen3_study.yaml"
A_RUN = ["--config", str(RECIPE), "--run-dir", "run"]
LEAN = [*A_RUN, "--rollout-backend", "lean"]
"""Whose data and weights are read at once, without Ray."""
COMPARE, SAVE = "tools/compare_methods.py", ["--save", "out"]
CONVERT = ["--hf-checkpoint", "nowhere", "--save", "out"]
WRONG = [
    ("train", ["--config", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ("train", [*A_RUN, "--hf-checkpoint", "nowhere"], "nowhere is not a directory"),
    ("train", [*A_RUN, "--hf-checkpoint", "malformed"], "malformed/config.json is"),
    ("train", [*A_RUN, "--tensor-model-parallel-size", "3"],
     "--tensor-model-parallel-size=3 does not divide the attention heads (4)"),
    ("train", [*A_RUN, "--load", "."], "there is no step_N"),
    ("train", [*LEAN, "--hf-checkpoint", "truncated"], "truncated/model.safetensors"),
    ("train", [*LEAN, "--prompt-data", "bad.jsonl"], "line 1"),
    ("train", [*LEAN, "--rm-type", "no_such_module:score"], "no_such_module"),
    ("train", [*LEAN, "--run-dir", "/proc/run"], "/proc/run"),
    ("evaluate", ["nowhere"], "nowhere is not a policy"),
    ("evaluate", ["compare", "nowhere", "nowhere"], "holds no results.json"),
    ("plan", ["search", "--gpus", "8", "--hardware", "h100", "--hf-checkpoint", "nowhere"], "nowhere"),
    ("plan", ["search"], "missing: --gpus"),
    ("plan", ["calibrate", *A_RUN], "--dry-run-hardware: required"),
    ("page", ["page", "list.yaml"], "list.yaml"),
    ("page", ["serve"], "which run?"),
    ("page", ["page", "nowhere", "--weird"], "no such flag: --weird; --help lists"),
    ("loss", ["gspo", "--width", "x"], "--width: could not convert string to float"),
    ("pass_rates", A_RUN, "--pass-rates: required"),
    ("choose_recipe", ["--hf-checkpoint", "nowhere"], "nowhere"),
    ("main", ["konvert"], "convert to-megatron, convert to-hf"),
    (COMPARE, [], "missing: --save PATH"),
    (COMPARE, SAVE, "name a study, such as examples/studies/mini.yaml"),
    (COMPARE, ["list.yaml", *SAVE], "list.yaml: must hold `key: value` lines"),
    (COMPARE, ["missing.yaml", *SAVE], "a study needs baseline, budget"),
    (COMPARE, ["task.yaml", *SAVE], "task t: warm-start must be `key: value` lines"),
    (COMPARE, ["tune.yaml", *SAVE], "tune: seeds must be a list of whole numbers"),
    (COMPARE, ["wrong.json", *SAVE], "wrong.json: holds no results of a study"),
    ("tools/audit_credit.py", ["nowhere"], "nowhere holds no config.yaml"),
    ("tools/audit_credit.py", ["nowhere", "--rollouts", "3"], "--rollouts must be even"),
    ("tools/operator_skill.py", ["nowhere"], "nowhere holds no policy"),
    ("tools/operator_skill.py", ["nowhere", "--targets", "0"], "--prompts and --targets must be at least 1"),
    ("tools/inspect_checkpoint.py", ["nowhere"], "nowhere"),
    ("tools/inspect_data.py", ["--hf-checkpoint", "nowhere", "--prompt-data", "a"], "nowhere"),
    ("tools/inspect_data.py", ["--hf-checkpoint", str(TINY), "--prompt-data", "a.jsonl"], "no such file"),
    ("tools/convert_hf_to_megatron.py", CONVERT, "nowhere"),
    ("tools/convert_megatron_to_hf.py", ["--load", "nowhere", "--save", "out"], "nowhere"),
    ("tools/convert_gguf_to_hf.py", ["--save", "out"], "--gguf or a package"),
    ("tools/convert_gguf_to_hf.py", ["--gguf", "nowhere.gguf", "--save", "out"], "no file nowhere.gguf"),
    ("tools/make_word_problems.py", ["--save", "list.yaml"], "list.yaml"),
]  # fmt: skip

STUDY = {"methods": {"a": {}, "b": {}}, "baseline": "a", "budget": 3}


@pytest.fixture
def where_the_user_stands(tmp_path, monkeypatch):
    for name, content in {
        "list.yaml": [1],
        "missing.yaml": {"methods": {}},
        "task.yaml": STUDY | {"tasks": {"t": {"settings": {}, "warm-start": 3}}},
        "tune.yaml": STUDY | {"tune": {"grid": {"lr": [1.0]}, "seeds": 3, "budget": 1}},
        "wrong.json": [],
        "bad.jsonl": {"prompt": "1+2"},
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
    for name in ("malformed", "truncated"):
        shutil.copytree(TINY, tmp_path / name)
    (tmp_path / "malformed/config.json").write_text("{")
    cut_in_half(tmp_path / "truncated/model.safetensors")
    monkeypatch.setenv("IBPO_CWD", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def status_of_tool(monkeypatch, program, *words):
    monkeypatch.setattr("sys.argv", [program, *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / program), run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize(("program", "words", "says"), WRONG, ids=lambda part: str(part)[:40])
def test_a_wrong_input_is_one_line_and_status_2(
    where_the_user_stands, capsys, monkeypatch, program, words, says
):
    if program.endswith(".py"):
        status = status_of_tool(monkeypatch, program, *words)
    else:
        status = importlib.import_module(f"megatron_ibpo.commands.{program}").main(words)
    said = capsys.readouterr().err
    assert status == BAD_INPUT, said
    assert "traceback" not in said.lower(), "what was given is at fault, and the line says it all"
    (line,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert says in said.partition(line)[1] + said.partition(line)[2]


def test_what_a_study_would_cost_is_an_answer_and_no_failure(where_the_user_stands, capsys, monkeypatch):
    Path("whole.yaml").write_text(json.dumps(STUDY | {"recipe": str(RECIPE)}), encoding="utf-8")
    assert status_of_tool(monkeypatch, COMPARE, "whole.yaml", "--runs-at-most", "0", *SAVE) == 0
    assert "runs are there already" in capsys.readouterr().out
