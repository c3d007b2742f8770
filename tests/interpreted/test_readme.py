"""The worked example of a new loss variant in docs/loss_variants.md does what it says, as written."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import kernel_cases as cases
import pytest
import torch

from megatron_ibpo.kernels.variants import KERNEL_TERMS
from megatron_ibpo.loss import VARIANTS, packed_logprobs, packed_sequence_loss

PAGE = Path(__file__).resolve().parents[2] / "docs/loss_variants.md"


@pytest.fixture
def spo(tmp_path):
    section = PAGE.read_text().split("\n## Add a loss variant\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    file = tmp_path / "spo.py"  # Triton reads the source of its functions
    file.write_text(code)
    before = set(VARIANTS), set(KERNEL_TERMS)
    spec = importlib.util.spec_from_file_location("spo", file)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert (set(VARIANTS) - before[0], set(KERNEL_TERMS) - before[1]) == ({"spo"}, {"spo"})
    yield "spo"
    del VARIANTS["spo"], KERNEL_TERMS["spo"]


def test_the_kernel_equals_the_torch_lines(spo):
    cases.check_variant("cpu", spo)
    cases.check_ratio_overflow("cpu", spo, 1e4, 0.0)


def test_the_derivatives_are_right(spo):
    batch = cases.make_batch("cpu", lengths=(3, 2), vocab=7)
    logits = batch["logits_NV"].double()
    batch["old_logprobs_N"] = packed_logprobs(logits, batch["targets_N"])[0] + 0.1

    def loss(logits):
        return packed_sequence_loss(**{**batch, "logits_NV": logits}, variant=spo)[0]

    assert torch.autograd.gradcheck(loss, logits.requires_grad_())
    cases.check_finite_differences("cpu", spo)


def test_without_its_kernel_a_variant_says_so(spo):
    terms = KERNEL_TERMS.pop(spo)
    try:
        with pytest.raises(ValueError, match="'spo' has no terms in kernels/variants"):
            cases.run(cases.make_batch("cpu"), variant=spo, backend="triton")
    finally:
        KERNEL_TERMS[spo] = terms
