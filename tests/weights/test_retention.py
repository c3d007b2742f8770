"""A run keeps the checkpoints that its settings name, and checks the room that they take."""

from dataclasses import replace

import pytest

from megatron_ibpo.config import Config
from megatron_ibpo.weights.formats.retention import (
    Keep,
    kept_at_once,
    remove_leftovers,
    remove_superseded,
    superseded,
)


@pytest.mark.parametrize(
    ("keep", "gone"),
    [
        (Keep(1), [2, 4, 6, 8]),
        (Keep(2), [2, 4, 6]),
        (Keep(9), []),
        (Keep(2, every=4), [2, 6]),
        (Keep(1, every=2), []),
    ],
)
def test_the_newest_stay_and_every_so_many(keep, gone):
    assert superseded([10, 2, 8, 4, 6], 10, keep) == gone


def test_what_a_run_wrote_before_it_went_back_is_left_alone():
    assert superseded([4, 6, 8, 10], 6, Keep(1)) == [4]


def test_removing_leaves_what_is_no_checkpoint_and_what_is_hidden(tmp_path):
    for name in ("step_000001", "step_000002", "step_000003", "step_final", ".step_000004.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("1")
    remove_superseded(tmp_path, 3, Keep(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".step_000004.partial",
        "step_000003",
        "step_final",
    ]
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000003", "step_final"]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"save_interval_minutes": None}, (1, 1)),
        ({"save_interval_minutes": None, "save_interval": 60}, (2, 1)),
        ({"save_interval_minutes": None, "save_interval": 10}, (3, 1)),
        ({"save_interval_minutes": None, "save_interval": 10, "keep_checkpoints": 100}, (10, 1)),
        ({}, (3, 1)),
        ({"num_rollout": 1}, (1, 1)),
        ({"keep_checkpoint_every": 25}, (7, 1)),
        ({"export_interval": 25}, (3, 5)),
    ],
)
def test_the_disk_holds_what_is_kept_and_one_that_is_being_written(changes, kept):
    """The run takes 100 steps, and keeps the newest two unless a case says otherwise."""
    run = replace(Config().run, **{"num_rollout": 100, "keep_checkpoints": 2, **changes})
    assert kept_at_once(Config(run=run)) == kept
