"""What tests rely on: campaigns of kills conclude the right things, and ranks that fail are loud and end."""

import os
import time

import psutil
import pytest
from chaos.faults import Fault, wrong_end
from chaos.journal_audit import audit

from megatron_ibpo.journal import ClosedBatch, DroppedGroup, Journal
from support.journals import group, make_sample, response
from support.ranks import RankFailed, run_ranks


@pytest.mark.parametrize(
    ("batches", "under_way", "problems"),
    [
        (([0, 2], [1]), [], []),
        (([0], [1]), [[2, 1]], []),
        (([0], [1]), [], ["prompt 2 is lost"]),
        (([0, 2], [1, 0]), [], ["(0, 0) was trained at steps 1 and 2"]),
        (([0, 2], [1, (0, 1)]), [], ["prompt 0 was trained twice, under two attempts"]),
        (([0, 1, 2],), [], ["2 steps were taken, the journal has whole batches of [1]"]),
    ],
)
def test_prompts_lost_or_trained_twice_and_missing_steps_are_found(tmp_path, batches, under_way, problems):
    """Of two steps on three prompts, given the prompts of their groups, one of another attempt."""
    with Journal(tmp_path, 2**30, "{}", 0) as journal:
        for step, prompts in enumerate(batches, start=1):
            pairs = [prompt if isinstance(prompt, tuple) else (prompt, 0) for prompt in prompts]
            for prompt, attempt in pairs:
                journal.sampled(response(prompt, attempt=attempt), make_sample(step))
            closed = tuple(group(prompt, attempt=attempt) for prompt, attempt in pairs)
            journal.closed(ClosedBatch(step, closed))
            journal.saved(step)  # from here on the writer itself forgets what was trained
    assert audit(tmp_path, steps=2, responses=1, sampling={"cursor": 3, "open": under_way}) == problems


def test_lost_samples_of_a_group_are_found(tmp_path):
    with Journal(tmp_path, 2**30, "{}", 0) as journal:
        journal.sampled(response(0), make_sample(1))
        journal.sampled(response(1), make_sample(2))
        journal.closed(ClosedBatch(1, (group(0),), (DroppedGroup(1, 0, "expired"),)))
        journal.sampled(response(2), make_sample(3))
    assert audit(tmp_path, steps=1, responses=1, sampling={"cursor": 3, "open": [[1, 1]]}) == [
        "samples of (2, 0) stand in the journal, but it is in no batch, nor open", "prompt 2 is lost",
    ]  # fmt: skip


def test_only_a_run_that_cannot_continue_ends_with_an_error():
    gone, said = Fault("gcs", "SIGKILL"), "error: Ray's GCS server on this machine has died\n"
    assert wrong_end(gone, 1, 5.0, said) == wrong_end(Fault("driver", "SIGKILL"), -9, 0.1, "") == []
    for fault, status, seconds, output, problem in (
        (gone, 0, 5.0, said, "SIGKILL of gcs ended the run with 0, not 1: "),
        (gone, 1, 500.0, said, "after SIGKILL of gcs the run took 500 s to end"),
        (gone, 1, 5.0, "step 7/80\n", "said 0 lines of what is wrong"),
        (Fault("engine", "SIGKILL"), 1, 5.0, said, ""),
        (Fault("driver", "SIGKILL"), 2, 5.0, said, "as if its input were bad: error"),
    ):
        assert problem in wrong_end(fault, status, seconds, output)[0]


def fail_on_one(world, directory):
    (directory / str(world.rank)).write_text(str(os.getpid()))
    if world.rank == 1:
        raise ValueError("planted")
    time.sleep(60)


@pytest.mark.world
def test_an_error_shows_and_ends_hanging_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr("support.ranks.GRACE_S", 1.0)
    with pytest.raises(RankFailed, match=r"(?s)rank 0 had not finished.* in fail_on_one.*rank 1: .*planted"):
        run_ranks(fail_on_one, 2, tmp_path)
    assert not any(psutil.pid_exists(int((tmp_path / rank).read_text())) for rank in "01")
    with pytest.raises(RankFailed, match=r"rank 0 had not finished \(time-out 0.5 s\)"):
        run_ranks(fail_on_one, 1, tmp_path, timeout=0.5)
