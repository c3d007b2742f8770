"""The Triton kernels without a GPU: their own suite in a process where Triton interprets, and compiled.

Every kernel with every variant compiles for three generations of GPUs, within its budget of instructions.
The budgets hold the kernels below the memory's speed: at 85 % of an H200's copy bandwidth there is time for
about 12 instructions an element. Compiling takes most of a minute, so tools/results/compiled_kernels.json
keeps what came out, with a hash of all that it depends on. Where that is another one they are compiled again.
"""

import json
import os
import re
import subprocess
import sys

import pytest

from support.paths import ROOT, TESTS

pytest.importorskip("triton")

from megatron_ibpo.loss import VARIANTS
from support.aot_kernels import RECORD, sources_hash

pytestmark = pytest.mark.kernel

BUDGET = {"row_statistics": 8.0, "row_statistics+entropy": 10.0, "logits_gradient": 6.5}


def run_python(*program, **variables):
    """What a program prints that runs in a process of its own, without Triton's interpreter unless named."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])} | variables
    command = [sys.executable, "-m", *program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_suite_passes_under_the_interpreter(marked):
    suite = ["pytest", "-q", "--timeout=280", "-m", marked, str(TESTS / "interpreted")]
    printed = run_python(*suite, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert set(re.findall(r"\d+ (passed|failed|skipped)", printed)) == {"passed"}, printed  # none is skipped


@pytest.mark.parametrize("capability", ["80", "90", "100"])
@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_kernel_compiles_without_spills_and_within_its_budget(capability, again):
    record = json.loads(RECORD.read_text())
    found = record["reports"][capability]
    if again or record["hash"] != sources_hash():
        found = [json.loads(line) for line in run_python("support.aot_kernels", capability).splitlines()]
    for report in found:
        assert (report["stack"], report["spills"]) == (0, 0), report
    rows = {report["kernel"]: report for report in found if report["kernel"].split()[0] in BUDGET}
    assert len(rows) == 6
    for name, report in rows.items():
        kernel, _ = name.split()
        assert 3 < report["instructions_per_element"] <= BUDGET[kernel], report
        assert report["widest_load_bits"] == 128, report
        if kernel == "logits_gradient":
            assert report["widest_store_bits"] == 128, report
    compiled = {report["kernel"] for report in found}
    for variant in VARIANTS:
        assert {f"segment_sums {variant}", f"token_coefficients {variant}"} <= compiled


def test_triton_binds_the_arguments_of_every_launch():
    """Its binder is a function that it writes, with names of its own beside those of the arguments: `params`
    as an argument's name failed every launch on a GPU, and nothing else."""
    assert int(run_python("support.dry_launches")) > 3 * len(VARIANTS)
