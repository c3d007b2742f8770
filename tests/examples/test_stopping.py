"""A run stops in order when it is asked to, when a process of it is killed, and when its disk is full."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest
from chaos.processes import by_kind, shared_memory_of

from support import example_runs as runs
from support.example_runs import ONE_TRAINER, SMALL, rows_of, start_script, wait_for_step
from support.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.slow]
LONG = [*SMALL, "--num-rollout", "500", "--eval-num-prompts", "0"]


@pytest.fixture
def scratch(monkeypatch):
    """The temporary directory of all that is started: nothing is left there but torch's own cache."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        before = set(os.listdir("/dev/shm"))
        yield Path(directory)
        left = [path.name for path in Path(directory).iterdir()]
        assert [name for name in left if not name.startswith("torchinductor_")] == []
        new = set(os.listdir("/dev/shm")) - before
        assert new <= shared_memory_of(psutil.process_iter()), "shared memory that no process uses any more"


def run_until(run_dir, step, *flags):
    process = start_script(run_dir, *flags)
    wait_for_step(run_dir, step, process)
    return process, runs.started_by(process)


def saved_steps(run_dir):
    return [int(path.name.removeprefix("step_")) for path in sorted((run_dir / "checkpoints").glob("step_*"))]


def output_of_end(process, status, *, timeout=100, started=()):
    found, output = runs.finished(process, timeout)
    assert found == status, output[-5000:]
    assert runs.still_running(started) == []
    return output


def test_a_local_run_stays_on_loopback_and_stops_at_signals(tmp_path, scratch):
    """It goes to the whole process group, as a terminal, `kill %1` and `timeout` send it."""
    run_dir = tmp_path / "run"
    process, started = run_until(run_dir, 1, *LONG)
    addresses = [
        ip_address(socket.laddr.ip)
        for one in [psutil.Process(process.pid), *started]
        for socket in one.net_connections(kind="inet")
        if socket.status == psutil.CONN_LISTEN or socket.type.name == "SOCK_DGRAM"
    ]
    assert len(addresses) > 10
    assert all((getattr(address, "ipv4_mapped", None) or address).is_loopback for address in addresses)
    os.killpg(process.pid, signal.SIGINT)
    output, taken = output_of_end(process, 130, started=started), rows_of(run_dir)[-1]["step"]
    assert saved_steps(run_dir)[-1] == taken
    assert f"To resume after step {taken} " in output
    assert f"--load {run_dir}" in output
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"


def test_a_signal_while_engines_start_ends_the_run_at_once(tmp_path, scratch):
    def has_engines():
        with contextlib.suppress(psutil.Error):  # one that has just ended
            return runs.engines_among(runs.started_by(process))

    process = start_script(tmp_path / "run", *LONG, *ONE_TRAINER)
    assert eventually(has_engines, seconds=100)
    started = runs.started_by(process)
    os.killpg(process.pid, signal.SIGTERM)
    assert "Traceback" not in output_of_end(process, 130, timeout=60, started=started)
    assert rows_of(tmp_path / "run") == []


def test_trainers_killed_repeatedly_end_the_run_and_are_named(tmp_path, scratch):
    run_dir = tmp_path / "run"
    process, started = run_until(run_dir, 1, *LONG)
    started, killed = {*started}, []
    while process.poll() is None and len(killed) < 20:
        here = runs.started_by(process)
        started |= set(here)
        for trainer in by_kind(here)["trainer"][:1]:
            killed.append(trainer.pid)
            trainer.kill()
        time.sleep(0.2)
    output = output_of_end(process, 1, started=started)
    assert "all trainers start again from the last checkpoint" in output
    assert "the trainers are back" not in output
    assert "out-of-memory killer" in output
    assert "its memory had reached" in output
    for text in (output, json.loads((run_dir / "summary.json").read_text())["status"]):
        assert any(f"was killed by SIGKILL (process {pid} on 127.0.0.1)" in text for pid in killed)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with 120 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120m", "none", place], check=False).returncode:
        pytest.skip("only root may mount a tmpfs")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def fill(place):
    with (place / "filling").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**16))


def test_a_run_waits_for_room_on_its_disk(small_disk, scratch):
    run_dir = small_disk / "run"
    flags = [*SMALL, *ONE_TRAINER, "--eval-num-prompts", "0", "--num-rollout", "6", "--save-interval", "2"]
    process, _ = run_until(run_dir, 1, *flags)
    fill(small_disk)
    while "the disk is full" not in (line := process.stdout.readline()):
        assert line, "it ended before"
    (small_disk / "filling").unlink()
    assert "the disk has space again" in output_of_end(process, 0)
    assert [row["step"] for row in rows_of(run_dir)] == [1, 2, 3, 4, 5, 6]
    assert saved_steps(run_dir) == [4, 6]


def test_a_full_disk_stops_a_run_without_partial_files(small_disk, scratch):
    run_dir = small_disk / "run"
    process, _ = run_until(run_dir, 2, *LONG, *ONE_TRAINER, "--save-interval", "1", "--disk-wait", "3")
    fill(small_disk)
    output = output_of_end(process, 1)
    assert "Traceback" not in output
    assert "error: the disk stayed full for 3 s (--disk-wait)" in output
    assert output.count("the disk stayed full") == 1, "said once"
    for checkpoint in (run_dir / "checkpoints").glob("step_*"):
        assert json.loads((checkpoint / "run_state.json").read_text())["step"] > 0
    assert rows_of(run_dir)  # every line is JSON
    assert not (run_dir / "summary.json").exists() or json.loads((run_dir / "summary.json").read_text())
    (log,) = scratch.glob("ibpo-*.log")  # since there is no room for it in the run's directory
    assert str(log) in output
    assert "Traceback" in log.read_text()
    log.unlink()
