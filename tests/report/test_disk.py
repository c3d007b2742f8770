import errno
import multiprocessing
import os
import resource
import shutil
import signal
import time
from contextlib import contextmanager

import pytest

from megatron_ibpo.basics.entry_point import guarded
from megatron_ibpo.basics.record_lines import append_record, append_whole, open_records, record_lines
from megatron_ibpo.config import ConfigError
from megatron_ibpo.report.disk import DiskFullError, DiskWait
from megatron_ibpo.report.metrics_log import MetricsLog, read_rows
from megatron_ibpo.report.run_dir import locked, write_whole


class Disk:
    """One that has no room for the first `left` writes; `room` has a clock that only sleeping moves on."""

    def __init__(self, left, code=errno.ENOSPC):
        self.left, self.code, self.said, self.slept = left, code, [], []
        self.room = DiskWait(600, self.said.append, now=lambda: sum(self.slept), sleep=self.slept.append)

    def write(self):
        if self.left:
            self.left -= 1
            raise OSError(self.code, os.strerror(self.code))
        return "written"


def test_many_writers_share_one_deadline_also_where_small_writes_succeed_and_other_errors_have_none():
    disk = Disk(10**9)
    for _ in range(256):
        with pytest.raises(DiskFullError, match=r"the disk stayed full for 600 s .*No space left"):
            disk.room.write(disk.write)
    assert sum(disk.slept) == 600, "and not 43 hours"
    assert len(disk.said) == 1
    denied = Disk(1, errno.EACCES)
    with pytest.raises(PermissionError):
        denied.room.write(denied.write)
    assert denied.said == []
    large, small = Disk(10**9), Disk(0)

    def write():
        large.room.write(small.write)
        if sum(large.slept) % 10 == 0:  # now and then a small one is refused, too
            small.left = 1
        large.write()

    with pytest.raises(DiskFullError):
        large.room.write(write)
    assert sum(large.slept) <= 610


def test_a_write_is_made_again_until_there_is_room_and_then_a_new_deadline_begins():
    disk = Disk(200)
    assert disk.room.write(disk.write) == "written"
    assert sum(disk.slept) == 400
    assert len(disk.said) == 2, "when it began, and when it was over"
    assert "the run waits up to 600 s for space (--disk-wait)" in disk.said[0]
    assert "space again after 400 s" in disk.said[1]
    disk.left, disk.code = 200, errno.EDQUOT
    disk.room.write(disk.write)
    assert (sum(disk.slept), len(disk.said)) == (800, 4)
    disk.left = 10**9
    with pytest.raises(DiskFullError):
        disk.room.write(disk.write)
    for disk.left in (0, 3):
        assert disk.room.write(disk.write) == "written", "the next deadline is a new one"


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


def test_a_line_or_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "run" / "lines"
    path.parent.mkdir()
    with small_files(), path.open("ab", buffering=0) as file:
        append_whole(file, b"a" * 3000 + b"\n")
        with pytest.raises(OSError, match=r"too large: .*lines"):
            append_whole(file, b"b" * 3000 + b"\n")
        append_whole(file, b"c\n")
        assert path.read_bytes() == b"a" * 3000 + b"\nc\n"
        write_whole(tmp_path / "kept.json", "old")
        with pytest.raises(OSError, match="too large"):
            write_whole(tmp_path / "kept.json", "new" * 10000)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.json", "run"]
        assert (tmp_path / "kept.json").read_text() == "old"
        shutil.rmtree(path.parent)  # the run was deleted meanwhile
        with pytest.raises(FileNotFoundError, match="run/lines"):
            append_whole(file, b"d\n")
    log = MetricsLog(tmp_path)
    with small_files(), pytest.raises(OSError, match="too large"):
        log.append("step", 1, {"x" * 5000: 0.5}, {})
    assert log.rows == []
    log.append("step", 1, {"reward": 0.5}, {})
    log.close()
    assert [row["reward"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0.5]


def test_a_line_that_was_never_finished_is_left_out_and_cut_off(tmp_path):
    path = tmp_path / "new" / "lines"
    with open_records(path) as file:
        append_record(file, {"a": 1})
        file.write(b'{"a": 2}')  # all but its end
    assert list(record_lines(path)) == [(f"{path}, line 1", b'{"a": 1}\n')]
    with open_records(path) as file:
        append_record(file, {"a": 3})
    assert path.read_text() == '{"a": 1}\n{"a": 3}\n'


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


def hold(run_dir, held):
    with locked(run_dir):
        held.set()
        time.sleep(60)


def test_a_directory_has_one_run_whose_death_frees_it(tmp_path):
    run_dir, spawn = tmp_path / "new" / "run", multiprocessing.get_context("spawn")
    held = spawn.Event()
    holder = spawn.Process(target=hold, args=(run_dir, held), daemon=True)
    holder.start()
    assert held.wait(60)
    said = rf"{run_dir} is in use by process {holder.pid} on .*, since 2"
    with pytest.raises(ConfigError, match=said), locked(run_dir):
        pass
    assert f"process {holder.pid} on " in (run_dir / "run.lock").read_text(), "still that of the holder"
    holder.kill()
    holder.join(10)
    with locked(run_dir):
        assert f"process {os.getpid()} on " in (run_dir / "run.lock").read_text()
        with pytest.raises(ConfigError, match="in use"), locked(run_dir):
            pass
    with locked(run_dir):
        pass
    with pytest.raises(ConfigError, match="written: Not a directory"), locked(run_dir / "run.lock/x"):
        pass
