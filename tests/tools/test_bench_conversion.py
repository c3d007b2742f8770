"""tools/bench_conversion.py measures what it says."""

from __future__ import annotations

import json

import pytest


@pytest.mark.slow
def test_conversion_is_measured_beside_cp_and_a_peer(tmp_path, monkeypatch):
    import bench_conversion

    small = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024}
    monkeypatch.setitem(bench_conversion.CONFIGS, "dense", bench_conversion.CONFIGS["dense"] | small)
    bench_conversion.convert(
        bench_conversion.Convert(
            families=("dense",),
            gigabytes=0.03,
            rounds=1,
            peer="cp -r {source} {target}",
            directory=tmp_path,
            save=tmp_path / "results.json",
        )
    )
    record = json.loads((tmp_path / "results.json").read_text())
    there, back = record["rows"]
    assert (there["direction"], back["direction"]) == ("HF to Megatron", "Megatron to HF")
    for row in (there, back):
        assert 0.03e9 < row["bytes"] < 0.1e9
        assert row["share_of_cp"] == pytest.approx(row["cp_seconds"][0] / row["tool_seconds"][0])
        assert 0 < row["tool_seconds_without_start"][0] < row["tool_seconds"][0]
        assert 1e8 < row["peak_bytes"] < 1.5e9 + row["largest_tensor_bytes"]
    assert len(there["peer_seconds"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
