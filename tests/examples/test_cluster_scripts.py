"""Runs under SLURM and KubeRay go on where they were: their scripts, with stand-ins for what they call."""

import os
import shutil
import signal
import subprocess
from contextlib import suppress

import pytest
import yaml

from megatron_ibpo.run.settings import parse_config
from support.paths import ROOT
from support.waiting import eventually

STAND_INS = {
    "bin/scontrol": """
        case $1 in
        show) if [[ $2 == hostnames ]]; then printf 'localhost\\nother\\n'; else echo "JobState=$STATE"; fi ;;
        requeue) echo "$2" >>requeued ;;
        esac""",
    # each task of a step, as SLURM starts them
    "bin/srun": """
        while [[ $1 == --* ]]; do case $1 in --ntasks=*) tasks=${1#*=} ;; esac; shift; done
        for ((rank = 0; rank < tasks; rank++)); do SLURM_PROCID=$rank "$@" & done
        trap 'kill $(jobs -p)' TERM
        for task in $(jobs -p); do
            while kill -0 $task 2>/dev/null; do wait $task || true; done
            wait $task || status=$?
        done
        exit ${status:-0}""",
    "examples/run.sh": """
        echo "$NODE_RANK of $NNODES at $MASTER_ADDR: $*" >>started
        [[ -z ${ENDS:-} ]] || exit "$ENDS"
        if [[ $NODE_RANK == 0 ]]; then
            trap 'mkdir -p "$RUN_DIR/journal"; echo saved >>started; exit 130' TERM
            while true; do sleep 0.05; done
        fi""",
}


@pytest.fixture
def slurm(tmp_path):
    for name, text in STAND_INS.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/usr/bin/env bash\n" + text)
        path.chmod(0o755)
    shutil.copy(ROOT / "examples/cluster/slurm.sh", tmp_path / "job.sh")

    def submit(**variables):
        environment = os.environ | {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "node[1-3]", "SLURM_JOB_NUM_NODES": "3",
            "SLURM_JOB_ID": "7", "RUN_DIR": str(tmp_path / "run"), "HF_CHECKPOINT": "/models/a",
            "STATE": "RUNNING",
        } | variables  # fmt: skip
        command = ["bash", "job.sh", "--lr", "1e-6"]
        jobs.append(subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True))
        return jobs[-1]

    jobs = []
    yield submit
    for job in jobs:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


def test_a_slurm_job_is_saved_before_its_end_and_resumes(slurm, tmp_path):
    started, requeued = tmp_path / "started", tmp_path / "requeued"
    job = slurm()
    assert eventually(lambda: len(lines(started)) == 3, seconds=20)
    assert sorted(lines(started)) == [f"{n} of 3 at 127.0.0.1: --lr 1e-6" for n in range(3)]
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 130
    assert (lines(started)[3:], lines(requeued)) == (["saved"], ["7"])
    started.unlink()
    assert slurm(ENDS="0").wait(20) == 0
    assert lines(started)[0].endswith(f": --lr 1e-6 --load {tmp_path / 'run'}")
    assert lines(requeued) == ["7"], "what is finished is not started again"


def test_a_slurm_job_is_requeued_where_that_can_help(slurm, tmp_path):
    cancelled, too_often = ({"ENDS": "1", "STATE": "CANCELLED"}, {"ENDS": "1", "SLURM_RESTART_COUNT": "50"})
    for variables in ({"ENDS": "2"}, cancelled, too_often):
        assert slurm(**variables).wait(20) == int(variables["ENDS"])
        assert lines(tmp_path / "requeued") == [], variables
    assert slurm(ENDS="1").wait(20) == 1
    assert lines(tmp_path / "requeued") == ["7"]


def test_the_job_of_kuberay_is_one_that_can_be_run(tmp_path, monkeypatch):
    job, policy = yaml.safe_load_all((ROOT / "examples/cluster/kuberay.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    assert (job["kind"], policy["kind"]) == ("RayJob", "NetworkPolicy")
    assert cluster["authOptions"] == {"mode": "token"}
    head = cluster["headGroupSpec"]["template"]
    assert [head] == [workers["template"] for workers in cluster["workerGroupSpecs"]]
    assert policy["spec"]["podSelector"]["matchLabels"] == head["metadata"]["labels"]
    checkout, run_dir = tmp_path / "opt", tmp_path / "run"
    for directory in (checkout / "tools", run_dir):
        directory.mkdir(parents=True)
    (checkout / "tools/ibpo.sh").write_text('printf "%s\\n" "$@" >"$RUN_DIR/../words"\n')
    shutil.copytree(ROOT / "examples/cluster", checkout / "examples/cluster")
    words = job["spec"]["entrypoint"].replace("/opt/megatron_ibpo", str(checkout)).split()
    monkeypatch.setenv("RUN_DIR", str(run_dir))
    for begun in (False, True):
        subprocess.run(words, check=True, timeout=20)
        command, *flags = (tmp_path / "words").read_text().splitlines()
        assert (command, "--load" in flags) == ("train", begun)
        config = parse_config([flag.replace(str(checkout), str(ROOT)) for flag in flags])
        assert (config.run.run_dir, config.run.load) == (run_dir, run_dir if begun else None)
        (run_dir / "journal").mkdir(exist_ok=True)
