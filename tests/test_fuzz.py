"""Five hundred bad inputs through the commands that read them: each is taken, or refused in a line, within 20
seconds and 2 GB.

pytest tests/test_fuzz.py                    some of each family
python tests/test_fuzz.py [SEED [COUNT]]     all of them in a table; the results go to tools/results
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SEED, COUNT, QUICK = 37, 500, 44


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The counts of each family, of the first inputs, from a process that forks one for each."""
    path = tmp_path_factory.mktemp("fuzz") / "found.json"
    words = [sys.executable, __file__, str(SEED), str(QUICK), str(path)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=280, cwd=Path(__file__).parent)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(path.read_text())["families"]


FAMILIES = (
    "recipes", "flags", "data files", "HF checkpoints", "Megatron checkpoints", "GGUF", "journals",
    "recordings", "benchmark files", "studies", "task URLs",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_bad_input_ends_in_a_line_in_time_and_within_memory(table, family):
    found = table[family]
    assert found["inputs"] > 0
    assert found["wrong"] == []


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "agg"}
    from bad_inputs.survey import main

    sys.exit(main(sys.argv[1:], SEED, COUNT))
