"""The loop on a cluster of three nodes, simulated on this machine."""

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from support.example_runs import engines_among, rows_of, started_by
from support.paths import ROOT
from support.simulated_cluster import simulated_cluster
from support.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster():
    with simulated_cluster(3) as started:
        yield started


@pytest.fixture
def start(cluster, tmp_path):
    """Starts the tiny recipe on the cluster, in the directory `run`, with its output in `log`."""
    with (tmp_path / "log").open("w") as output, ExitStack() as stack:

        def start(flags):
            command = [sys.executable, "-m", "megatron_ibpo.commands.train", *flags.split()]
            command += ["--config", str(ROOT / "examples/recipes/tiny_qwen3_next_ibpo.yaml"), "--no-save"]
            command += ["--run-dir", str(tmp_path / "run"), "--ray-address", cluster.address]
            command += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--eval-num-prompts", "0"]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
            stack.callback(process.kill)
            return process

        yield start


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--no-colocate --rollout-num-gpus 1", ["0, engines –", "1, engines –", "–, engines 0"]),
        ("--num-trainers 2", ["0, engines 0", "1, engines 1", "–, engines –"]),
    ],
)
def test_trainers_on_two_nodes(start, tmp_path, flags, expected):
    process = start(f"{flags} --num-rollout 2 --check-weight-update-equal")
    status, said = process.wait(280), (tmp_path / "log").read_text()
    assert status == 0, said[-5000:]
    placed = [line for line in said.splitlines() if "trainers" in line and "engines" in line]
    wanted = [f"trainers {row}, 2 verifiers" for row in expected]
    assert sorted(line.split(": ", 1)[1] for line in placed) == wanted
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2]


def test_a_lost_node_is_waited_for_and_nothing_is_sampled_twice(cluster, start, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"

    def wait_for(words, seconds):
        assert eventually(lambda: words in log.read_text(), seconds), log.read_text()[-5000:]

    process = start("--num-rollout 8 --no-colocate --rollout-num-gpus 1")
    wait_for("step 2/8", 240)
    engine, *_ = engines_among(started_by(cluster.process))
    raylet = next(parent for parent in engine.parents() if parent.name() == "raylet")
    for process_of_node in [raylet, *raylet.children(recursive=True)]:
        process_of_node.kill()
    wait_for("once the cluster has room", 120)
    cluster.add_node()
    assert process.wait(240) == 0, log.read_text()[-5000:]
    assert [row["step"] for row in rows_of(run_dir)] == list(range(1, 9))
    replayed = [row for row in rows_of(run_dir) if row.get("groups_replayed")]
    assert [row["groups_replayed"] for row in replayed[:2]] == [4, 4]
