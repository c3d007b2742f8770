"""The roofline: each term by hand on round hardware, and what must follow from the whole."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.cost import forward_flops, weight_count
from megatron_ibpo.plan.hardware import hardware_names, read_hardware
from megatron_ibpo.plan.machine import Coefficients, fitted
from megatron_ibpo.plan.roofline import (
    GIB,
    cache_bytes,
    checkpoint_seconds,
    decode_seconds,
    engine_slots,
    optimizer_seconds,
    pass_time,
    prompt_seconds,
    sample,
    update_seconds,
)
from megatron_ibpo.plan.step_time import step_times
from megatron_ibpo.plan.workload import Basis, Batch, Engine, Layout, Task, log_normal, recorded, stand_ins
from support.paths import ROOT

MODELS = ROOT / "examples/models"
DENSE = read_hf_config(MODELS / "qwen3_4b")
EXPERTS = read_hf_config(MODELS / "qwen3_30b_a3b")
HYBRID = read_hf_config(MODELS / "qwen3_next_80b_a3b")
ALL = Coefficients(
    matmul=1, experts=1, attention=1, memory=1, link=1, train_layer=0, prefill=1, engine_layer=0,
    engine_sequence=0, update=1, host=1, step=0, loop=1,
)  # fmt: skip
"""Everything that a data sheet promises."""
H100 = read_hardware("h100")
ENDLESS = replace(H100, memory_bandwidth=1e30, link=1e30, network=1e30)
"""Only arithmetic takes time."""
BATCH = Batch.of([4096] * 64)


def on(shape=DENSE, hardware=H100, **changed) -> Basis:
    return Basis(shape=shape, hardware=hardware, reached=replace(ALL, **changed))


@pytest.mark.parametrize(
    ("model", "billions"), [(DENSE, 4.02), (EXPERTS, 30.5), (HYBRID, 79.7)], ids=["4b", "30b", "80b"]
)
def test_weights_are_those_of_the_published_models(model, billions):
    """Their model cards: 4.0B, 30.5B and 80B parameters (the latter with its prediction layer)."""
    assert weight_count(model).total / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_gate_of_a_shared_expert_is_a_row_of_weights_in_each_layer():
    ungated = replace(HYBRID, shared_expert_gate=False)
    assert weight_count(HYBRID).layers - weight_count(ungated).layers == 48 * 2048


# ------------------------------------------------------------------------------------------- training


def test_with_nothing_but_arithmetic_a_pass_takes_its_operations():
    layout = Layout(gpus=8, micro_batch=8192)
    batch = Batch.of([8192] * 64)
    forward = pass_time(on(hardware=ENDLESS), layout, batch, backward=False)
    assert forward.total == pytest.approx(64 * forward_flops(DENSE, 8192) / 8 / 989e12, rel=1e-6)
    both = pass_time(on(hardware=ENDLESS), layout, batch)
    assert both.products == pytest.approx(3 * forward.products)
    assert both.attention == pytest.approx(3.5 * forward.attention)
    again = pass_time(on(hardware=ENDLESS), replace(layout, recompute="full"), batch)
    assert again.products == pytest.approx(4 * forward.products)
    assert again.attention == pytest.approx(4.5 * forward.attention)


def test_products_of_experts_and_of_other_generations_reach_shares_of_their_own():
    layout, count = Layout(gpus=1, micro_batch=4096), weight_count(EXPERTS)
    tokens = 64 * 4096
    whole, slower = (
        pass_time(on(EXPERTS, experts=share), layout, BATCH, backward=False).products for share in (1, 0.25)
    )
    assert slower - whole == pytest.approx(3 * 2 * tokens * count.chosen / 989e12)
    b200 = read_hardware("b200")
    before, after = (pass_time(on(hardware=b200, blackwell=x), layout, BATCH) for x in (1, 0.5))
    assert (after.products, after.attention) == pytest.approx((2 * before.products, 2 * before.attention))
    assert after.memory == before.memory
    assert pass_time(on(blackwell=0.5), layout, BATCH) == pass_time(on(), layout, BATCH)


def test_layers_with_a_window_meet_and_keep_no_more_than_it():
    """Every other of 24 layers of gpt-oss-20b sees 128 tokens: 64 heads of 64, 8 of them keys and values."""
    oss, length = read_hf_config(MODELS / "gpt_oss_20b"), 4096
    layout = Layout(gpus=1, micro_batch=length)
    passed = pass_time(on(oss, ENDLESS), layout, Batch.of([length]), backward=False)
    seen = length * (length + 1) / 2 + (128 * 129 / 2 + (length - 128) * 128)
    assert passed.attention == pytest.approx(12 * 4 * 64 * 64 * seen / 989e12)
    assert cache_bytes(oss, Engine(), length) == 12 * 2 * 8 * 64 * 2 * (length + 128)
    assert cache_bytes(oss, Engine(), 100) == 24 * 2 * 8 * 64 * 2 * 100


def test_micro_batches_read_weights_and_add_to_gradients():
    """Twice as many of half the size: 2 bytes forwards, 2 backwards and 8 of a gradient more."""
    few, many = (pass_time(on(), Layout(gpus=8, micro_batch=size), BATCH).memory for size in (8192, 4096))
    assert many - few == pytest.approx(4 * 12 * weight_count(DENSE).total / 3.35e12)


def test_the_bubble_is_the_stages_beyond_one_over_the_micro_batches():
    layout = Layout(gpus=8, pipeline=4, micro_batch=4096)
    found = pass_time(on(hardware=ENDLESS), layout, BATCH)
    busy = found.products + found.attention
    assert found.pipeline == pytest.approx(busy * 3 / 32)  # 64 sequences on 2 data-parallel ranks
    halved = pass_time(on(hardware=ENDLESS), replace(layout, chunks=2), BATCH)
    assert halved.pipeline == pytest.approx(busy * 3 / 64)


def test_tensor_parallel_ranks_gather_and_scatter_ten_times_a_layer():
    found = pass_time(on(), Layout(gpus=8, tensor=8, micro_batch=4096), BATCH)
    assert found.tensor == pytest.approx(10 * 2 * 64 * 4096 * 2560 * 7 / 8 * 36 / 450e9)
    assert pass_time(on(), Layout(gpus=8, micro_batch=4096), BATCH).tensor == 0


def test_what_experts_send_leaves_the_node_only_where_they_do():
    near, far = (
        pass_time(on(EXPERTS), Layout(gpus=16, expert=size, micro_batch=4096), BATCH) for size in (8, 16)
    )
    sent = 2 * 2 * 2 * 8 * 2048 * (64 * 4096 / 16) * 48  # both ways, twice, bf16, experts, hidden, layers
    assert near.expert == pytest.approx(sent * 7 / 8 / 450e9)
    assert far.expert == pytest.approx(sent * 15 / 16 * (0.5 / 450e9 + 0.5 / 50e9))


def test_gradients_and_weights_are_exchanged_behind_half_of_the_last_micro_batch():
    """Six bytes of each parameter, on a network of a node whose GPUs all take part."""
    instant = replace(H100, peak_bf16=1e30, memory_bandwidth=1e30)
    layout = Layout(gpus=64, micro_batch=4096)
    found = pass_time(on(hardware=instant), layout, BATCH)
    assert found.data == pytest.approx(6 * weight_count(DENSE).total * 63 / 64 / 400e9)
    slower = pass_time(on(), layout, BATCH)
    computing = slower.products + slower.attention + slower.memory  # of its only micro-batch
    assert slower.data == pytest.approx(max(0.0, found.data - computing / 2))


def test_an_optimizer_step_moves_its_bytes_where_the_state_is():
    own, layout = weight_count(DENSE).total / 8, Layout(gpus=8, micro_batch=4096)
    assert optimizer_seconds(on(), layout) == pytest.approx(26 * own / 3.35e12)
    away = replace(layout, offload_optimizer=True)
    assert optimizer_seconds(on(), away) == pytest.approx(32 * own / 55e9)
    once, thrice = (pass_time(on(), layout, BATCH, steps=steps).optimizer for steps in (1, 3))
    assert thrice == pytest.approx(3 * once)


def test_a_layer_takes_a_least_time_or_that_much_more_on_processors():
    layout, batch = Layout(gpus=1, micro_batch=64), Batch.of([64] * 4)
    least = 3 * 36 * 4 * 0.01
    found = pass_time(on(train_layer=0.01), layout, batch)
    assert found.products + found.attention + found.memory + found.layers == pytest.approx(least)
    processor = replace(H100, starts_ahead=False)
    assert pass_time(on(hardware=processor, train_layer=0.01), layout, batch).layers == pytest.approx(least)


def test_training_waits_for_a_copy_of_what_a_rank_has_on_its_gpu():
    """Two bytes of a weight; four each of master copy and two means, shared by data-parallel ranks."""
    parameters = weight_count(DENSE).total
    for layout, held in [
        (Layout(gpus=1, micro_batch=4096), 14),
        (Layout(gpus=8, micro_batch=4096), 2 + 12 / 8),
        (Layout(gpus=8, tensor=2, micro_batch=4096), (2 + 12 / 4) / 2),
        (Layout(gpus=8, offload_optimizer=True, micro_batch=4096), 2),
    ]:
        assert checkpoint_seconds(on(), layout) == pytest.approx(held * parameters / 55e9, rel=1e-3)


def test_ranks_that_share_sequences_pass_keys_behind_attention_and_states_in_the_open():
    batch = Batch.of([65536] * 8)
    alone, shared = (
        pass_time(on(HYBRID), Layout(gpus=8, context=ranks, micro_batch=65536), batch) for ranks in (1, 8)
    )
    # of each of 36 delta nets: 15 hops of a state of 32 heads of 128 x 128 in fp32, and the last 3 tokens of
    # 8,192 channels in bf16 of two chunks to 7 ranks; both ways, for 8 sequences
    sent = 2 * 8 * 36 * (15 * 4 * 32 * 128 * 128 + 7 * 2 * 2 * 3 * 8192)
    # and 15 hops and one gather for each of 8 micro-batches, each begun in 11.8 us
    assert shared.context == pytest.approx(sent / 450e9 + 2 * 8 * 36 * 16 * 11.8e-6)
    assert alone.context == 0
    assert shared.attention > alone.attention  # delta nets compute states beside their values
    assert shared.products == pytest.approx(alone.products)
    dense = pass_time(on(), Layout(gpus=8, context=8, micro_batch=65536), batch)
    assert dense.context == 0  # 36 layers of keys and values take less than their attention


def test_ranks_that_share_out_heads_exchange_what_delta_nets_take_and_give():
    batch, layout = Batch.of([65536] * 8), Layout(gpus=8, context=8, micro_batch=65536)
    states, heads = (
        pass_time(on(HYBRID), replace(layout, delta_net_cp=way), batch) for way in ("state", "heads")
    )
    # of each of 65,536 tokens of a rank 2 x 2,048 of queries and keys, 2 x 4,096 of values and gates, 2 x 32
    # of decay and beta, 4,096 of outputs, in bf16, 7 of 8 to other ranks; both ways
    sent = 2 * 36 * 65536 * 2 * (2 * 2048 + 3 * 4096 + 2 * 32) * 7 / 8
    assert heads.context == pytest.approx(sent / 450e9 + 2 * 2 * 36 * 8 * 11.8e-6)
    assert heads.context > states.context  # sequences are long
    alone = pass_time(on(HYBRID), Layout(gpus=8, micro_batch=65536), batch)
    assert heads.attention == pytest.approx(alone.attention)


# ------------------------------------------------------------------------------------------- sampling


def test_a_decoding_step_reads_weights_and_caches_or_computes():
    count = weight_count(DENSE)
    read = 2 * (count.layers + count.table)
    assert decode_seconds(on(), Engine(), 1, 0) == pytest.approx(read / 3.35e12)
    cache = 36 * 2 * 8 * 128 * 2  # layers, keys and values, heads, elements, bf16
    assert decode_seconds(on(), Engine(), 1, 1000) == pytest.approx((read + 1000 * cache) / 3.35e12)
    products = 2 * 4096 * (count.layers + count.table) / 989e12
    assert decode_seconds(on(), Engine(), 4096, 0) == pytest.approx(products)
    assert decode_seconds(on(engine_layer=1e-3), Engine(), 1, 0) == pytest.approx(read / 3.35e12 + 0.036)


def test_few_sequences_read_the_experts_that_they_choose():
    """One of Qwen3-30B-A3B chooses 8 of 128."""
    count = weight_count(EXPERTS)
    read = 2 * (count.layers + count.table + count.experts * 8 / 128)
    assert decode_seconds(on(EXPERTS), Engine(), 1, 0) == pytest.approx(read / 3.35e12)


def test_gpus_of_an_engine_share_the_reading_and_add_up_twice_a_layer():
    count, sent = weight_count(DENSE), 2 * 36 * 2 * 2 * 2560 * 3 / 4
    found = decode_seconds(on(), Engine(tensor=4), 1, 0)
    read = 2 * (count.layers + count.table) / (4 * 3.35e12)
    assert found == pytest.approx(read + sent / 450e9 + 2 * 36 * 11.8e-6)


def test_hosts_work_beside_gpus_but_processors_one_after_the_other():
    busy = on(engine_sequence=1e-3)
    assert decode_seconds(busy, Engine(), 100, 0) == pytest.approx(0.1)
    assert decode_seconds(busy, Engine(), 1, 0) == decode_seconds(on(), Engine(), 1, 0)
    processor = replace(busy, hardware=replace(H100, starts_ahead=False))
    in_turn = 0.1 + decode_seconds(on(), Engine(), 100, 0)
    assert decode_seconds(processor, Engine(), 100, 0) == pytest.approx(in_turn)


def test_prompts_take_their_operations_once_for_a_group():
    count = weight_count(DENSE)
    pairs = 36 * 4 * 32 * 128 * 1000 * 1001 / 2
    assert prompt_seconds(on(), Engine(), 1000) == pytest.approx((2 * 1000 * count.layers + pairs) / 989e12)
    shared, own = (sample(on(), Engine(), [10.0] * 8, prompt=1000, group=group).prompts for group in (8, 1))
    assert own == pytest.approx(8 * shared)
    hybrid = [sample(on(HYBRID), Engine(tensor=4), [10.0] * 8, prompt=1000, group=g).prompts for g in (8, 1)]
    assert hybrid[0] == hybrid[1]


def test_slots_are_what_memory_leaves():
    # 36 delta nets of 32 heads of 128 x 128, and their convolution over 8,192 channels, 3 tokens, in bf16
    state = 36 * 2 * (32 * 128 * 128 + 8192 * 3)
    engine, count = Engine(tensor=4), weight_count(HYBRID)
    free = 4 * (79.2 * 0.9 - 1.5) * GIB - 2 * count.total
    assert engine_slots(on(HYBRID), engine, 8192) == int(free / (cache_bytes(HYBRID, engine, 8192) + state))
    assert engine_slots(on(HYBRID), replace(engine, most_running=5), 8192) == 5
    with pytest.raises(ValueError, match="1 GPUs of h100 do not hold the weights"):
        engine_slots(on(HYBRID), Engine(), 8192)


def test_responses_take_the_steps_that_their_lengths_say():
    """Two at once of 10, 20 and 30: 20 steps with two running, then 20 with one. Their mean context is that
    of a token: (5 x 10 + 10 x 20 + 15 x 30) / 60."""
    found = sample(on(), Engine(), [10.0, 20.0, 30.0], concurrency=2)
    two, one = (decode_seconds(on(), Engine(), running, 700 / 60) for running in (2, 1))
    assert found.seconds == pytest.approx(20 * two + 20 * one)
    assert (found.tokens, found.slots, found.tail) == (60, 2, 0)


def test_responses_that_stand_for_several_take_as_long_as_all_of_them():
    lengths = np.random.default_rng(0).permutation(log_normal(1000, 4096, 2048))
    few, times = stand_ins(lengths, 2048)
    assert (len(few), times) == (256, 8)
    every = sample(on(), Engine(), lengths, concurrency=512)
    some = sample(on(), Engine(), few, times=times, concurrency=512)
    assert some.tokens == pytest.approx(every.tokens)
    assert some.seconds == pytest.approx(every.seconds, rel=0.05)


@pytest.mark.parametrize("mean", [100, 1000, 3900])
def test_lengths_have_the_mean_that_was_asked(mean):
    lengths = log_normal(mean, 4096, 512)
    assert lengths.mean() == pytest.approx(mean, rel=1e-3)
    assert lengths.max() <= 4096
    assert recorded([1, 2, 3], 3).tolist() == pytest.approx([4 / 3, 2, 8 / 3])
    assert len(stand_ins(lengths, 0)[0]) == 0
    with pytest.raises(ValueError, match="not between 1 and the longest"):
        log_normal(5000, 4096, 8)


# --------------------------------------------------------------------------------------------- a step

TASK = Task(responses=log_normal(1000, 4096, 128), count=512, prompt=100, group=8)


def step(basis: Basis | None = None, task: Task = TASK, **changed):
    given = {"engine_gpus": 16, "colocated": True, "layout": Layout(gpus=16, micro_batch=16384)} | changed
    return step_times(basis or on(), engine=Engine(), task=task, **given)


def test_stages_of_a_colocated_step_add_up():
    found = step(on(step=3.0))
    assert found.total == pytest.approx(sum(found.stages().values()))
    assert found.weights == pytest.approx(2 * weight_count(DENSE).total / 450e9)
    assert found.switching == 2 * checkpoint_seconds(on(), Layout(gpus=16, micro_batch=16384))
    assert found.other == 3.0


def test_ahead_of_training_the_slower_of_both_counts():
    in_turn, ahead = (step(colocated=False, task=replace(TASK, staleness=s)) for s in (0, 4))
    assert in_turn.total == pytest.approx(sum(in_turn.stages().values()))
    sampling, training = ahead.sampling + ahead.corrections, ahead.log_probs + ahead.update
    assert ahead.total == pytest.approx(max(sampling, training) + ahead.weights)
    shared = step(task=replace(TASK, staleness=4))  # on shared GPUs nothing goes on beside
    assert shared.total == step().total


def test_steps_that_are_under_way_at_once_share_the_wait_for_the_longest_response():
    few = replace(TASK, count=256)
    found = [step(colocated=False, task=replace(few, staleness=s)).sampled for s in (0, 1, 8)]
    assert found[0].seconds > found[1].seconds > found[2].seconds
    assert [one.tokens for one in found] == pytest.approx([found[0].tokens] * 3, rel=0.05)
    assert 9 * found[2].seconds > found[0].seconds


def test_corrections_are_written_in_the_tail_of_the_responses():
    few, many = (step(task=replace(TASK, corrections=share)) for share in (0.1, 4.0))
    assert few.corrections == 0
    assert many.corrections == pytest.approx(many.corrected.seconds - many.sampled.tail)
    found = step(task=replace(TASK, corrections=0.5))
    assert found.update == pytest.approx(1.5 * step().update, rel=0.1)


def test_a_loop_takes_longer_than_benchmarks_of_its_parts():
    alone, within = step(), step(on(loop=1.5))
    for stage in ("sampling", "log_probs", "update"):
        assert within.stages()[stage] == pytest.approx(1.5 * alone.stages()[stage])
    assert within.weights == alone.weights
    layout = Layout(gpus=8, micro_batch=4096)
    assert pass_time(on(loop=1.5), layout, BATCH) == pass_time(on(), layout, BATCH)


def test_a_weight_update_sends_what_its_transport_must():
    whole, given = 2 * weight_count(DENSE).total, {"engine_tensor": 4, "gpus": 32}
    assert update_seconds(on(), "gathered", **given) == pytest.approx(whole / 50e9)
    assert update_seconds(on(), "resharded", **given) == pytest.approx(whole / 4 / 50e9)
    assert update_seconds(on(), "ipc", **given) == pytest.approx(whole / 4 / 450e9)
    assert update_seconds(on(update=0.1), "ipc", **given) == pytest.approx(whole / 0.4 / 450e9)


FASTER = ("peak_bf16", "memory_bandwidth", "link", "network", "host_link")


@pytest.mark.parametrize("name", hardware_names())
def test_better_hardware_and_less_work_never_take_longer(name):
    hardware = read_hardware(name)
    basis = Basis(shape=EXPERTS, hardware=hardware, reached=fitted().coefficients)
    layout = Layout(gpus=64, tensor=2, pipeline=2, context=2, expert=8, micro_batch=16384)
    engine, task = Engine(tensor=4), replace(TASK, corrections=0.5)
    given = {"engine_gpus": 64, "colocated": False}
    before = step_times(basis, layout, engine, task, **given).total
    for field in FASTER:
        better = replace(hardware, **{field: 2 * getattr(hardware, field)})
        found = step_times(replace(basis, hardware=better), layout, engine, task, **given).total
        assert found <= before, field
    for less in ({"count": 256}, {"prompt": 50.0}, {"corrections": 0.0}, {"passes_without_gradient": 0.0}):
        assert step_times(basis, layout, engine, replace(task, **less), **given).total <= before, less


def test_twice_the_work_in_twice_the_units_takes_twice_as_long():
    """Seconds are bytes over bytes per second and operations over operations per second, and nothing else."""
    half = {name: getattr(H100, name) / 2 for name in FASTER}
    once, twice = step(), step(on(hardware=replace(H100, peak_fp8=H100.peak_fp8 / 2, **half)))
    assert twice.total == pytest.approx(2 * once.total)


def test_hardware_is_read_as_its_file_has_it():
    h100 = read_hardware("H100")
    assert (h100.peak("bf16"), h100.peak("mxfp8")) == (989e12, 1979e12)
    assert (h100.between(8), h100.between(9)) == (450e9, 50e9)
    # a ring passes between nodes on the networks of all members that a node has, and on a rack on none
    assert (h100.collective(8), h100.collective(64), h100.collective(8, stride=8)) == (450e9, 400e9, 50e9)
    assert read_hardware("gb200").collective(64, stride=2) == 900e9
    with pytest.raises(ValueError, match="no hardware 'h1000'; there are a100, b200"):
        read_hardware("h1000")


def test_over_the_network_a_message_begins_later():
    assert H100.start(8) == pytest.approx(11.8e-6)
    assert H100.start(16) == pytest.approx(22.4e-6)
