"""The examples of docs/python.md do what the page says, as they stand there."""

import json
import os
import re
import subprocess
import sys

import pytest

from megatron_ibpo.report import read_rows
from support.paths import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
OF_A_RUN, OF_PARTS = BLOCKS[:2], BLOCKS[2:]


def test_the_parts_that_are_used_alone():
    found = {}
    exec("\n".join(["import megatron_ibpo as mi", *OF_PARTS]), found)
    assert found["distances"].tolist() == [0.4, 0.0]
    assert found["kept"].tolist() == [True, False, True, True]
    assert found["edits"].tolist() == [2]
    assert found["shaped"] == pytest.approx([1.0, 0.3, 0.0])
    advantages = [sequence.advantage for sequence in found["credit"].sequences]
    assert advantages[0] > 0 > advantages[1] > advantages[2]
    assert found["loss"].item() == pytest.approx(-0.25)
    assert found["logits"].grad.abs().sum() > 0
    assert found["rewards"] == [1.0, 0.0]


@pytest.mark.slow
def test_a_run_is_stepped_and_resumed(tmp_path):
    """The page is run as a program without a main guard, in a directory of the user's."""
    (tmp_path / "program.py").write_text("\n".join([*OF_A_RUN, "assert third.metrics['step'] == 3", ""]))
    command, environment = [sys.executable, "program.py"], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_rows(tmp_path / "runs/notebook/metrics.jsonl")
    assert [(row["kind"], row["step"]) for row in rows] == [("step", 1), ("step", 2), ("step", 3)]
    assert f"\n2 {rows[1]['reward']} {rows[1]['loss']}\n" in done.stdout
    summary = json.loads((tmp_path / "runs/notebook/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 3)
