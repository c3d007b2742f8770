"""Benchmarks measure what they say, at a small size, and keep it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import bench_conversion
import bench_edit_distance
import pytest

from megatron_ibpo import _edit_distance
from support.paths import ROOT


def ran(name, *arguments):
    """Return what a benchmark prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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


@pytest.mark.slow
def test_conversion_is_timed_beside_cp_and_a_peer(tmp_path, monkeypatch):
    small = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024}
    monkeypatch.setitem(bench_conversion.CONFIGS, "dense", bench_conversion.CONFIGS["dense"] | small)
    asked = bench_conversion.Convert(
        families=("dense",), gigabytes=0.03, rounds=1, peer="cp -r {source} {target}",
        directory=tmp_path, save=tmp_path / "results.json",
    )  # fmt: skip
    bench_conversion.convert(asked)
    there, back = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert (there["direction"], back["direction"]) == ("HF to Megatron", "Megatron to HF")
    for row in (there, back):
        assert row["share_of_cp"] == pytest.approx(row["cp_seconds"][0] / row["tool_seconds"][0])
        assert 1e8 < row["peak_bytes"] < 1.5e9 + row["largest_tensor_bytes"]
    assert len(there["peer_seconds"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.slow
def test_a_weight_update_is_timed_beside_a_broadcast(tmp_path):
    saved, small = tmp_path / "update.json", ("--families", "dense", "--ranks", "2", "--gigabytes", "0.2")
    ran("bench_weight_update.py", *small, "--rounds", "2", "--save", saved)
    (result,) = json.loads(saved.read_text())["results"]
    rounds = {kind: len(seconds) for kind, seconds in result["all_seconds"].items()}
    assert rounds == dict.fromkeys(("plain", "transport", "load", "vllm"), 2)
    assert result["bytes_sent_over_needed"] == 1
    assert 0 < result["trainer_memory_rise_in_buckets"] < 2
