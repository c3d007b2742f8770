"""A clone stays small: large files are named here with a reason, and all files together have a bound."""

import subprocess

import pytest

from megatron_ibpo.weights.formats.checkpoint_files import MANIFEST, check_integrity
from support.paths import ROOT

pytestmark = pytest.mark.lint
ALL_BYTES = 19_700_000
LARGEST_BYTES = 125_000
LARGE = {
    "examples/tiny_qwen3/model.safetensors": 1_250_000,  # float32: golden numbers start from it
    "examples/tiny_qwen3_next/model.safetensors": 2_550_000,  # float32: golden numbers start from it
    "examples/tiny_qwen3_next_mends/model.safetensors": 2_550_000,  # float32: the record of the default run
    "examples/tiny_qwen3_next_agent/model.safetensors": 1_350_000,  # run_agent.sh
    "examples/tiny_qwen3_agent/model.safetensors": 700_000,  # run_agent.sh, dense
    "examples/tiny_qwen3_words/model.safetensors": 700_000,  # run_math_jsonl.sh
    "examples/tiny_qwen3_code/model.safetensors": 650_000,  # run_code.sh
    "tests/golden/credit.json.xz": 450_000,
    "docs/studies/suite.json.gz": 350_000,
    "docs/studies/suite.png": 160_000,
    "docs/studies/transfer.json.gz": 260_000,
    "docs/studies/transfer_more.json.gz": 150_000,
    "tools/results/fit_planner.json": 200_000,
    "examples/code/tiny_train.jsonl": 175_000,
}
"""Path → most bytes. What a tool makes in minutes, and no default script or test needs, is not committed."""


@pytest.fixture(scope="module")
def sizes():
    """Bytes of each file that git tracks or would add."""
    if not (ROOT / ".git").exists():
        pytest.skip("no clone: git does not say which files are tracked")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60).stdout.decode()
    return {name: (ROOT / name).stat().st_size for name in names.split("\0") if (ROOT / name).is_file()}


def test_all_files_together_stay_below_the_bound(sizes):
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:10]
    assert sum(sizes.values()) <= ALL_BYTES, f"the largest: {largest}"


def test_large_files_are_named(sizes):
    too_large = {name: size for name, size in sizes.items() if size > LARGE.get(name, LARGEST_BYTES)}
    assert not too_large, (
        "make them smaller, or on demand (tools/make_study_policy.py); or name them in LARGE"
    )
    assert set(LARGE) <= set(sizes), "LARGE names a file that is gone"


def test_checkpoints_have_their_checksums(sizes):
    manifests = [ROOT / name for name in sizes if name.endswith("/" + MANIFEST)]
    assert manifests
    for path in manifests:
        check_integrity(path.parent)
