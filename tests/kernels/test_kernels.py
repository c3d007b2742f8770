"""The Triton kernels without a GPU: their own suite in a process where Triton interprets, and compiled.

Compiling takes most of a minute, so tools/results/compiled_kernels.json keeps what came out, with a hash of
all that it depends on. Where that is another one they are compiled again."""

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

# of instructions an element: at 85 % of an H200's copy bandwidth there is time for about 12
BUDGET = {"row_statistics": 8.0, "row_statistics+entropy": 10.0, "logits_gradient": 6.5}


def run_python(*program, interpreted=False):
    """What a program prints that runs in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"}
    environment |= {"TRITON_INTERPRET": "1"} if interpreted else {}
    command = [sys.executable, "-m", *program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_suite_passes_under_the_interpreter(chosen):
    program = ("pytest", "-q", "--timeout=280", "-m", chosen, str(TESTS / "interpreted"))
    printed = run_python(*program, interpreted=True)
    assert set(re.findall(r"\d+ (passed|failed|skipped)", printed)) == {"passed"}, printed  # none is skipped


@pytest.mark.parametrize(
    ("capability", "again"),
    [("80", False), ("90", False), ("100", False), pytest.param("90", True, marks=pytest.mark.slow)],
)
def test_every_kernel_compiles_without_spills_and_within_its_budget(capability, again):
    record = json.loads(RECORD.read_text())
    found = record["reports"][capability]
    if again or record["hash"] != sources_hash():
        found = [json.loads(line) for line in run_python("support.aot_kernels", capability).splitlines()]
    rows = 0
    for report in found:
        assert (report["stack"], report["spills"]) == (0, 0), report
        kernel = report["kernel"].split()[0]
        if kernel in BUDGET:
            rows += 1
            assert 3 < report["instructions_per_element"] <= BUDGET[kernel], report
            assert report["widest_load_bits"] == 128, report
            assert kernel != "logits_gradient" or report["widest_store_bits"] == 128, report
    assert rows == 6
    compiled = {report["kernel"] for report in found}
    for variant in VARIANTS:
        assert {f"segment_sums {variant}", f"token_coefficients {variant}"} <= compiled
    assert {
        f"set_{part} {dtype}" for part in ("statistics", "gradient") for dtype in ("bf16", "fp32")
    } <= compiled


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_triton_binds_the_arguments_of_every_launch(again):
    """Its binder is a function that it writes, with names of its own beside those of the arguments: `params`
    as an argument's name failed every launch on a GPU, and nothing else."""
    record = json.loads(RECORD.read_text())
    launches = record["launches"]
    if again or record["hash"] != sources_hash():
        launches = int(run_python("support.dry_launches"))
    assert launches > 3 * len(VARIANTS)
