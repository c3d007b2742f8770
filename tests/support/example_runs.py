import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from support.paths import ROOT

SMALL = ["--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"]
SMALL += ["--eval-num-prompts", "8"]
ONE_TRAINER = ["--num-trainers", "1", "--tensor-model-parallel-size", "1"]
ONE_TRAINER += ["--expert-model-parallel-size", "1"]
EVEN = """
def score(question, response, label, metadata):
    return float(sum(map(ord, response)) % 2 == 0)
"""  # a task that a random model solves every other time
THREE_STEPS = (
    "--num-trainers 2 --tensor-model-parallel-size 2 --sequence-parallel --check-weight-update-equal "
    "--rollout-max-response-len 32 --rollout-max-context-len 256 --rm-type even:score --reward-threshold 1"
)


def train_three_steps(directory, model, *flags):
    """Train a model of the tiny vocabulary on two ranks, each update compared with what the engine holds."""
    (directory / "even.py").write_text(EVEN)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(ROOT / "examples/tiny_qwen3" / file, model)
    run_dir, recipe = directory / "run", str(ROOT / "examples/recipes/small_cpu.yaml")
    command = [sys.executable, "-m", "megatron_ibpo.commands.train", "--config", recipe, *SMALL]
    command += [*THREE_STEPS.split(), *flags, "--hf-checkpoint", str(model), "--run-dir", str(run_dir)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=400, env={**os.environ, "IBPO_CWD": str(directory)})
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["grad_norm"] > 0 for row in rows)
    return rows


def start_script(run_dir, *flags, script="run_qwen3_next_ibpo.sh", directory=ROOT):
    environment = {**os.environ, "RUN_DIR": str(run_dir), "IBPO_PYTHON": sys.executable}
    command = ["bash", str(ROOT / "examples" / script), *flags]
    said: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, cwd=directory, **said, start_new_session=True)


def finished(process, timeout=200):
    """Return (exit status, output); the process and all it started are gone afterwards."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException as error:  # pytest's own time-out, and Ctrl-C, leave nothing behind either
        output = _killed(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        pytest.fail(f"the script did not end in {timeout} s:\n{output[-5000:]}")
    return process.returncode, output


def started_by(process):
    return psutil.Process(process.pid).children(recursive=True)


def engines_among(processes):
    return [p for p in processes if any("engine_process" in word for word in command_of(p))]


def command_of(process):
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended meanwhile
        return []


def still_running(processes):
    _, alive = psutil.wait_procs(processes, timeout=5)
    return alive


def rows_of(run_dir, kind="step"):
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["kind"] == kind]


def wait_for_step(run_dir, step, process, timeout=240):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        if any(row["step"] >= step for row in rows_of(run_dir)):
            return
        time.sleep(0.2)
    pytest.fail(f"step {step} was not reached:\n{_killed(process)[-5000:]}")


def _killed(process):
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[0]
