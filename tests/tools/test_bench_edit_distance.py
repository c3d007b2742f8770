"""tools/bench_edit_distance.py measures what it says and keeps it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatron_ibpo import _edit_distance
from support.paths import ROOT

TOOL = ROOT / "tools" / "bench_edit_distance.py"


def test_a_quick_run_measures_the_cases_asked_for_and_keeps_them(tmp_path):
    saved = tmp_path / "results.json"
    command = [sys.executable, str(TOOL), "--quick", "--only", "zipf-(64|4096)-0.2$", "--save", str(saved)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
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
        assert f"{row['times']:.1f}" in done.stdout
    assert results["machine"]["instruction_sets"] == _edit_distance.supported_isas()
    assert set(results["full_context"]) == {"cpu_ms", "grown_mib"}
