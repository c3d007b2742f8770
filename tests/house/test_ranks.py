"""The launcher of multi-process tests: failures are loud, nothing is left running."""

import os
import time

import psutil
import pytest

from support.ranks import RankFailed, run_ranks

pytestmark = pytest.mark.world


def fail_on_one(world, directory):
    (directory / str(world.rank)).write_text(str(os.getpid()))
    if world.rank == 1:
        raise ValueError("planted")
    time.sleep(60)


def test_an_error_is_shown_with_the_stacks_of_ranks_that_hang_and_ends_them(tmp_path, monkeypatch):
    monkeypatch.setattr("support.ranks.GRACE_S", 1.0)
    with pytest.raises(RankFailed, match=r"(?s)rank 0 had not finished.* in fail_on_one.*rank 1: .*planted"):
        run_ranks(fail_on_one, 2, tmp_path)
    assert not any(psutil.pid_exists(int((tmp_path / rank).read_text())) for rank in "01")
    with pytest.raises(RankFailed, match=r"rank 0 had not finished \(time-out 0.5 s\)"):
        run_ranks(fail_on_one, 1, tmp_path, timeout=0.5)
