"""A full disk, and two runs that want one directory."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from megatron_ibpo.basics.entry_point import guarded
from megatron_ibpo.basics.record_lines import append_record, append_whole, open_records, record_lines
from megatron_ibpo.config import ConfigError
from megatron_ibpo.report.disk import DiskFullError, DiskWait
from megatron_ibpo.report.metrics_log import MetricsLog, read_rows
from megatron_ibpo.report.run_dir import locked, write_whole
from support.paths import ROOT


class Disk:
    """One that has no room for the first `times` writes."""

    def __init__(self, times, code=errno.ENOSPC):
        self.left, self.code, self.said = times, code, []

    def write(self):
        if self.left:
            self.left -= 1
            raise OSError(self.code, os.strerror(self.code))
        return "written"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_write_is_made_again_until_there_is_room(code):
    disk = Disk(3, code)
    assert DiskWait(60, disk.said.append, look_every=0.001).write(disk.write) == "written"
    assert len(disk.said) == 2, "when it began, and when it was over"
    assert "the run waits up to 60 s for space (--disk-wait)" in disk.said[0]
    assert "space again" in disk.said[1]


def test_there_is_an_end_to_waiting_for_room():
    disk = Disk(10**9)
    began = time.monotonic()
    with pytest.raises(DiskFullError, match=r"the disk stayed full for 0\.05 s .*No space left"):
        DiskWait(0.05, disk.said.append, look_every=0.001).write(disk.write)
    assert 0.05 <= time.monotonic() - began < 5
    assert len(disk.said) == 1


class Clock:
    """A clock that only sleeping moves on."""

    def __init__(self):
        self.seconds = 0.0

    def sleep(self, seconds):
        self.seconds += seconds


def clocked(disk, wait=600):
    clock = Clock()
    return clock, DiskWait(wait, disk.said.append, now=lambda: clock.seconds, sleep=clock.sleep)


def test_many_writers_in_turn_share_one_deadline():
    disk = Disk(10**9)
    clock, room = clocked(disk)
    for _ in range(256):
        with pytest.raises(DiskFullError, match="the disk stayed full for 600 s"):
            room.write(disk.write)
    assert clock.seconds == 600, "and not 43 hours"
    assert len(disk.said) == 1


def test_a_write_that_found_room_again_begins_a_new_deadline():
    disk = Disk(200)
    clock, room = clocked(disk)
    room.write(disk.write)
    assert clock.seconds == 400
    disk.left = 200
    room.write(disk.write)
    assert clock.seconds == 800
    assert len(disk.said) == 4
    disk.left = 10**9
    with pytest.raises(DiskFullError):
        room.write(disk.write)
    disk.left = 0
    room.write(disk.write)
    disk.left = 3
    assert room.write(disk.write) == "written", "the next deadline is a new one"


def test_small_writes_that_succeed_do_not_keep_a_large_one_waiting_for_ever():
    large, small = Disk(10**9), Disk(0)
    clock, room = clocked(large)

    def write():
        room.write(small.write)
        if clock.seconds % 10 == 0:  # now and then a small one is refused, too
            small.left = 1
        large.write()

    with pytest.raises(DiskFullError):
        room.write(write)
    assert clock.seconds <= 610


def test_what_else_fails_is_not_waited_for():
    disk = Disk(1, errno.EACCES)
    with pytest.raises(PermissionError):
        DiskWait(60, disk.said.append).write(disk.write)
    assert disk.said == []


@contextmanager
def small_files():
    """Files may have 4,096 bytes, as on a disk with no more: what goes beyond fails after a part of it.

    Not a fixture: the limit is the process's, and pytest's own report, which is longer, may go to a file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_line_is_appended_whole_or_not_at_all(tmp_path):
    path = tmp_path / "lines"
    with small_files(), path.open("ab", buffering=0) as file:
        append_whole(file, b"a" * 3000 + b"\n")
        with pytest.raises(OSError, match=r"too large: .*lines"):
            append_whole(file, b"b" * 3000 + b"\n")
        append_whole(file, b"c\n")
    assert path.read_bytes() == b"a" * 3000 + b"\nc\n"


def test_a_line_that_was_never_finished_is_left_out_and_cut_off(tmp_path):
    path = tmp_path / "new" / "lines"
    with open_records(path) as file:
        append_record(file, {"a": 1})
        file.write(b'{"a": 2}')  # all but its end
    assert list(record_lines(path)) == [(f"{path}, line 1", b'{"a": 1}\n')]
    with open_records(path) as file:
        append_record(file, {"a": 3})
    assert path.read_text() == '{"a": 1}\n{"a": 3}\n'


def test_a_line_for_a_file_that_was_deleted_meanwhile_is_an_error(tmp_path):
    path = tmp_path / "run" / "lines"
    path.parent.mkdir()
    with path.open("ab", buffering=0) as file:
        append_whole(file, b"a\n")
        shutil.rmtree(path.parent)
        with pytest.raises(FileNotFoundError, match="run/lines"):
            append_whole(file, b"b\n")


def test_a_file_that_finds_no_room_leaves_the_one_before(tmp_path):
    write_whole(tmp_path / "kept.json", "old")
    with small_files(), pytest.raises(OSError, match="too large"):
        write_whole(tmp_path / "kept.json", "new" * 10000)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    assert (tmp_path / "kept.json").read_text() == "old"


def test_a_row_that_found_no_room_is_nowhere_and_may_be_appended_again(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path)
    disk = Disk(1)
    whole = append_whole

    def on_a_full_disk(file, data):
        disk.write()
        whole(file, data)

    monkeypatch.setattr("megatron_ibpo.basics.record_lines.append_whole", on_a_full_disk)
    with pytest.raises(OSError, match="No space"):
        log.append("step", 1, {"reward": 0.5}, {})
    assert log.rows == []
    log.append("step", 1, {"reward": 0.5}, {})
    log.close()
    assert [row["reward"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0.5]


def test_a_tensorboard_that_cannot_write_is_said_once_and_the_rows_go_on(tmp_path, capfd, caplog):
    def work():
        log = MetricsLog(tmp_path)
        for step in (1, 2, 3):
            log.append("step", step, {"reward": 0.5}, {})
            shutil.rmtree(tmp_path / "tensorboard", ignore_errors=True)
        log.close()

    assert guarded(work) == 0
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("TensorBoard logging has stopped")
    assert capfd.readouterr().err == ""
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 3


HOLD = """
import sys, time
from pathlib import Path
from megatron_ibpo.report.run_dir import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_directory_has_one_run_whose_death_frees_it(tmp_path):
    run_dir = tmp_path / "new" / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert holder.stdout.readline() == "held\n"
        said = rf"{run_dir} is in use by process {holder.pid} on .*, since 2"
        with pytest.raises(ConfigError, match=said), locked(run_dir):
            pass
        assert f"process {holder.pid} on " in (run_dir / "run.lock").read_text(), "still that of the holder"
    finally:
        holder.kill()
        holder.wait(10)
    with locked(run_dir):
        assert f"process {os.getpid()} on " in (run_dir / "run.lock").read_text()
        with pytest.raises(ConfigError, match="in use"), locked(run_dir):
            pass
    with locked(run_dir):
        pass


def test_a_directory_that_cannot_be_written_is_said_before_it_is_locked(tmp_path):
    (tmp_path / "file").write_text("")
    within = tmp_path / "file" / "run"
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"), locked(within):
        pass
