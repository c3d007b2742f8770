"""tools/bench_edit_distance.py measures what it says and keeps it."""

from __future__ import annotations

import json

import bench_edit_distance
import pytest

from megatron_ibpo import _edit_distance


def test_a_quick_run_measures_the_cases_asked_for_and_keeps_them(tmp_path, capsys):
    saved = tmp_path / "results.json"
    cases = "zipf-(64|4096)-0.2$"
    bench_edit_distance.main(bench_edit_distance.Arguments(quick=True, only=cases, save=saved))
    printed = capsys.readouterr().out
    results = json.loads(saved.read_text())
    forced = [isa for isa in _edit_distance.supported_isas() if isa != "avx512"]
    assert [(row["case"], row["what"], row["peer"]) for row in results["rows"]] == [
        ("zipf-64-0.2", "distance", "rapidfuzz"),
        ("zipf-64-0.2", "distance", "rapidfuzz best"),
        ("zipf-4096-0.2", "distance", "rapidfuzz"),
        ("zipf-4096-0.2", "distance", "rapidfuzz best"),
        ("zipf-4096-0.2", "distance + mask", "rapidfuzz editops"),
        *((f"zipf-4096-0.2-{isa}", "distance", "rapidfuzz") for isa in forced),
    ]
    for row in results["rows"]:
        assert row["ours_us"] > 0
        assert row["times"] == pytest.approx(row["peer_us"] / row["ours_us"])
        assert f"{row['times']:.1f}" in printed
    assert results["machine"]["instruction_sets"] == _edit_distance.supported_isas()
    assert set(results["full_context"]) == {"cpu_ms", "grown_mib"}
