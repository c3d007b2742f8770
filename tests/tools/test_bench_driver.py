"""The load test of the driver, at a small size: what it counts is what was asked."""

import json
from dataclasses import asdict, replace

import pytest
from bench_driver import (
    GROUP,
    LOADS,
    ROOT,
    STALENESS,
    Load,
    measure,
)

LOAD = Load(engines=4, in_flight=128, tokens=16, journal=True, batches=2)


@pytest.fixture(scope="module")
def row(tmp_path_factory):
    return measure(LOAD, tmp_path_factory.mktemp("journal"))


@pytest.mark.slow
def test_all_responses_are_in_flight_at_the_start(row):
    assert LOAD.wanted == 128 // GROUP // (STALENESS + 1) == 4
    assert row.open_at_start == LOAD.in_flight


@pytest.mark.slow
def test_every_response_of_the_batches_is_scored_and_half_of_them_are_corrected(row):
    assert row.samples >= LOAD.batches * LOAD.wanted * GROUP * 1.4
    assert row.samples <= (STALENESS + 1 + LOAD.batches) * LOAD.wanted * GROUP * 1.5


@pytest.mark.slow
def test_the_journal_has_every_sample_and_costs_nothing_where_there_is_none(row, tmp_path):
    assert row.journal_mb * 2**20 > row.samples * LOAD.tokens * 9 * 0.9
    without = measure(replace(LOAD, journal=False), tmp_path)
    assert (without.samples, without.journal_mb) == (row.samples, 0)
    assert without.microseconds_per_sample["journal"] == 0 < row.microseconds_per_sample["journal"]


@pytest.mark.lint
def test_the_page_shows_what_was_recorded():
    page = (ROOT / "docs/scale.md").read_text()
    rows = json.loads((ROOT / "tools/results/driver_load.json").read_text())["load"]["rows"]
    assert len(rows) == len(LOADS)
    for row, load in zip(rows, LOADS, strict=True):
        assert asdict(load).items() <= row.items()
        journal = "yes" if row["journal"] else "no"
        asked = f"| {row['engines']:,} | {row['in_flight']:,} | {row['tokens']:,} | {journal} | "
        rate, events, peak = (row[name] for name in ("samples_per_second", "events_per_second", "peak_mb"))
        took = f"{row['samples']:,} | {1e3 / rate:.2f} | {rate:,.0f} | {events:,.0f} | {peak:,.0f} |"
        assert asked + took in page
