"""What the campaign of kills (tests/chaos.sh) concludes from a journal and from its own records."""

from __future__ import annotations

from chaos.journal_audit import audit
from chaos.results import append, beyond_start, read, so_far, table
from test_journal import group, make_sample, response

from megatron_ibpo.journal import ClosedBatch, DroppedGroup, Journal

NOTHING_OPEN = {"cursor": 3, "open": []}


def journal_of(directory, *batches):
    """A journal whose steps train on these groups, one response each; all of it is kept."""
    with Journal(directory, 2**30, "{}", 0) as journal:
        for step, closed in enumerate(batches, start=1):
            for one in closed:
                journal.sampled(response(one.prompt_index, attempt=one.attempt), make_sample(step))
            journal.closed(ClosedBatch(step, tuple(closed)))
            journal.saved(step)  # from here on the writer itself forgets what was trained


def test_every_prompt_trained_once_is_as_it_must_be(tmp_path):
    journal_of(tmp_path, [group(0), group(2)], [group(1)])
    assert audit(tmp_path, steps=2, responses=1, sampling=NOTHING_OPEN) == []


def test_a_prompt_trained_twice_is_found(tmp_path):
    journal_of(tmp_path, [group(0), group(2)], [group(1), group(0)])
    (problem,) = audit(tmp_path, steps=2, responses=1, sampling=NOTHING_OPEN)
    assert problem == "(0, 0) was trained at steps 1 and 2"


def test_so_is_one_trained_under_two_attempts(tmp_path):
    journal_of(tmp_path, [group(0), group(2)], [group(1), group(0, attempt=1)])
    (problem,) = audit(tmp_path, steps=2, responses=1, sampling=NOTHING_OPEN)
    assert problem == "prompt 0 was trained twice, under two attempts"


def test_a_lost_prompt_is_found_unless_it_is_under_way(tmp_path):
    journal_of(tmp_path, [group(0)], [group(1)])
    assert audit(tmp_path, steps=2, responses=1, sampling=NOTHING_OPEN) == ["prompt 2 is lost"]
    assert audit(tmp_path, steps=2, responses=1, sampling={"cursor": 3, "open": [[2, 1]]}) == []


def test_lost_samples_of_a_group_are_found(tmp_path):
    with Journal(tmp_path, 2**30, "{}", 0) as journal:
        journal.sampled(response(0), make_sample(1))
        journal.sampled(response(1), make_sample(2))
        journal.closed(ClosedBatch(1, (group(0),), (DroppedGroup(1, 0, "expired"),)))
        journal.sampled(response(2), make_sample(3))
    problems = audit(tmp_path, steps=1, responses=1, sampling={"cursor": 3, "open": [[1, 1]]})
    assert problems == [
        "samples of (2, 0) stand in the journal, but it is in no batch, nor open",
        "prompt 2 is lost",
    ]


def test_a_step_that_the_journal_lacks_is_found(tmp_path):
    journal_of(tmp_path, [group(0), group(1), group(2)])
    (problem,) = audit(tmp_path, steps=2, responses=1, sampling=NOTHING_OPEN)
    assert problem == "2 steps were taken, the journal has whole batches of [1]"


def kill(run, victim="engine", signal="SIGKILL", **more):
    return {"kind": "kill", "seed": 7, "run": run, "victim": victim, "signal": signal, **more}


def test_a_campaign_goes_on_after_its_last_run(tmp_path):
    path = tmp_path / "chaos.jsonl"
    assert so_far(read(path), seed=7) == (0, 0)
    append(path, [kill(0), kill(0), {"kind": "run", "seed": 7, "run": 0}])
    append(path, [{"kind": "kill", "seed": 8, "run": 4}])
    assert so_far(read(path), seed=7) == (2, 1)


def test_recovery_is_told_with_and_without_the_start_of_what_replaces():
    engine = kill(0, recovery_seconds=2.0, engine_start_seconds=9.0, replaced_seconds=12.0)
    assert beyond_start(engine) == 3.0
    assert beyond_start(kill(0, recovery_seconds=2.0, engine_start_seconds=9.0, replaced_seconds=None)) == 2.0
    assert beyond_start(kill(0, "trainer", recovery_seconds=8.0, start_seconds=5.0)) == 3.0
    driver = kill(0, "driver", recovery_seconds=25.0, start_seconds=21.0, driver_status=-9)
    assert beyond_start(driver) == 4.0
    alone = kill(0, recovery_seconds=11.0, engine_start_seconds=9.0, replaced_seconds=12.0, engines_left=0)
    assert beyond_start(alone) == 2.0
    hung = kill(0, "host", "SIGSTOP", recovery_seconds=6.5, time_out_seconds=5.0)
    assert beyond_start(hung) == 1.5
    idle = kill(0, "verifier", "SIGSTOP", recovery_seconds=0.5, time_out_seconds=5.0)
    assert beyond_start(idle) == 0.5, "no step waited for it"
    rows = table([engine, kill(0, recovery_seconds=5.0), driver]).splitlines()
    assert rows[2:] == [
        "| driver | SIGKILL | 1 | 25.0 s, 25.0 s | 4.0 s, 4.0 s |",
        "| engine | SIGKILL | 2 | 3.5 s, 5.0 s | 4.0 s, 5.0 s |",
    ]


def test_a_death_with_torn_files_is_of_a_kind_of_its_own():
    torn = kill(0, "driver", torn="journal", recovery_seconds=25.0, start_seconds=21.0, driver_status=-9)
    assert table([torn]).endswith("| driver | SIGKILL, torn journal | 1 | 25.0 s, 25.0 s | 4.0 s, 4.0 s |")
