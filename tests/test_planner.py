"""Predicted time: hand-computed values on round hardware, and what must follow from the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from megatron_ibpo.commands.plan import main as plan_command
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.cost import forward_flops, weight_count
from megatron_ibpo.plan.efficiencies import Efficiencies
from megatron_ibpo.plan.feasibility import make_plan
from megatron_ibpo.plan.hardware import read_hardware
from megatron_ibpo.plan.lengths import fixed, log_normal, recorded, uniform
from megatron_ibpo.plan.parameter_count import estimate_census
from megatron_ibpo.plan.prediction import changes, lines, setting_of
from megatron_ibpo.plan.sampling_time import GIB, Engine, sample
from megatron_ibpo.plan.search import search
from megatron_ibpo.plan.step_time import Task, checkpoint_seconds, step_times, update_seconds
from megatron_ibpo.plan.timeline import LANES, timeline
from megatron_ibpo.plan.training_time import Batch, Layout, pass_time
from megatron_ibpo.report.step_picture import plot_step
from megatron_ibpo.run.settings import parse_config

MODELS = Path(__file__).parents[1] / "examples/models"
DENSE = read_hf_config(MODELS / "qwen3_4b")
EXPERTS = read_hf_config(MODELS / "qwen3_30b_a3b")
HYBRID = read_hf_config(MODELS / "qwen3_next_80b_a3b")
ALL = Efficiencies(
    matmul=1, matmul_fp8=1, experts=1, attention=1, elementwise=1, link=1, routing=1, decode=1, prefill=1,
    train_layer=0, engine_layer=0, engine_tensor=0, engine_sequence=0, engine_request=0, gather=1, reshard=1,
    ipc=1, host=1, step=0,
)  # fmt: skip
"""Everything that a data sheet promises."""
H100 = read_hardware("h100")
ENDLESS = replace(H100, memory_bandwidth=1e30, link=1e30, network=1e30)
"""Only arithmetic takes time."""


@pytest.mark.parametrize(
    ("model", "billions"), [(DENSE, 4.02), (EXPERTS, 30.5), (HYBRID, 79.7)], ids=["4b", "30b", "80b"]
)
def test_weights_are_those_of_the_published_models(model, billions):
    """Their model cards: 4.0B, 30.5B and 80B parameters (the latter with its prediction layer)."""
    assert weight_count(model).total / 1e9 == pytest.approx(billions, rel=0.01)


def test_with_nothing_but_arithmetic_a_pass_takes_its_operations():
    layout = Layout(gpus=8, micro_batch=8192)
    batch = Batch.of([8192] * 64)
    forward = pass_time(DENSE, layout, ENDLESS, ALL, batch, backward=False)
    assert forward.total == pytest.approx(64 * forward_flops(DENSE, 8192) / 8 / 989e12, rel=1e-6)
    both = pass_time(DENSE, layout, ENDLESS, ALL, batch)
    assert both.products == pytest.approx(3 * forward.products)
    assert both.attention == pytest.approx(3.5 * forward.attention)
    again = pass_time(DENSE, replace(layout, recompute="full"), ENDLESS, ALL, batch)
    assert again.products == pytest.approx(4 * forward.products)


def test_layers_with_a_window_meet_and_keep_no_more_than_it():
    """Every other of 24 layers of gpt-oss-20b sees 128 tokens: 64 heads of 64, 8 of them keys and values."""
    oss, length = read_hf_config(MODELS / "gpt_oss_20b"), 4096
    passed = pass_time(
        oss, Layout(gpus=1, micro_batch=length), ENDLESS, ALL, Batch.of([length]), backward=False
    )
    seen = length * (length + 1) / 2 + (128 * 129 / 2 + (length - 128) * 128)
    assert passed.attention == pytest.approx(12 * 4 * 64 * 64 * seen / 989e12)
    writing = Engine(shape=oss, hardware=H100, reached=ALL)
    assert writing.cache_of(length) == 12 * 2 * 8 * 64 * 2 * (length + 128)
    assert writing.cache_of(100) == 24 * 2 * 8 * 64 * 2 * 100


def test_the_bubble_is_the_stages_beyond_one_over_the_micro_batches():
    batch = Batch.of([4096] * 64)
    layout = Layout(gpus=8, pipeline=4, micro_batch=4096)
    found = pass_time(DENSE, layout, ENDLESS, ALL, batch)
    busy = found.products + found.attention
    assert found.pipeline == pytest.approx(busy * 3 / 32)  # 64 sequences on 2 data-parallel ranks
    halved = pass_time(DENSE, replace(layout, chunks=2), ENDLESS, ALL, batch)
    assert halved.pipeline == pytest.approx(busy * 3 / 64)


def test_what_experts_send_leaves_the_node_only_where_they_do():
    batch = Batch.of([4096] * 64)
    near, far = (
        pass_time(EXPERTS, Layout(gpus=16, expert=size, micro_batch=4096), H100, ALL, batch)
        for size in (8, 16)
    )
    sent = 2 * 2 * 2 * 8 * 2048 * (64 * 4096 / 16) * 48  # both ways, twice, bf16, experts, hidden, layers
    assert near.expert == pytest.approx(sent * 7 / 8 / 450e9)
    assert far.expert == pytest.approx(sent * 15 / 16 * (0.5 / 450e9 + 0.5 / 50e9))


def engine(**changed):
    return Engine(shape=DENSE, hardware=H100, reached=ALL, **changed)


def test_a_step_of_one_sequence_reads_all_weights_once():
    count = weight_count(DENSE)
    read = 2 * (count.layers + count.table)
    assert engine().step_seconds(1, 0) == pytest.approx(read / 3.35e12)
    cache = 36 * 2 * 8 * 128 * 2  # layers, keys and values, heads, elements, bf16
    assert engine().step_seconds(1, 1000) == pytest.approx((read + 1000 * cache) / 3.35e12)


def test_responses_take_the_steps_that_their_lengths_say():
    """Two at once of 10, 20 and 30: steps 0 to 10 and 10 to 20 with two running, 20 to 40 with one."""
    free = engine()
    found = sample(free, [10.0, 20.0, 30.0], concurrency=2)
    two, one = 2, 1
    hand = 10 * free.step_seconds(two, 5) + 10 * free.step_seconds(two, 10) + 20 * free.step_seconds(one, 20)
    assert found.seconds == pytest.approx(hand)
    assert (found.tokens, found.slots) == (60, 2)


def test_many_responses_are_as_long_as_those_that_stand_for_them():
    lengths = np.random.default_rng(0).permutation(log_normal(1000, 4096, 2048))
    few = sample(engine(), lengths[:256], concurrency=32)
    many = sample(engine(), lengths, concurrency=256)
    assert many.tokens == pytest.approx(2048 * 1000, rel=1e-3)
    assert few.slots * 8 == many.slots
    assert many.seconds < 8 * few.seconds


def test_slots_are_what_memory_leaves():
    hybrid = Engine(shape=HYBRID, hardware=H100, reached=ALL, tensor=4, state_bytes=4.0)
    # 36 delta nets of 32 heads of 128 x 128 in fp32, and their convolution over 8,192 channels, 3 tokens
    assert hybrid.state_per_sequence == 36 * (4 * 32 * 128 * 128 + 2 * 8192 * 3)
    count = weight_count(HYBRID)
    free = 4 * (79.2 * 0.9 - 1.5) * GIB - 2 * (count.total)
    each = 8192 * hybrid.cache_of(1) + hybrid.state_per_sequence
    assert hybrid.slots(8192) == int(free / each)
    assert replace(hybrid, cache_share=0.5).slots(8192) == int(free / each / 2)
    with pytest.raises(ValueError, match="1 GPUs of h100 do not hold the weights"):
        replace(hybrid, tensor=1).slots(8192)


def test_hosts_work_beside_gpus_but_processors_one_after_the_other():
    slow = replace(ALL, engine_sequence=1e-3)
    free, busy = engine(), replace(engine(), reached=slow)
    assert busy.step_seconds(100, 0) == pytest.approx(0.1)
    assert busy.step_seconds(1, 0) == free.step_seconds(1, 0)
    in_turn = replace(busy, hardware=replace(H100, starts_ahead=False))
    assert in_turn.step_seconds(100, 0) == pytest.approx(0.1 + free.step_seconds(100, 0))


def test_requests_cost_a_server_and_not_a_list():
    asked = replace(engine(), reached=replace(ALL, engine_request=0.5))
    apart = sample(asked, [10.0] * 4).seconds - sample(replace(asked, serves=False), [10.0] * 4).seconds
    assert apart == pytest.approx(4 * 0.5)


def test_a_generation_has_its_factor_on_products_alone():
    b200, slower = read_hardware("b200"), replace(ALL, blackwell=0.5)
    batch, layout = Batch.of([4096] * 64), Layout(gpus=8, micro_batch=4096)
    before, after = (pass_time(DENSE, layout, b200, reached, batch) for reached in (ALL, slower))
    assert (after.products, after.attention) == pytest.approx((2 * before.products, 2 * before.attention))
    assert after.elementwise == before.elementwise
    assert pass_time(DENSE, layout, H100, slower, batch) == pass_time(DENSE, layout, H100, ALL, batch)


def test_micro_batches_read_weights_and_add_to_gradients():
    """Twice as many of half the size: 2 bytes forwards, 2 backwards and 8 of a gradient more."""
    batch = Batch.of([4096] * 64)
    few, many = (
        pass_time(DENSE, Layout(gpus=8, micro_batch=size), H100, ALL, batch).elementwise
        for size in (8192, 4096)
    )
    count = weight_count(DENSE)
    assert many - few == pytest.approx(4 * 12 * count.total / 3.35e12)


def test_sharded_weights_are_gathered_over_the_networks_of_whole_nodes():
    """Nothing to compute behind which that could hide: 2 bytes in both passes and 4 of gradients, 4 times."""
    instant = replace(H100, peak_bf16=1e30, memory_bandwidth=1e30)
    layout = Layout(gpus=64, micro_batch=4096, fsdp=True)
    found = pass_time(DENSE, layout, instant, ALL, Batch.of([4096] * 256))
    assert found.data == pytest.approx(4 * 8 * weight_count(DENSE).total * 63 / 64 / 400e9)


def test_speculation_writes_what_it_accepts():
    assert engine(accepted=0.5, drafted=3).per_step() == 1 + 0.5 + 0.25 + 0.125


@pytest.mark.parametrize("mean", [100, 1000, 3900])
def test_lengths_have_the_mean_that_was_asked(mean):
    lengths = log_normal(mean, 4096, 512)
    assert lengths.mean() == pytest.approx(mean, rel=1e-3)
    assert lengths.max() <= 4096
    assert (fixed(5, 3).tolist(), uniform(3, 3).tolist()) == ([5, 5, 5], [1, 3, 5])
    assert recorded([1, 2, 3], 3).tolist() == pytest.approx([4 / 3, 2, 8 / 3])
    with pytest.raises(ValueError, match="not between 1 and the longest"):
        log_normal(5000, 4096, 8)


TASK = Task(responses=log_normal(1000, 4096, 128), count=512, prompt=100, group=8)


def step(**changed):
    given = {
        "layout": Layout(gpus=16, micro_batch=16384),
        "engine": engine(),
        "task": TASK,
        "hardware": H100,
        "reached": ALL,
        "engine_gpus": 16,
        "colocated": True,
    } | changed
    return step_times(DENSE, **given)


def test_stages_of_a_colocated_step_add_up():
    found = step()
    assert found.total == pytest.approx(sum(found.stages().values()))
    assert found.weights == pytest.approx(2 * weight_count(DENSE).total / 450e9)


def test_ahead_of_training_a_step_takes_less_than_its_stages_and_no_less_than_each():
    on_policy, ahead = (
        step(colocated=False, task=replace(TASK, staleness=staleness)) for staleness in (0, 8)
    )
    assert ahead.total < on_policy.total == pytest.approx(sum(on_policy.stages().values()))
    assert ahead.total >= ahead.update + ahead.log_probs


def test_corrections_in_the_stream_wait_for_nobody():
    apart = step(task=replace(TASK, corrections=0.5, streamed=False))
    streamed = step(task=replace(TASK, corrections=0.5))
    assert streamed.corrections < apart.corrections
    assert apart.update == pytest.approx(1.5 * step().update, rel=0.1)


def test_a_loop_takes_longer_than_benchmarks_of_its_parts():
    slower = replace(ALL, loop=1.5)
    alone, within = step(), step(reached=slower, engine=replace(engine(), reached=slower))
    for stage in ("sampling", "log_probs", "update"):
        assert within.stages()[stage] == pytest.approx(1.5 * alone.stages()[stage])
    assert within.weights == alone.weights
    benchmark = Layout(gpus=8, micro_batch=4096), H100
    before, after = (
        pass_time(DENSE, *benchmark, reached, Batch.of([4096] * 64)) for reached in (ALL, slower)
    )
    assert before == after


def test_a_weight_update_sends_what_its_transport_must():
    whole = 2 * weight_count(DENSE).total
    given = {"engine_tensor": 4, "gpus": 32}
    assert update_seconds(DENSE, H100, ALL, transport="gathered", **given) == pytest.approx(whole / 50e9)
    assert update_seconds(DENSE, H100, ALL, transport="resharded", **given) == pytest.approx(whole / 4 / 50e9)
    with pytest.raises(ValueError, match="no transport 'pigeon'"):
        update_seconds(DENSE, H100, ALL, transport="pigeon", **given)


def test_training_waits_for_a_copy_of_what_a_rank_has_on_its_gpu():
    """Two bytes of a weight; four each of master copy and two means, shared by data-parallel ranks."""
    parameters = weight_count(DENSE).total
    rate = H100.host_link * ALL.host
    for layout, held in [
        (Layout(gpus=1, micro_batch=4096), 14),
        (Layout(gpus=8, micro_batch=4096), 2 + 12 / 8),
        (Layout(gpus=8, tensor=2, micro_batch=4096), (2 + 12 / 4) / 2),
        (Layout(gpus=8, offload_optimizer=True, micro_batch=4096), 2),
    ]:
        found = checkpoint_seconds(DENSE, layout, H100, ALL)
        assert found == pytest.approx(held * parameters / rate, rel=1e-3)


RECIPE = Path(__file__).parents[1] / "examples/recipes/qwen3_4b_ibpo.yaml"


def setting(*flags):
    asked = [
        "--config",
        str(RECIPE),
        "--hf-checkpoint",
        str(MODELS / "qwen3_4b"),
        "--dry-run-hardware",
        "h100",
    ]
    return setting_of(parse_config([*asked, *flags]), DENSE, 8)


def test_a_run_is_predicted_with_its_interval_its_price_and_what_would_help():
    asked = setting("--recompute-granularity", "full")
    total = asked.times().total
    said = "\n".join(lines(asked, steps=100, price=2.0))
    hours = total * 100 * 8 / 3600
    assert f"{hours:,.0f} GPU-hours, {2 * hours:,.0f} at 2 an hour" in said
    assert "a step: " in said
    assert "between" in said
    assert "a checkpoint: training waits " in said
    helping = changes(asked)
    assert len(helping) <= 3
    assert all(change.seconds < total for change in helping)
    assert "--recompute-granularity none" in {change.flag for change in changes(asked, most=99)}


def test_a_mean_length_above_the_longest_is_refused():
    with pytest.raises(ValueError, match="--dry-run-response-len=99999 exceeds --rollout-max-response-len"):
        setting("--dry-run-response-len", "99999")


def test_search_finds_layouts_that_fit_fastest_first_and_writes_the_best(tmp_path, capsys):
    asked = ["search", "--gpus", "2", "--hardware", "h200", "--hf-checkpoint", str(MODELS / "qwen3_0_6b")]
    recipe = tmp_path / "best.yaml"
    picture = tmp_path / "step.png"
    asked_for = ["--save", str(recipe), "--picture", str(picture), "--top", "3"]
    assert plan_command([*asked, *asked_for]) == 0
    assert picture.exists()
    out = capsys.readouterr().out.splitlines()
    seconds = [float(line.split()[1]) for line in out[:3]]
    assert seconds == sorted(seconds)
    best = parse_config(["--config", str(recipe)])
    assert f"TP{best.parallel.tensor_model_parallel_size} " in out[0]
    assert (
        plan_command(
            [
                "search",
                "--gpus",
                "1",
                "--hardware",
                "h100",
                "--hf-checkpoint",
                str(MODELS / "qwen3_235b_a22b"),
            ]
        )
        == 2
    )
    assert "no layout of qwen3_235b_a22b fits 1 GPUs of h100" in capsys.readouterr().err


LONG = [
    "--config", str(Path(__file__).parents[1] / "examples/recipes/qwen3_next_80b_a3b_ibpo.yaml"),
    "--hf-checkpoint", str(MODELS / "qwen3_next_80b_a3b"),
    "--rollout-max-context-len", "131072",
    "--rollout-max-response-len", "98304",
]  # fmt: skip


def test_ranks_that_share_sequences_pass_keys_behind_attention_and_states_in_the_open():
    batch = Batch.of([65536] * 8)
    alone, shared = (
        pass_time(HYBRID, Layout(gpus=8, context=ranks, micro_batch=65536), H100, ALL, batch)
        for ranks in (1, 8)
    )
    # of each of 36 delta nets: 15 hops of a state of 32 heads of 128 x 128 in fp32, and the last 3 tokens of
    # 8,192 channels in bf16 of two chunks to 7 ranks; both ways, for 8 sequences
    sent = 2 * 8 * 36 * (15 * 4 * 32 * 128 * 128 + 7 * 2 * 2 * 3 * 8192)
    # and 15 hops and one gather for each of 8 micro-batches, each begun in 11.8 us
    assert shared.context == pytest.approx(sent / 450e9 + 2 * 8 * 36 * 16 * 11.8e-6)
    assert alone.context == 0
    assert shared.attention > alone.attention  # delta nets compute states beside their values
    assert shared.products == pytest.approx(alone.products)
    dense_alone, dense = (
        pass_time(DENSE, Layout(gpus=8, context=ranks, micro_batch=65536), H100, ALL, batch)
        for ranks in (1, 8)
    )
    assert dense.attention == pytest.approx(dense_alone.attention)
    assert dense.context == 0  # 36 layers of keys and values take less than their attention


def test_ranks_that_share_out_heads_exchange_what_delta_nets_take_and_give():
    batch, layout = Batch.of([65536] * 8), Layout(gpus=8, context=8, micro_batch=65536)
    states, heads = (
        pass_time(HYBRID, replace(layout, delta_net_cp=way), H100, ALL, batch) for way in ("state", "heads")
    )
    # of each of 65,536 tokens of a rank 2 x 2,048 of queries and keys, 2 x 4,096 of values and gates, 2 x 32
    # of decay and beta, 4,096 of outputs, in bf16, 7 of 8 to other ranks; both ways
    sent = 2 * 36 * 65536 * 2 * (2 * 2048 + 3 * 4096 + 2 * 32) * 7 / 8
    assert heads.context == pytest.approx(sent / 450e9 + 2 * 2 * 36 * 8 * 11.8e-6)
    assert heads.context > states.context  # sequences are long
    alone = pass_time(HYBRID, Layout(gpus=8, micro_batch=65536), H100, ALL, batch)
    assert heads.attention == pytest.approx(alone.attention)


def test_over_the_network_a_message_begins_later():
    assert H100.start(8) == pytest.approx(11.8e-6)
    assert H100.start(16) == pytest.approx(22.4e-6)


def test_long_sequences_are_shared_where_one_rank_does_not_hold_them():
    found = search(parse_config(LONG), 16, "h100", most=4)
    shared = [layout for layout in found if layout.setting.layout.context > 1]
    assert shared
    for layout in shared:
        parallel = replace(layout.config.parallel, context_parallel_size=1)
        alone = make_plan(replace(layout.config, parallel=parallel), 16, estimate_census)
        assert any(problem.startswith("training takes") for problem in alone.problems)


def test_a_step_is_drawn_with_a_lane_for_each_who_works(tmp_path):
    asked = setting()
    spans, times = timeline(asked), asked.times()
    assert {span.lane for span in spans} <= set(LANES)
    assert {"engines", "corrections", "trainer", "optimizer", "weight update"} <= {s.lane for s in spans}
    ends = {span.name: span.end for span in spans}
    assert ends["responses"] == pytest.approx(times.sampling)
    assert ends["corrections"] == pytest.approx(times.sampling + times.corrections)
    assert max(ends.values()) == pytest.approx(times.total)
    path = tmp_path / "step.png"
    plot_step(spans, LANES, path, title="a step")
    assert matplotlib.image.imread(path).shape[1] > 900


def test_ahead_of_training_engines_and_trainers_are_drawn_side_by_side():
    asked = setting()
    ahead = replace(asked, colocated=False, task=replace(asked.task, staleness=4))
    begins = {span.name: span.begin for span in timeline(ahead)}
    assert begins["log-probs"] == begins["prompts"] == 0
    ends = {span.name: span.end for span in timeline(ahead)}
    assert max(ends["corrections"], ends["optimizer"]) <= begins["weight update"] * (1 + 1e-9)
    assert ends["other"] == pytest.approx(ahead.times().total)
