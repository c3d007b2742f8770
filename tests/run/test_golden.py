"""What the code computed on recorded rollouts when these were recorded (CONTRIBUTING.md: golden data)."""

import gzip
import json
import subprocess
import sys

import compare_commits
import pytest

from megatron_ibpo.basics.entry_point import guarded
from support.golden_credit import CASES, credited, recorded_steps
from support.golden_runs import ALGORITHMS, GOLDEN, LAYOUTS, train_recorded, watched_weights
from support.paths import ROOT

LEARNING_RATE = 3e-4
EPSILON = "_EPSILON = 1e-8"
RUNS = [pytest.param(a, b, None, marks=pytest.mark.slow) for a in LAYOUTS for b in ALGORITHMS]
# Experts, delta nets, tensor and expert parallelism in one; of it two steps are quick, all else is slow.
RUNS.insert(0, pytest.param("next-tp2-ep2", "ibpo", 2, id="quick"))


@pytest.fixture(scope="module")
def golden():
    return json.loads((GOLDEN / "trained.json").read_text())


@pytest.mark.ray
@pytest.mark.parametrize(("layout", "algorithm", "steps"), RUNS)
def test_training_on_recorded_rollouts(golden, tmp_path, layout, algorithm, steps):
    """Loss, gradient norm and some weights after every step. Adam moves a weight by about the learning rate
    per update: a weight may differ by a hundredth of that per step."""
    expected = {name: values[:steps] for name, values in golden[layout][algorithm].items()}
    trained = train_recorded(ROOT, LAYOUTS[layout], algorithm, tmp_path, steps)
    assert [row["step"] for row in trained.rows] == expected["step"]
    assert [row["loss"] for row in trained.rows] == pytest.approx(expected["loss"], rel=1e-3, abs=1e-5)
    assert [row["grad_norm"] for row in trained.rows] == pytest.approx(expected["grad_norm"], rel=1e-3)
    checkpoints = zip(trained.checkpoints, expected["weights"], strict=True)
    for step, (checkpoint, weights) in enumerate(checkpoints, start=1):
        found = watched_weights(LAYOUTS[layout], checkpoint)
        assert found.keys() == weights.keys()
        for name, values in found.items():
            close = pytest.approx(weights[name], rel=0, abs=1e-2 * LEARNING_RATE * step)
            assert values == close, (step, name)


def test_a_commit_that_is_not_there_cannot_be_compared(capsys):
    status = guarded(lambda: compare_commits.main(compare_commits.Arguments("no-such-commit")))
    assert status == 2
    assert "no-such-commit" in capsys.readouterr().err


def compared(repository, *arguments):
    """(exit status, output) of tools/compare_commits.py."""
    done = subprocess.run(
        [sys.executable, repository / "tools/compare_commits.py", *arguments],
        cwd=repository, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=800,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_changed_number_is_found_in_the_weights(tmp_path):
    """It is done in a clone: the commit against itself, then against a working tree with another epsilon."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    case = ("--layouts", "dense", "--algorithms", "ibpo")
    status, output = compared(clone, "HEAD", "HEAD", *case)
    assert status == 0, output
    assert output.count(" equal") == 6
    (changed,) = [p for p in (clone / "megatron_ibpo/credit").glob("*.py") if EPSILON in p.read_text()]
    changed.write_text(changed.read_text().replace(EPSILON, "_EPSILON = 1e-3"))
    status, output = compared(clone, "HEAD", *case)
    assert status == 1, output
    assert output.count(" old") == output.count(" new") == 6
    assert "NOT equal" in output
    worktrees = subprocess.run(["git", "worktree", "list"], cwd=clone, capture_output=True, text=True)
    assert len(worktrees.stdout.splitlines()) == 1


@pytest.fixture(scope="module")
def golden_credit():
    return json.loads(gzip.decompress((GOLDEN / "credit.json.gz").read_bytes()))


def test_there_are_200_groups_of_all_kinds():
    groups = [group for _, step in recorded_steps() for group in step]
    assert len(groups) == 200
    rights = [sum(r["correct"] for r in group["responses"]) for group in groups]
    assert set(rights) == {0, 1, 2, 3, 4}
    corrected = [c["response"]["correct"] for group in groups for c in group["corrections"]]
    assert 100 < sum(corrected) < len(corrected) - 100


@pytest.mark.parametrize("case", CASES)
def test_credit_of_recorded_groups(golden_credit, case):
    """Advantages, weights and masks, to the last bit."""
    found, expected = credited(case), golden_credit[case]
    assert len(found) == len(expected)
    for row, wanted in zip(found, expected, strict=True):
        assert row == wanted
