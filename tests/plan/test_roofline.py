from dataclasses import replace

import numpy as np
import pytest

from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.cost import forward_flops, weight_count
from megatron_ibpo.plan import roofline
from megatron_ibpo.plan.hardware import hardware_names, read_hardware
from megatron_ibpo.plan.prediction import Setting
from megatron_ibpo.plan.roofline import GIB, cache_bytes, decode_seconds, pass_time, prompt_seconds, sample
from megatron_ibpo.plan.workload import (
    Basis,
    Batch,
    Coefficients,
    Engine,
    Layout,
    Task,
    fitted,
    log_normal,
    recorded,
    stand_ins,
)
from support.paths import ROOT

MODELS = ROOT / "examples/models"
DENSE = read_hf_config(MODELS / "qwen3_4b")
EXPERTS = read_hf_config(MODELS / "qwen3_30b_a3b")
HYBRID = read_hf_config(MODELS / "qwen3_next_80b_a3b")
ALL = Coefficients(
    matmul=1, experts=1, attention=1, memory=1, link=1, prefill=1, engine_layer=0,
    engine_sequence=0, update=1, host=1, step=0, loop=1,
)  # fmt: skip
"""Everything that a data sheet promises."""
H100 = read_hardware("h100")
ENDLESS = replace(H100, memory_bandwidth=1e30, link=1e30, network=1e30)  # only arithmetic takes time
BATCH = Batch.of([4096] * 64)


def on(shape=DENSE, hardware=H100, **changed) -> Basis:
    return Basis(shape=shape, hardware=hardware, reached=replace(ALL, **changed))


def test_weight_counts_match_model_cards_and_updates_their_transport():
    """Their model cards: 4.0B, 30.5B and 80B parameters (the latter with its prediction layer)."""
    billions = [weight_count(model).total / 1e9 for model in (DENSE, EXPERTS, HYBRID)]
    assert billions == pytest.approx([4.02, 30.5, 79.7], rel=0.01)
    ungated = replace(HYBRID, shared_expert_gate=False)
    assert weight_count(HYBRID).layers - weight_count(ungated).layers == 48 * 2048
    whole, given = 2 * weight_count(DENSE).total, {"engine_tensor": 4, "gpus": 32}
    assert roofline.update_seconds(on(), "gathered", **given) == pytest.approx(whole / 50e9)
    assert roofline.update_seconds(on(), "resharded", **given) == pytest.approx(whole / 4 / 50e9)
    assert roofline.update_seconds(on(), "ipc", **given) == pytest.approx(whole / 4 / 450e9)
    assert roofline.update_seconds(on(update=0.1), "ipc", **given) == pytest.approx(whole / 0.4 / 450e9)


def test_with_nothing_but_arithmetic_a_pass_takes_its_operations():
    layout, batch = Layout(gpus=8, micro_batch=8192), Batch.of([8192] * 64)
    forward = pass_time(on(hardware=ENDLESS), layout, batch, backward=False)
    assert forward.total == pytest.approx(64 * forward_flops(DENSE, 8192) / 8 / 989e12, rel=1e-6)
    for recompute, products in (("none", 3), ("full", 4)):
        found = pass_time(on(hardware=ENDLESS), replace(layout, recompute=recompute), batch)
        assert found.products == pytest.approx(products * forward.products)
        assert found.attention == pytest.approx((products + 0.5) * forward.attention)


def test_experts_and_other_gpu_generations_reach_their_own_efficiency():
    layout = Layout(gpus=1, micro_batch=4096)
    bases = (on(EXPERTS, experts=share) for share in (1, 0.25))
    whole, slower = (pass_time(basis, layout, BATCH, backward=False).products for basis in bases)
    assert slower - whole == pytest.approx(3 * 2 * 64 * 4096 * weight_count(EXPERTS).chosen / 989e12)
    b200 = read_hardware("b200")
    before, after = (pass_time(on(hardware=b200, blackwell=x), layout, BATCH) for x in (1, 0.5))
    assert (after.products, after.attention) == pytest.approx((2 * before.products, 2 * before.attention))
    assert after.memory == before.memory
    assert pass_time(on(blackwell=0.5), layout, BATCH) == pass_time(on(), layout, BATCH)


def test_windowed_layers_attend_to_and_cache_only_the_window():
    """Every other of 24 layers of gpt-oss-20b sees 128 tokens: 64 heads of 64, 8 of them keys and values."""
    oss, length = read_hf_config(MODELS / "gpt_oss_20b"), 4096
    layout = Layout(gpus=1, micro_batch=length)
    passed = pass_time(on(oss, ENDLESS), layout, Batch.of([length]), backward=False)
    seen = length * (length + 1) / 2 + (128 * 129 / 2 + (length - 128) * 128)
    assert passed.attention == pytest.approx(12 * 4 * 64 * 64 * seen / 989e12)
    assert cache_bytes(oss, Engine(), length) == 12 * 2 * 8 * 64 * 2 * (length + 128)
    assert cache_bytes(oss, Engine(), 100) == 24 * 2 * 8 * 64 * 2 * 100


