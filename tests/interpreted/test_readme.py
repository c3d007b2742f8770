"""The worked examples of the loss in docs do what they say, as written."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from support import kernel_cases as cases
from support.loss_calls import loss_of_logits
from support.paths import ROOT

pytestmark = pytest.mark.kernel

VARIANTS, PYTHON = ROOT / "docs/loss_variants.md", ROOT / "docs/python.md"


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """Write the two variants into one file; return the training step as it stands."""
    spo, undecided = re.findall(r"```python\n(.*?)```", VARIANTS.read_text(), re.DOTALL)
    step = re.findall(r"```python\n(.*?)```", PYTHON.read_text(), re.DOTALL)[-2]
    (tmp_path / "spo.py").write_text(spo + undecided)
    monkeypatch.syspath_prepend(tmp_path)
    yield step
    sys.modules.pop("spo", None)


@pytest.mark.parametrize("name", ["spo:SPO", "spo:UNDECIDED"])
def test_the_kernel_equals_the_torch_lines(examples, name):
    cases.check_variant("cpu", name)


def test_ten_steps_in_torch_and_by_the_kernels_lead_to_the_same_weights(examples):
    weights = {}
    for backend in ("torch", "triton"):
        batch = cases.make_batch("cpu", lengths=(5, 9, 3), vocab=61)
        weight = batch["logits_NV"].clone().requires_grad_()
        optimizer = torch.optim.SGD([weight], lr=0.5)
        for _ in range(10):
            loss, _ = loss_of_logits(
                **{**batch, "logits_NV": weight * 1}, variant="spo:UNDECIDED", backend=backend
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        weights[backend] = weight.detach()
    assert (weights["torch"] - batch["logits_NV"]).abs().max() > 1e-2
    torch.testing.assert_close(weights["triton"], weights["torch"], atol=1e-5, rtol=0)


def test_the_loss_trains_a_model_of_transformers(examples):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Qwen3Config(vocab_size=50, num_key_value_heads=1, head_dim=16, **shape)
    model = transformers.Qwen3ForCausalLM(config)
    names = {}
    exec(compile(examples, str(PYTHON), "exec"), names)
    ids = torch.randint(50, (1, 12))
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    given = (ids, torch.tensor([0, 6, 12], dtype=torch.int32), mask, torch.tensor([1.0, -1.0]))
    seen = [names["train_step"](model, optimizer, *given)[1].detach() for _ in range(5)]
    good, bad = slice(2, 5), slice(7, 11)
    assert seen[-1][good].mean() > seen[0][good].mean() + 0.1
    assert seen[-1][bad].mean() < seen[0][bad].mean() - 0.1
