"""Five hundred bad inputs through the commands that read them: each is taken, or refused in a line, within 20
seconds and 2 GB.

pytest tests/commands/test_fuzz.py                           some of each family
PYTHONPATH=tests python -m support.bad_inputs.survey 37 500      all of them
"""

import json
import os
import subprocess
import sys

import pytest

from support.paths import ROOT, TESTS

SEED, QUICK = 37, 44


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The counts of each family, of the first inputs, from a process that forks one for each."""
    path = tmp_path_factory.mktemp("fuzz") / "found.json"
    words = [sys.executable, "-m", "support.bad_inputs.survey", str(SEED), str(QUICK), str(path)]
    path_of_modules = os.pathsep.join(filter(None, [str(ROOT), str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path_of_modules}
    ended = subprocess.run(words, capture_output=True, text=True, timeout=280, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(path.read_text())


FAMILIES = (
    "recipes", "flags", "data files", "HF checkpoints", "Megatron checkpoints", "GGUF", "journals",
    "recordings", "benchmark files", "studies", "task URLs",
)  # fmt: skip


@pytest.mark.slow  # tests/house/test_fuzz_readers.py reads two thousand inputs without commands
@pytest.mark.parametrize("family", FAMILIES)
def test_bad_input_ends_in_a_line_in_time_and_within_memory(table, family):
    found = table[family]
    assert found["inputs"] > 0
    assert found["wrong"] == []
