"""Benchmarks measure what they say, at a small size, and keep it."""

import json

import bench_edit_distance
import pytest

from megatron_ibpo import _edit_distance


@pytest.mark.slow
def test_the_edit_distance_is_timed_beside_its_peers(tmp_path, capsys):
    saved = tmp_path / "results.json"
    cases = "zipf-(64|4096)-0.2$"
    bench_edit_distance.main(bench_edit_distance.Arguments(quick=True, only=cases, save=saved))
    printed = capsys.readouterr().out
    results = json.loads(saved.read_text())
    forced = [isa for isa in _edit_distance.supported_isas() if isa != "avx512"]
    plain = {("zipf-64-0.2", "distance"), ("zipf-4096-0.2", "distance"), ("zipf-4096-0.2", "distance + mask")}
    measured = {(row["case"], row["what"]) for row in results["rows"]}
    assert measured == plain | {(f"zipf-4096-0.2-{isa}", "distance") for isa in forced}
    for row in results["rows"]:
        assert row["times"] == pytest.approx(row["peer_us"] / row["ours_us"])
        assert f"{row['times']:.1f}" in printed
