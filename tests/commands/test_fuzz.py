"""Bad inputs through the commands that read them (all: python -m support.bad_inputs.survey 37 500)."""

import json
import os
import subprocess
import sys

import pytest

from support.bad_inputs.families import FAMILIES
from support.paths import ROOT, TESTS


@pytest.mark.slow  # tests/house/test_fuzz_readers.py reads two thousand inputs without commands
def test_bad_input_ends_in_a_line_in_time_and_within_memory(tmp_path):
    seed, count, path = 37, 44, tmp_path / "found.json"
    modules = os.pathsep.join(filter(None, [str(ROOT), str(TESTS), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "support.bad_inputs.survey", str(seed), str(count), str(path)]
    environment = os.environ | {"PYTHONPATH": modules}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(path.read_text())
    assert found.keys() == FAMILIES.keys()
    for family, table in found.items():
        assert table["inputs"] > 0, family
        assert table["wrong"] == [], family
