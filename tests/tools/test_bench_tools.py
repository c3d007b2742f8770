"""Benchmarks measure what they say, at a small size, and what is kept of them is their own."""

import json
from dataclasses import asdict, replace

import bench_edit_distance
import bench_loss
import pytest
from bench_driver import GROUP, LOADS, STALENESS, Load, measure

from megatron_ibpo import _edit_distance
from support.paths import ROOT

RESULTS = ROOT / "tools/results"


@pytest.mark.slow
def test_the_load_of_the_driver_is_what_was_asked(tmp_path):
    load = Load(engines=4, in_flight=128, tokens=16, journal=True, batches=2)
    row = measure(load, tmp_path)
    assert load.wanted == 128 // GROUP // (STALENESS + 1) == 4
    assert row.open_at_start == load.in_flight
    # every response of the batches is scored and half of them are corrected
    assert load.batches * load.wanted * GROUP * 1.4 <= row.samples
    assert row.samples <= (STALENESS + 1 + load.batches) * load.wanted * GROUP * 1.5
    assert row.journal_mb * 2**20 > row.samples * load.tokens * 9 * 0.9
    without = measure(replace(load, journal=False), tmp_path)
    assert (without.samples, without.journal_mb) == (row.samples, 0)
    assert without.microseconds_per_sample["journal"] == 0 < row.microseconds_per_sample["journal"]


@pytest.mark.lint
def test_the_page_shows_what_was_recorded_of_the_driver():
    page = (ROOT / "docs/scale.md").read_text()
    rows = json.loads((RESULTS / "driver_load.json").read_text())["load"]["rows"]
    assert len(rows) == len(LOADS)
    for row, load in zip(rows, LOADS, strict=True):
        assert asdict(load).items() <= row.items()
        journal = "yes" if row["journal"] else "no"
        asked = f"| {row['engines']:,} | {row['in_flight']:,} | {row['tokens']:,} | {journal} | "
        rate, events, peak = (row[name] for name in ("samples_per_second", "events_per_second", "peak_mb"))
        took = f"{row['samples']:,} | {1e3 / rate:.2f} | {rate:,.0f} | {events:,.0f} | {peak:,.0f} |"
        assert asked + took in page


def test_the_committed_predictions_of_the_loss_are_what_the_script_predicts(tmp_path, monkeypatch):
    bench_loss.main(bench_loss.Arguments(predict=True, save=tmp_path / "predicted.json"))
    fresh = json.loads((tmp_path / "predicted.json").read_text())
    assert fresh == json.loads((RESULTS / "bench_loss_predicted.json").read_text())
    assert fresh["kind"].startswith("prediction")
    largest = {"contestant": "ours", "tokens": 32768, "vocabulary": 151936, "masked": 0.0}
    (row,) = [row for row in fresh["rows"] if largest.items() <= row.items()]
    # three passes over 32768 x 151936 bf16 numbers at 4.3 TB/s
    assert row["floor_ms"] == round(3 * 2 * 32768 * 151936 / 4.3e12 * 1e3, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit, match="no CUDA device"):
        bench_loss.main(bench_loss.Arguments(device="cuda"))


@pytest.mark.slow
def test_the_edit_distance_is_timed_beside_its_peers(tmp_path, capsys):
    saved, cases = tmp_path / "results.json", "zipf-(64|4096)-0.2$"
    bench_edit_distance.main(bench_edit_distance.Arguments(quick=True, only=cases, save=saved))
    printed, results = capsys.readouterr().out, json.loads(saved.read_text())
    forced = [isa for isa in _edit_distance.supported_isas() if isa != "avx512"]
    plain = {("zipf-64-0.2", "distance"), ("zipf-4096-0.2", "distance"), ("zipf-4096-0.2", "distance + mask")}
    measured = {(row["case"], row["what"]) for row in results["rows"]}
    assert measured == plain | {(f"zipf-4096-0.2-{isa}", "distance") for isa in forced}
    for row in results["rows"]:
        assert row["times"] == pytest.approx(row["peer_us"] / row["ours_us"])
        assert f"{row['times']:.1f}" in printed
