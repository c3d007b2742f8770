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

from support.example_runs import (
    ONE_TRAINER,
    SMALL,
    engines_among,
    finished,
    rows_of,
    start_script,
    started_by,
    still_running,
    wait_for_step,
)
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


def listening(process):
    return [
        ip_address(socket.laddr.ip)
        for socket in process.net_connections(kind="inet")
        if socket.status == psutil.CONN_LISTEN or socket.type.name == "SOCK_DGRAM"
    ]


def has_engines(process):
    with contextlib.suppress(psutil.Error):  # one that has just ended
        return bool(engines_among(started_by(process)))
    return False


def saved_steps(run_dir):
    return [int(path.name.removeprefix("step_")) for path in sorted((run_dir / "checkpoints").glob("step_*"))]


def is_loopback(address):
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def test_all_of_a_run_on_one_machine_listens_on_loopback_and_ends_at_sigterm(tmp_path, scratch):
    """The signal goes to the whole process group, as `kill %1` and `timeout` send it."""
    run_dir = tmp_path / "run"
    process = start_script(run_dir, *LONG)
    wait_for_step(run_dir, 1, process)
    started = started_by(process)
    addresses = {one.pid: listening(one) for one in [psutil.Process(process.pid), *started]}
    assert sum(map(len, addresses.values())) > 10
    assert all(is_loopback(address) for found in addresses.values() for address in found), addresses
    os.killpg(process.pid, signal.SIGTERM)
    status, output = finished(process, 100)
    assert status == 130, output[-5000:]
    assert saved_steps(run_dir)[-1] == rows_of(run_dir)[-1]["step"]
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
    assert still_running(started) == []


def test_a_closed_terminal_loses_no_step(tmp_path, scratch):
    run_dir = tmp_path / "run"
    process = start_script(run_dir, *LONG, *ONE_TRAINER)
    wait_for_step(run_dir, 1, process)
    started = started_by(process)
    process.stdout.close()
    os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(100) == 130
    assert saved_steps(run_dir)[-1] == rows_of(run_dir)[-1]["step"]
    assert "interrupted: " in (run_dir / "hangup.log").read_text()
    assert still_running(started) == []


def test_a_signal_while_engines_start_ends_the_run_at_once(tmp_path, scratch):
    process = start_script(tmp_path / "run", *LONG, *ONE_TRAINER)
    assert eventually(lambda: has_engines(process), seconds=100)
    started = started_by(process)
    os.killpg(process.pid, signal.SIGINT)
    status, output = finished(process, 60)
    assert status == 130, output[-5000:]
    assert "Traceback" not in output
    assert still_running(started) == []
    assert not (tmp_path / "run/metrics.jsonl").exists() or rows_of(tmp_path / "run") == []


def test_a_signal_cuts_the_first_evaluation_short(tmp_path, scratch):
    flags = [*SMALL, *ONE_TRAINER, "--eval-num-prompts", "20000"]
    process = start_script(tmp_path / "run", *flags)
    while "trainers 0, engines 0" not in (line := process.stdout.readline()):
        assert line, "it ended before it began"
    started = started_by(process)
    os.killpg(process.pid, signal.SIGTERM)
    status, output = finished(process, 60)
    assert status == 130, output[-5000:]
    assert "Traceback" not in output
    assert rows_of(tmp_path / "run", "evaluation") == []
    assert still_running(started) == []


def test_trainers_that_are_killed_again_and_again_end_the_run_and_are_named(tmp_path, scratch):
    run_dir = tmp_path / "run"
    process = start_script(run_dir, *LONG)
    wait_for_step(run_dir, 1, process)
    started, killed = set(started_by(process)), []
    while process.poll() is None and len(killed) < 20:
        here = started_by(process)
        started |= set(here)
        for trainer in by_kind(here)["trainer"][:1]:
            killed.append(trainer.pid)
            trainer.kill()
        time.sleep(0.2)
    status, output = finished(process, 100)
    assert status == 1, output[-5000:]
    assert "all trainers start again from the last checkpoint" in output
    assert "the trainers are back" not in output
    said = [f"was killed by SIGKILL (process {pid} on 127.0.0.1)" for pid in killed]
    assert any(words in output for words in said)
    assert "out-of-memory killer" in output
    assert "its memory had reached" in output
    ended = json.loads((run_dir / "summary.json").read_text())["status"]
    assert any(words in ended for words in said)
    assert still_running(started) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with 120 MB, and what fills it up."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120m", "none", place], check=False).returncode:
        pytest.skip("only root may mount a tmpfs")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def fill(place):
    """Fill the disk, whatever the run writes meanwhile."""
    with (place / "filling").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**16))


def test_a_run_waits_for_room_on_its_disk(small_disk, scratch):
    run_dir = small_disk / "run"
    flags = [*SMALL, *ONE_TRAINER, "--eval-num-prompts", "0", "--num-rollout", "6", "--save-interval", "2"]
    process = start_script(run_dir, *flags)
    wait_for_step(run_dir, 1, process)
    fill(small_disk)
    while "the disk is full" not in (line := process.stdout.readline()):
        assert line, "it ended"
    (small_disk / "filling").unlink()
    status, output = finished(process, 100)
    assert status == 0, output[-5000:]
    assert "the disk has space again" in output
    assert [row["step"] for row in rows_of(run_dir)] == [1, 2, 3, 4, 5, 6]
    assert saved_steps(run_dir) == [4, 6]


def test_a_run_whose_disk_stays_full_stops_with_a_summary_and_nothing_in_part(small_disk, scratch):
    run_dir = small_disk / "run"
    process = start_script(run_dir, *LONG, *ONE_TRAINER, "--save-interval", "1", "--disk-wait", "3")
    wait_for_step(run_dir, 2, process)
    fill(small_disk)
    status, output = finished(process, 100)
    assert status == 1, output[-5000:]
    assert "Traceback" not in output
    assert "error: the disk stayed full for 3 s (--disk-wait)" in output
    assert output.count("the disk stayed full") == 1, "said once"
    for checkpoint in (run_dir / "checkpoints").glob("step_*"):
        assert json.loads((checkpoint / "run_state.json").read_text())["step"] > 0
    assert [row["step"] for row in rows_of(run_dir)]  # every line is JSON
    assert not (run_dir / "summary.json").exists() or json.loads((run_dir / "summary.json").read_text())
    (log,) = scratch.glob("ibpo-*.log")  # since there is no room for it in the run's directory
    assert str(log) in output
    assert "Traceback" in log.read_text()
    log.unlink()
