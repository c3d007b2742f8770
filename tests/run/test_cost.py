"""The expense of a run equals a count by hand, and fits the parameters of the real models."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ibpo.basics.records import repeated_prefixes, token_ids
from megatron_ibpo.models import forward_flops, read_hf_config
from megatron_ibpo.run.cost import CostMeter, Spent
from support.credit_cases import response
from support.paths import ROOT

DENSE = read_hf_config(ROOT / "examples/tiny_qwen3")


def test_a_forward_pass_of_the_tiny_dense_model_by_hand():
    """Four layers of hidden size 96: 4 query heads and 2 key/value heads of 32, an MLP of 128; 64 ids."""
    layer = 96 * 128 + 2 * 96 * 64 + 128 * 96 + 3 * 96 * 128
    one = 2 * (4 * layer + 96 * 64) + 4 * 4 * 128  # a token attends to itself: scores and values
    assert forward_flops(DENSE, 1) == one
    assert forward_flops(DENSE, 3) - 3 * one == 4 * 4 * 128 * 3  # three pairs more


def test_tokens_before_a_window_are_not_counted():
    """Every other layer of gpt-oss-20b sees 128 tokens: 64 heads of 64, scores and values."""
    shape = read_hf_config(ROOT / "examples/models/gpt_oss_20b")
    pair = 4 * 64 * 64
    f = {n: forward_flops(shape, n) for n in (1, 128, 129, 1000)}
    assert f[128] - 128 * f[1] == 24 * pair * (128 * 127 // 2)
    assert f[129] - f[128] - f[1] == 12 * pair * 128 + 12 * pair * 127
    assert f[1000] - 1000 * f[1] == 12 * pair * (1000 * 999 // 2) + 12 * pair * (128 * 127 // 2 + 872 * 127)


def test_a_token_costs_two_operations_per_active_weight():
    """Qwen3-32B multiplies 32.0 G weights (32.8 G less the embedding), Qwen3-Next-80B about 3.6 G."""
    for name, billions in (("qwen3_32b", 31.98), ("qwen3_next_80b_a3b", 3.56)):
        shape = read_hf_config(ROOT / "examples/models" / name)
        assert forward_flops(shape, 1) == pytest.approx(2 * billions * 1e9, rel=0.02)


def test_an_update_costs_three_passes_or_four_with_recomputation():
    f = {n: forward_flops(DENSE, n) for n in (4, 5, 6)}
    for passes in (3, 4):
        meter = CostMeter(DENSE, 1, recomputes=passes == 4)
        meter.training([4], [6, 5])
        assert (meter.spent.tokens, meter.spent.flops) == (15, pytest.approx(f[4] + passes * (f[6] + f[5])))
        thrice = CostMeter(DENSE, 1, recomputes=passes == 4, epochs=3)
        of_updates = thrice.of_sample(2, 3, trained=5) - thrice.of_sample(2, 3)
        assert of_updates == pytest.approx(3 * passes * f[5])


def test_charged_operations_count_left_out_updates_and_dear_writing():
    """One response of two tokens behind a prompt of three; of two sequences only one has an advantage."""
    meter = CostMeter(DENSE, accelerators=1)
    f = [forward_flops(DENSE, n) for n in range(6)]
    meter.sampling([response([7] * 2, finish_reason="length", prompt=[1, 2, 3])])
    meter.training([], [5], left_out=[4])
    assert meter.spent.flops == pytest.approx(f[5] + 3 * f[5])
    assert meter.spent.amount("flops-charged") == pytest.approx(f[3] + 10 * (f[5] - f[3]) + 3 * (f[5] + f[4]))


def test_observation_is_free():
    before = Spent.read({"tokens": 10.0, "flops": 30.0, "accelerator_seconds": 100.0})
    meter = CostMeter(DENSE, accelerators=4, initial=before)
    meter.time({"sample": 1.0, "credit": 0.5, "train": 2.0, "sync": 0.25, "score": 0.25})
    meter.time({"evaluate": 50.0, "save": 9.0, "report": 1.0, "gradient meter": 3.0})
    assert meter.spent.amount("accelerator-seconds") == 100 + 4 * 4.0
    spent = {"tokens": 10, "flops": 30, "tokens_shared_prefixes": 0, "flops_shared_prefixes": 0}
    spent |= {"accelerator_seconds": 116, "flops_decoding": 0, "flops_charged": 0}
    assert meter.spent.metrics() == {f"spent_{name}": value for name, value in spent.items()}


def test_a_shared_prompt_is_read_once_and_prefixes_may_be():
    """The prompts 1 2 3, 1 2 4 and 1 2 have four nodes of a tree; an answer is written in any case."""
    meter = CostMeter(DENSE, accelerators=2)
    asked = (([1, 2, 3], 5), ([1, 2, 3], 2), ([1, 2, 4], 2), ([1, 2], 1))
    meter.sampling([response([7] * n, finish_reason="length", prompt=prompt) for prompt, n in asked])
    f = [forward_flops(DENSE, n) for n in range(9)]
    assert meter.spent.tokens == (3 + 3 + 2) + 5 + 2 + 2 + 1
    assert meter.spent.flops == f[8] + (f[5] - f[3]) + f[5] + f[3]
    assert meter.spent.tokens_shared_prefixes == 4 + 5 + 2 + 2 + 1
    assert meter.spent.flops_decoding == (f[8] - f[3]) + (f[5] - f[3]) + (f[5] - f[3]) + (f[3] - f[2])
    twice_read = 2 * f[2]  # 1 2 of 1 2 4, and the whole of the last
    assert meter.spent.flops_shared_prefixes == pytest.approx(meter.spent.flops - twice_read)
    trained = CostMeter(DENSE, accelerators=1)
    trained.training([4], [6, 5], [0], [0, 2])
    assert trained.spent.amount("tokens-shared-prefixes") == 13
    assert trained.spent.amount("flops-shared-prefixes") == pytest.approx(f[4] + 3 * (f[6] + f[5] - f[2]))


def test_rejected_drafts_are_computed_and_accepted_ones_take_no_step():
    """Of six tokens two were accepted and three more drafted in vain."""
    plain, drafted = (CostMeter(DENSE, accelerators=1) for _ in range(2))
    sample = response([7] * 6, finish_reason="length", prompt=[1, 2])
    plain.sampling([sample])
    drafted.sampling([replace(sample, drafts=(5, 2))])
    written = plain.spent.flops_decoding
    assert drafted.spent.tokens == plain.spent.tokens + 3
    assert drafted.spent.flops == pytest.approx(plain.spent.flops + written * 3 / 6)
    assert drafted.spent.flops_decoding == pytest.approx(written * 4 / 6)


@given(st.lists(st.lists(st.integers(0, 300), max_size=6), max_size=8))
def test_unrepeated_tokens_are_the_nodes_of_the_prefix_tree(sequences):
    repeated = repeated_prefixes([token_ids(s) for s in sequences])
    nodes = {tuple(s[: i + 1]) for s in sequences for i in range(len(s))}
    assert sum(map(len, sequences)) - sum(repeated) == len(nodes)
