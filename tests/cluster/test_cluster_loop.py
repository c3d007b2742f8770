"""The loop on a cluster of three nodes, simulated on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.paths import ROOT
from support.simulated_cluster import simulated_cluster
from support.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.engine]

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def cluster():
    with simulated_cluster(3) as started:
        yield started


def command_of(address, run_dir, *flags):
    """The tiny recipe on the cluster."""
    return [
        *(sys.executable, "-m", "megatron_ibpo.commands.train"),
        *("--config", str(ROOT / "examples/recipes/tiny_qwen3_next_ibpo.yaml")),
        *("--run-dir", str(run_dir), "--ray-address", address),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--eval-num-prompts", "0", "--no-save"),
        *flags,
    ]


def steps(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--no-colocate --rollout-num-gpus 1", ["0, engines –", "1, engines –", "–, engines 0"]),
        ("--num-trainers 2", ["0, engines 0", "1, engines 1", "–, engines –"]),
    ],
    ids=["engines of their own", "engines next to trainers"],
)
def test_trainers_on_two_nodes(cluster, tmp_path, flags, expected):
    flags += " --num-rollout 2 --check-weight-update-equal"
    command = command_of(cluster.address, tmp_path / "run", *flags.split())
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    placed = [line for line in done.stdout.splitlines() if "trainers" in line and "engines" in line]
    wanted = [f"trainers {row}, 2 verifiers" for row in expected]
    assert sorted(line.split(": ", 1)[1] for line in placed) == wanted
    assert [row["step"] for row in steps(tmp_path / "run")] == [1, 2]


@pytest.mark.slow
def test_a_lost_node_is_waited_for_and_nothing_is_sampled_twice(tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"

    def wait_for(words, seconds):
        assert eventually(lambda: words in log.read_text(), seconds), log.read_text()[-5000:]

    with simulated_cluster(3) as cluster, log.open("w") as output:
        flags = ["--num-rollout", "8", "--no-colocate", "--rollout-num-gpus", "1"]
        command = command_of(cluster.address, run_dir, *flags)
        process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=output, stderr=output)
        wait_for("step 2/8", 240)
        engine = next(p for p in psutil.process_iter() if is_engine_of(p, run_dir))
        raylet = engine.parent().parent()
        assert raylet.name() == "raylet"
        for process_of_node in [raylet, *raylet.children(recursive=True)]:
            process_of_node.kill()
        wait_for("once the cluster has room", 120)
        cluster.add_node()
        assert process.wait(240) == 0, log.read_text()[-5000:]
    assert [row["step"] for row in steps(run_dir)] == list(range(1, 9))
    replayed = [row for row in steps(run_dir) if row.get("groups_replayed")]
    assert [row["groups_replayed"] for row in replayed[:2]] == [4, 4]


def is_engine_of(process, run_dir):
    """vLLM's process, which writes into the run's logs."""
    try:
        files = [Path(file.path) for file in process.open_files()]
        command = process.cmdline()
    except psutil.Error:
        return False
    return run_dir / "logs/engine_0.log" in files and "engine_process" in " ".join(command)
