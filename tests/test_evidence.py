"""Published runs as data: each row is cited, whole sources fall into a half, hardware is read as written."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_ibpo.plan.evidence import halves, read_evidence
from megatron_ibpo.plan.hardware import hardware_names, read_hardware

ROWS = read_evidence()


def test_there_are_rows_enough_and_each_says_where_it_was_read():
    assert len(ROWS) >= 80
    assert all(row.cited and row.measured and row.facts["hardware"] in hardware_names() for row in ROWS)
    assert not [name for name, count in Counter((row.source, row.name) for row in ROWS).items() if count > 1]


def test_what_a_row_leaves_open_has_a_range_around_its_own_value():
    for row in ROWS:
        for fact, (low, high) in row.left_open.items():
            value = row.facts.get(fact)
            if isinstance(value, int | float) and not isinstance(value, bool):
                assert low <= value <= high, (row.name, fact)


def test_the_halves_hold_whole_sources_of_every_kind():
    of = halves(ROWS)
    kinds = {half: {row.kind for row in ROWS if of[row.source] == half} for half in ("fitted", "held out")}
    assert kinds["fitted"] == {"training", "generation", "step", "update"}
    assert kinds["held out"] >= {"training", "generation", "step"}
    # by name alone: neither what a source says nor the order in which sources are read matters
    assert halves(ROWS[::-1]) == of
    # of training in order: nemo, torchtitan (00dd…), pith_train, gpu_recipes and so on
    assert (of["nemo"], of["torchtitan"], of["pith_train"], of["gpu_recipes"]) == ("fitted", "held out") * 2


def test_a_checkpoint_that_is_partly_in_fp8_weighs_what_its_source_logs():
    """Llama 3.1 405B of Meta on eight H100: 126 layers of 16,384 by 53,248, of which attention and the MLPs
    of the first and the last layer stay in BF16. The log says 56.77 GiB a GPU."""
    attention, mlp, table = 2 * 16384**2 + 2 * 16384 * 1024, 3 * 16384 * 53248, 2 * 128256 * 16384
    held = 126 * attention * 2 + 124 * mlp + 2 * mlp * 2
    assert (held + 2 * table) / 8 / 1024**3 == pytest.approx(56.77, rel=2e-3)
    (share,) = {row.facts["weight_bytes"] for row in ROWS if "weight_bytes" in row.facts}
    assert share == pytest.approx(held / 126 / (attention + mlp), rel=1e-3)


def test_hardware_is_read_as_its_file_has_it():
    h100 = read_hardware("H100")
    assert (h100.peak("bf16"), h100.peak("mxfp8")) == (989e12, 1979e12)
    assert (h100.between(8), h100.between(9)) == (450e9, 50e9)
    # a ring passes between nodes on the networks of all members that a node has, and on a rack on none
    assert (h100.collective(8), h100.collective(64), h100.collective(8, stride=8)) == (450e9, 400e9, 50e9)
    assert read_hardware("gb200").collective(64, stride=2) == 900e9
    with pytest.raises(ValueError, match="no hardware 'h1000'; there are a100, b200"):
        read_hardware("h1000")
