"""What the code computed on recorded rollouts when these were recorded (CONTRIBUTING.md: golden data)."""

import json
import lzma

import pytest

from support.credit_cases import Loop, algorithm, fix_last, of_preset, plain, some_groups
from support.golden_credit import CASES, credited
from support.golden_runs import ALGORITHMS, GOLDEN, LAYOUTS, train_recorded, watched_weights
from support.paths import ROOT


@pytest.mark.ray
@pytest.mark.parametrize(("layout", "algorithm", "steps"), [
    # experts, delta nets, tensor and expert parallelism in one
    pytest.param("next-tp2-ep2", "ibpo", 1, id="quick"),
    *(pytest.param(a, b, None, marks=pytest.mark.slow) for a in LAYOUTS for b in ALGORITHMS),
])  # fmt: skip
def test_training_on_recorded_rollouts(tmp_path, layout, algorithm, steps):
    """Loss, gradient norm and some weights after every step. Adam moves a weight by about the learning rate
    per update: a weight may differ by a hundredth of that per step."""
    golden = json.loads((GOLDEN / "trained.json").read_text())[layout][algorithm]
    expected = {name: values[:steps] for name, values in golden.items()}
    trained = train_recorded(ROOT, LAYOUTS[layout], algorithm, tmp_path, steps)
    assert [row["step"] for row in trained.rows] == expected["step"]
    assert [row["loss"] for row in trained.rows] == pytest.approx(expected["loss"], rel=1e-3, abs=1e-5)
    assert [row["grad_norm"] for row in trained.rows] == pytest.approx(expected["grad_norm"], rel=1e-3)
    checkpoints = zip(trained.checkpoints, expected["weights"], strict=True)
    for step, (checkpoint, weights) in enumerate(checkpoints, start=1):
        found = watched_weights(LAYOUTS[layout], checkpoint)
        assert found.keys() == weights.keys()
        for name, values in found.items():
            assert values == pytest.approx(weights[name], rel=0, abs=1e-2 * 3e-4 * step), (step, name)


def test_credit_of_recorded_groups():
    golden = json.loads(lzma.decompress((GOLDEN / "credit.json.xz").read_bytes()))
    for case in CASES:
        for row, wanted in zip(credited(case), golden[case], strict=True):
            assert row == wanted, case


def test_variants_without_shaping_and_corrections_equal_gspo():
    gspo = Loop(fix_last).credit(some_groups(), algorithm(**of_preset("gspo"))).sequences
    for variant in ("base", "ratio"):
        off = algorithm(ibpo_lambda=0.0, ibpo_joint=False, ibpo_variant=variant)
        assert plain(Loop(fix_last).credit(some_groups(), off).sequences) == plain(gspo), variant
