"""Every kernel with every variant compiles for three generations of GPUs, within its budget of instructions.

No GPU is needed. The budgets hold the kernels below the memory's speed: at 85 % of an H200's copy bandwidth
there is time for about 12 instructions an element.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.paths import ROOT

pytest.importorskip("triton")

pytestmark = pytest.mark.kernel


BUDGET = {"row_statistics": 8.0, "row_statistics+entropy": 10.0, "logits_gradient": 6.5}


SLOW = pytest.mark.slow  # one generation finds most of what there is to find


def compiling(capability, **how):
    variables = ["-u", "TRITON_INTERPRET", f"PYTHONPATH={ROOT}"]
    program = [sys.executable, str(ROOT / "tests/support/aot_kernels.py"), str(capability)]
    return pytest.param(["env", *variables, *program], id=str(capability), **how)


@pytest.mark.parametrize("program", [compiling(80, marks=SLOW), compiling(90), compiling(100, marks=SLOW)])
def test_every_kernel_compiles_without_spills_and_within_its_budget(program):
    done = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, timeout=290)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    for report in reports:
        assert (report["stack"], report["spills"]) == (0, 0), report
    rows = {report["kernel"]: report for report in reports if report["kernel"].split()[0] in BUDGET}
    assert len(rows) == 6
    for name, report in rows.items():
        kernel, _ = name.split()
        assert 3 < report["instructions_per_element"] <= BUDGET[kernel], report
        assert report["widest_load_bits"] == 128, report
        if kernel == "logits_gradient":
            assert report["widest_store_bits"] == 128, report
    from megatron_ibpo.loss import VARIANTS

    compiled = {report["kernel"] for report in reports}
    for variant in VARIANTS:
        assert {f"segment_sums {variant}", f"token_coefficients {variant}"} <= compiled