def test_micro_batches_cost_weight_traffic_and_stages_a_bubble():
    """Twice as many of half the size: 2 bytes forwards, 2 backwards and 8 of a gradient more."""
    few, many = (pass_time(on(), Layout(gpus=8, micro_batch=size), BATCH).memory for size in (8192, 4096))
    assert many - few == pytest.approx(4 * 12 * weight_count(DENSE).total / 3.35e12)
    for chunks in (1, 2):
        layout = Layout(gpus=8, pipeline=4, micro_batch=4096, chunks=chunks)
        found = pass_time(on(hardware=ENDLESS), layout, BATCH)
        busy = found.products + found.attention
        assert found.pipeline == pytest.approx(busy * 3 / 32 / chunks)  # 64 sequences on 2 ranks of data


def test_tensor_and_expert_traffic_follow_their_formulas():
    found = pass_time(on(), Layout(gpus=8, tensor=8, micro_batch=4096), BATCH)
    assert found.tensor == pytest.approx(10 * 2 * 64 * 4096 * 2560 * 7 / 8 * 36 / 450e9)
    assert pass_time(on(), Layout(gpus=8, micro_batch=4096), BATCH).tensor == 0
    near, far = (
        pass_time(on(EXPERTS), Layout(gpus=16, expert=size, micro_batch=4096), BATCH) for size in (8, 16)
    )
    sent = 2 * 2 * 2 * 8 * 2048 * (64 * 4096 / 16) * 48  # both ways, twice, bf16, experts, hidden, layers
    assert near.expert == pytest.approx(sent * 7 / 8 / 450e9)
    assert far.expert == pytest.approx(sent * 15 / 16 * (0.5 / 450e9 + 0.5 / 50e9))


def test_optimizer_and_checkpoint_times_follow_where_the_state_is():
    whole, layout = weight_count(DENSE).total, Layout(gpus=8, micro_batch=4096)
    away = replace(layout, offload_optimizer=True)
    assert roofline.optimizer_seconds(on(), layout) == pytest.approx(26 * whole / 8 / 3.35e12)
    assert roofline.optimizer_seconds(on(), away) == pytest.approx(32 * whole / 8 / 55e9)
    once, thrice = (pass_time(on(), layout, BATCH, steps=steps).optimizer for steps in (1, 3))
    assert thrice == pytest.approx(3 * once)
    # two bytes of a weight; four each of master copy and two means, shared by data-parallel ranks
    sharded = (layout, 2 + 12 / 8), (replace(layout, tensor=2), (2 + 12 / 4) / 2)
    for own, held in ((replace(layout, gpus=1), 14), *sharded, (away, 2)):
        assert roofline.checkpoint_seconds(on(), own) == pytest.approx(held * whole / 55e9, rel=1e-3)


def test_half_of_a_backward_pass_hides_the_gradient_exchange():
    # six bytes of each parameter, on a network of a node whose GPUs all take part
    instant = replace(H100, peak_bf16=1e30, memory_bandwidth=1e30)
    layout = Layout(gpus=64, micro_batch=4096)
    found = pass_time(on(hardware=instant), layout, BATCH)
    assert found.data == pytest.approx(6 * weight_count(DENSE).total * 63 / 64 / 400e9)
    slower = pass_time(on(), layout, BATCH)
    computing = slower.products + slower.attention + slower.memory  # of its only micro-batch
    assert slower.data == pytest.approx(max(0.0, found.data - computing / 2))


def test_context_ranks_hide_keys_behind_attention_but_not_states():
    batch, layout = Batch.of([65536] * 8), Layout(gpus=8, micro_batch=65536)
    sharing = replace(layout, context=8)
    alone, shared = (pass_time(on(HYBRID), own, batch) for own in (layout, sharing))
    # of each of 36 delta nets: 15 hops of a state of 32 heads of 128 x 128 in fp32, and the last 3 tokens of
    # 8,192 channels in bf16 of two chunks to 7 ranks; both ways, for 8 sequences
    sent = 2 * 8 * 36 * (15 * 4 * 32 * 128 * 128 + 7 * 2 * 2 * 3 * 8192)
    # and 15 hops and one gather for each of 8 micro-batches, each begun in 11.8 us
    assert shared.context == pytest.approx(sent / 450e9 + 2 * 8 * 36 * 16 * 11.8e-6)
    assert alone.context == 0
    assert shared.attention > alone.attention  # delta nets compute states beside their values
    assert shared.products == pytest.approx(alone.products)
    # 36 layers of keys and values take less than their attention
    assert pass_time(on(), sharing, batch).context == 0
    # or they share out heads, and exchange what delta nets take and give: of each of 65,536 tokens of a rank
    # 2 x 2,048 of queries and keys, 2 x 4,096 of values and gates, 2 x 32 of decay and beta, 4,096 of
    # outputs, in bf16, 7 of 8 to other ranks; both ways
    heads = pass_time(on(HYBRID), replace(sharing, delta_net_cp="heads"), batch)
    sent = 2 * 36 * 65536 * 2 * (2 * 2048 + 3 * 4096 + 2 * 32) * 7 / 8
    assert heads.context == pytest.approx(sent / 450e9 + 2 * 2 * 36 * 8 * 11.8e-6)
    assert heads.context > shared.context  # sequences are long
    assert heads.attention == pytest.approx(alone.attention)


