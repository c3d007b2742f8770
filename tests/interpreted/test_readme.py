"""The worked example of a new loss variant in docs/loss_variants.md does what it says, as written."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from megatron_ibpo.kernels.variants import KERNEL_TERMS
from megatron_ibpo.loss import packed_logprobs, resolve_variant
from support import kernel_cases as cases
from support.loss_calls import loss_of_logits
from support.paths import ROOT

pytestmark = pytest.mark.kernel

PAGE = ROOT / "docs/loss_variants.md"


@pytest.fixture
def spo(tmp_path, monkeypatch):
    section = PAGE.read_text().split("\n## Add a loss variant\n")[1].split("\n## ")[0]
    torch_part, kernel_part = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "spo.py").write_text(torch_part + kernel_part)  # Triton reads the source of its functions
    monkeypatch.syspath_prepend(tmp_path)
    before = set(KERNEL_TERMS)
    assert resolve_variant("spo:SPO")[1] == {"eps": 0.2}
    assert set(KERNEL_TERMS) - before == {"spo:SPO"}
    yield "spo:SPO"
    del KERNEL_TERMS["spo:SPO"], sys.modules["spo"]


def test_the_kernel_equals_the_torch_lines(spo):
    cases.check_variant("cpu", spo)
    cases.check_overflow_without_advantage("cpu", spo)


def test_the_derivatives_are_right(spo):
    batch = cases.make_batch("cpu", lengths=(3, 2), vocab=7)
    logits = batch["logits_NV"].double()
    batch["old_logprobs_N"] = packed_logprobs(logits, batch["targets_N"])[0] + 0.1

    def loss(logits):
        return loss_of_logits(**{**batch, "logits_NV": logits}, variant=spo)[0]

    assert torch.autograd.gradcheck(loss, logits.requires_grad_())
    cases.check_finite_differences("cpu", spo)


def test_without_its_kernel_a_variant_says_so(spo):
    terms = KERNEL_TERMS.pop(spo)
    try:
        with pytest.raises(ValueError, match="'spo:SPO' has no terms in kernels/variants"):
            cases.run(cases.make_batch("cpu"), variant=spo, backend="triton")
    finally:
        KERNEL_TERMS[spo] = terms
