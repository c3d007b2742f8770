"""What a run spends: by hand, and against the parameters of the real models."""

from __future__ import annotations

from pathlib import Path

import pytest
from credit_cases import response

from megatron_ibpo.cost import CostMeter, Spent
from megatron_ibpo.models import forward_flops, read_hf_config

ROOT = Path(__file__).resolve().parents[1]
DENSE = read_hf_config(ROOT / "examples/tiny_qwen3")


def answer(prompt, length):
    return response([7] * length, finish_reason="length", prompt=prompt)


def test_a_forward_pass_of_the_tiny_dense_model_by_hand():
    """Four layers of hidden size 96: 4 query heads and 2 key/value heads of 32, an MLP of 128; 64 ids."""
    layer = 96 * 128 + 2 * 96 * 64 + 128 * 96 + 3 * 96 * 128
    one = 2 * (4 * layer + 96 * 64) + 4 * 4 * 128  # a token attends to itself: scores and values
    assert forward_flops(DENSE, 1) == one
    assert forward_flops(DENSE, 3) - 3 * forward_flops(DENSE, 1) == 4 * 4 * 128 * 3  # three pairs more


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3_32b", 2 * 31.98), ("qwen3_next_80b_a3b", 2 * 3.56)],
)
def test_a_token_of_the_large_models_costs_two_operations_for_each_active_weight(name, billions):
    """Qwen3-32B multiplies 32.0 G weights (32.8 G less the embedding), Qwen3-Next-80B about 3.6 G."""
    shape = read_hf_config(ROOT / "examples/models" / name)
    assert forward_flops(shape, 1) == pytest.approx(billions * 1e9, rel=0.02)


def test_a_shared_prompt_is_read_once_and_every_answer_is_written():
    meter = CostMeter(DENSE, accelerators=2)
    meter.sampling([answer([1, 2, 3], 5), answer([1, 2, 3], 2), answer([4], 1)])
    assert meter.spent.tokens == 3 + 5 + 2 + 1 + 1
    f = [forward_flops(DENSE, n) for n in range(9)]
    assert meter.spent.flops == f[3] + (f[8] - f[3]) + (f[5] - f[3]) + f[1] + (f[2] - f[1])


def test_an_update_costs_three_forward_passes_and_four_when_it_recomputes():
    plain, recomputing = CostMeter(DENSE, 1), CostMeter(DENSE, 1, recomputes=True)
    plain.training([4], [6, 5])
    recomputing.training([4], [6, 5])
    f = {n: forward_flops(DENSE, n) for n in (4, 5, 6)}
    assert plain.spent.tokens == recomputing.spent.tokens == 15
    assert plain.spent.flops == pytest.approx(f[4] + 3 * (f[6] + f[5]))
    assert recomputing.spent.flops == pytest.approx(f[4] + 4 * (f[6] + f[5]))


def test_what_only_observes_is_free():
    meter = CostMeter(DENSE, accelerators=4, before=Spent(accelerator_seconds=100.0))
    meter.time({"sample": 1.0, "credit": 0.5, "train": 2.0, "sync": 0.25, "score": 0.25})
    meter.time({"evaluate": 50.0, "save": 9.0, "report": 1.0, "gradient meter": 3.0})
    assert meter.spent.of("accelerator-seconds") == 100 + 4 * 4.0
    assert meter.spent.metrics() == {
        "spent_accelerator_seconds": 116.0,
        "spent_tokens": 0.0,
        "spent_flops": 0.0,
    }


def test_the_summary_says_what_a_run_spent():
    from megatron_ibpo.report.summary import summarise

    rows = [
        {"kind": "step", "step": 1, "reward": 0.5, "spent_tokens": 10.0},
        {"kind": "evaluation", "step": 1, "accuracy": 0.5, "spent_tokens": 12.0},
    ]
    assert summarise(rows, seconds_total=1.0, seconds_by_stage={})["spent"] == {"spent_tokens": 12.0}