def test_a_decoding_step_reads_weights_and_caches_or_computes():
    count = weight_count(DENSE)
    weights = count.layers + count.table
    read, cache = 2 * weights, 36 * 2 * 8 * 128 * 2  # layers, keys and values, heads, elements, bf16
    for engine, running, context, seconds in [
        (Engine(), 1, 0, read / 3.35e12),
        (Engine(), 1, 1000, (read + 1000 * cache) / 3.35e12),
        (Engine(), 4096, 0, 2 * 4096 * weights / 989e12),
        # GPUs of an engine share the reading, and add up twice a layer
        (Engine(tensor=4), 1, 0, read / (4 * 3.35e12) + 2 * 36 * (2 * 2 * 2560 * 3 / 4 / 450e9 + 11.8e-6)),
    ]:
        assert decode_seconds(on(), engine, running, context) == pytest.approx(seconds)
    assert decode_seconds(on(engine_layer=1e-3), Engine(), 1, 0) == pytest.approx(read / 3.35e12 + 0.036)
    # few sequences read the experts that they choose: one of Qwen3-30B-A3B chooses 8 of 128
    count = weight_count(EXPERTS)
    read = 2 * (count.layers + count.table + count.experts * 8 / 128)
    assert decode_seconds(on(EXPERTS), Engine(), 1, 0) == pytest.approx(read / 3.35e12)


def test_engines_add_host_time_and_read_prompts_once_per_group():
    busy = on(engine_sequence=1e-3)
    assert decode_seconds(busy, Engine(), 100, 0) == pytest.approx(0.1)
    assert decode_seconds(busy, Engine(), 1, 0) == decode_seconds(on(), Engine(), 1, 0)
    operations = 2 * 1000 * weight_count(DENSE).layers + 36 * 4 * 32 * 128 * 1000 * 1001 / 2
    assert prompt_seconds(on(), Engine(), 1000) == pytest.approx(operations / 989e12)
    for basis, engine, times in ((on(), Engine(), 8), (on(HYBRID), Engine(tensor=4), 1)):
        shared, own = (sample(basis, engine, [10.0] * 8, prompt=1000, group=size).prompts for size in (8, 1))
        assert own == pytest.approx(times * shared)


def test_memory_sets_the_slots_and_lengths_the_decoding_steps():
    # 36 delta nets of 32 heads of 128 x 128, and their convolution over 8,192 channels, 3 tokens, in bf16
    state = 36 * 2 * (32 * 128 * 128 + 8192 * 3)
    engine, count = Engine(tensor=4), weight_count(HYBRID)
    free = 4 * (79.2 * 0.9 - 1.5) * GIB - 2 * count.total
    slots = int(free / (cache_bytes(HYBRID, engine, 8192) + state))
    assert roofline.engine_slots(on(HYBRID), engine, 8192) == slots
    assert roofline.engine_slots(on(HYBRID), replace(engine, most_running=5), 8192) == 5
    with pytest.raises(ValueError, match="1 GPUs of h100 do not hold the weights"):
        roofline.engine_slots(on(HYBRID), Engine(), 8192)
    # two at once of 10, 20 and 30: 20 steps with two running, then 20 with one. Their mean context is that
    # of a token: (5 x 10 + 10 x 20 + 15 x 30) / 60
    found = sample(on(), Engine(), [10.0, 20.0, 30.0], concurrency=2)
    two, one = (decode_seconds(on(), Engine(), running, 700 / 60) for running in (2, 1))
    assert found.seconds == pytest.approx(20 * two + 20 * one)
    assert (found.tokens, found.slots, found.tail) == (60, 2, 0)
    lengths = np.random.default_rng(0).permutation(log_normal(1000, 4096, 2048))
    few, times = stand_ins(lengths, 2048)
    assert (len(few), times) == (256, 8)
    every = sample(on(), Engine(), lengths, concurrency=512)
    some = sample(on(), Engine(), few, times=times, concurrency=512)
    assert some.tokens == pytest.approx(every.tokens)
    assert some.seconds == pytest.approx(every.seconds, rel=0.05)
    assert len(stand_ins(lengths, 0)[0]) == 0
    assert recorded([1, 2, 3], 3).tolist() == pytest.approx([4 / 3, 2, 8 / 3])
    assert log_normal(3900, 4096, 512).mean() == pytest.approx(3900, rel=1e-3)
    with pytest.raises(ValueError, match="not between 1 and the longest"):
        log_normal(5000, 4096, 8)


TASK = Task(responses=log_normal(1000, 4096, 128), count=512, prompt=100, group=8)


def step(basis: Basis | None = None, task: Task = TASK, **changed):
    given = {"engine_gpus": 16, "colocated": True, "layout": Layout(gpus=16, micro_batch=16384)} | changed
    return Setting(basis=basis or on(), engine=Engine(), task=task, **given).times()


def test_colocated_stages_add_up_and_asynchronous_ones_overlap():
    found = step(on(step=3.0))
    assert found.total == pytest.approx(sum(found.stages().values()))
    assert found.weights == pytest.approx(2 * weight_count(DENSE).total / 450e9)
    assert found.switching == 2 * roofline.checkpoint_seconds(on(), Layout(gpus=16, micro_batch=16384))
    assert found.other == 3.0
    in_turn, ahead = (step(colocated=False, task=replace(TASK, staleness=s)) for s in (0, 4))
    assert in_turn.total == pytest.approx(sum(in_turn.stages().values()))
    sampling, training = ahead.sampling + ahead.corrections, ahead.log_probs + ahead.update
    assert ahead.total == pytest.approx(max(sampling, training) + ahead.weights)
    shared = step(task=replace(TASK, staleness=4))  # on shared GPUs nothing goes on beside
    assert shared.total == step().total


def test_steps_share_the_longest_wait_and_corrections_fill_it():
    tasks = [replace(TASK, count=256, staleness=steps) for steps in (0, 1, 8)]
    found = [step(colocated=False, task=task).sampled for task in tasks]
    assert found[0].seconds > found[1].seconds > found[2].seconds
    assert [one.tokens for one in found] == pytest.approx([found[0].tokens] * 3, rel=0.05)
    assert 9 * found[2].seconds > found[0].seconds
    few, many = (step(task=replace(TASK, corrections=share)) for share in (0.1, 4.0))
    assert few.corrections == 0
    assert many.corrections == pytest.approx(many.corrected.seconds - many.sampled.tail)
    found = step(task=replace(TASK, corrections=0.5))
    assert found.update == pytest.approx(1.5 * step().update, rel=0.1)
    assert step(task=replace(TASK, epochs=3)).total == pytest.approx(step().total + 2 * step().update)


FASTER = ("peak_bf16", "memory_bandwidth", "link", "network", "host_link")


@pytest.mark.parametrize("name", hardware_names())
def test_better_hardware_and_less_work_never_take_longer(name):
    basis = Basis(shape=EXPERTS, hardware=read_hardware(name), reached=fitted().coefficients)
    layout = Layout(gpus=64, tensor=2, pipeline=2, context=2, expert=8, micro_batch=16384)
    task = replace(TASK, corrections=0.5)

    def total(hardware, task):
        own = replace(basis, hardware=hardware)
        parts = {"basis": own, "layout": layout, "engine": Engine(tensor=4), "task": task}
        return Setting(**parts, engine_gpus=64, colocated=False).times().total

    hardware = basis.hardware
    before = total(hardware, task)
    for field in FASTER:
        assert total(replace(hardware, **{field: 2 * getattr(hardware, field)}), task) <= before, field
    for less in ({"count": 256}, {"prompt": 50.0}, {"corrections": 0.0}, {"passes_without_gradient": 0.0}):
        assert total(hardware, replace(task, **less)) <= before, less


def test_hardware_is_read_as_its_file_has_it():
    h100 = read_hardware("H100")
    assert (h100.peak("bf16"), h100.peak("mxfp8")) == (989e12, 1979e12)
    assert (h100.between(8), h100.between(9)) == (450e9, 50e9)
    # a ring passes between nodes on the networks of all members that a node has, and on a rack on none
    assert (h100.collective(8), h100.collective(64), h100.collective(8, stride=8)) == (450e9, 400e9, 50e9)
    assert read_hardware("gb200").collective(64, stride=2) == 900e9
    # over the network a message begins later
    assert (h100.start(8), h100.start(16)) == pytest.approx((11.8e-6, 22.4e-6))
    with pytest.raises(ValueError, match="no hardware 'h1000'; there are a100, b200"):
        read_hardware("h1000")
