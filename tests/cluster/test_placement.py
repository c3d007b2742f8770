"""The processes of a run are placed as planned on paper, if each node has the memory for its own."""

import re
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ibpo.cluster import reservation
from megatron_ibpo.cluster.placement import Engines, Node, PlacementError, main_memory, plan_placement
from megatron_ibpo.config import Config, ParallelConfig, RolloutConfig
from megatron_ibpo.engines.registry import on_device
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.plan.feasibility import check_main_memory
from megatron_ibpo.weights.layout.export import checkpoint_entries, metadata_of
from support.paths import ROOT
from support.published_recipes import NEXT_80B, configured


def gpus(*counts):
    return [Node(f"id{i}", f"10.0.0.{i}", cpus=16, gpus=count) for i, count in enumerate(counts)]


def cpus(count):
    return [Node(f"id{i}", f"10.0.0.{i}", cpus=1, gpus=0) for i in range(count)]


def own(size, count):
    return Engines(size, colocate=False, num_gpus=count)


def placed(nodes, trainers, engines):
    return plan_placement(nodes, num_trainers=trainers, engines=engines, on_gpu=nodes[0].gpus > 0)


def where(slots):
    return [(slot.node, slot.gpus) for slot in slots]


def test_colocated_engines_share_the_gpus_of_consecutive_trainers():
    placement = placed(gpus(4, 4), 8, Engines(2, colocate=True))
    assert where(placement.trainers) == [(0, 1)] * 4 + [(1, 1)] * 4
    assert where(placement.engines) == [(0, 0), (0, 0), (1, 0), (1, 0)]
    assert placement.partners == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert placement.owners == [0, 2, 4, 6]


def test_separate_engines_take_nodes_without_trainers_first():
    placement = placed(gpus(8, 8), 8, own(4, 8))
    assert where(placement.trainers) == [(0, 1)] * 8
    assert where(placement.engines) == [(1, 4), (1, 4)]
    assert not placement.spans_nodes(0)
    assert (placement.partners, placement.owners) == ([(), ()], [0, 1])
    assert placement.rows() == [("10.0.0.0", "0-7", "–"), ("10.0.0.1", "–", "0-1")]
    larger = placed(gpus(8, 8, 8), 8, own(16, 16))  # than a node: its GPUs are left to vLLM's own Ray
    assert where(larger.engines) == [(1, 0)]
    assert larger.spans_nodes(0)
    alone = placed(gpus(4, 2), 0, own(2, 6))
    assert where(alone.engines) == [(0, 2), (0, 2), (1, 2)]
    on_cpus = placed(cpus(3), 2, own(1, 1))
    assert (where(on_cpus.trainers), where(on_cpus.engines)) == ([(0, 0), (1, 0)], [(2, 0)])


def test_a_placement_that_does_not_fit_is_refused_with_details():
    for nodes, trainers, engines, words in (
        (gpus(8, 8), 32, Engines(1, colocate=True), ["--num-trainers 32", "16 GPUs", "10.0.0.1: 8"]),
        (gpus(8), 8, Engines(3, colocate=True), ["--rollout-num-gpus-per-engine 3", "10.0.0.0: 8"]),
        (gpus(8), 8, Engines(1, colocate=False), ["--no-colocate", "room for 0 of 8 engines"]),
        (gpus(8, 8), 8, own(3, 8), ["--rollout-num-gpus 8", "multiple"]),
        (cpus(1), 2, None, ["--num-trainers 2", "1 CPUs"]),
        (cpus(3), 2, own(1, 2), ["--rollout-num-gpus 2", "2 trainers there is room for 1 of 2 engines"]),
    ):
        with pytest.raises(PlacementError) as refused:
            placed(nodes, trainers, engines)
        assert all(word in str(refused.value) for word in words), refused.value


@given(st.lists(st.integers(0, 8), min_size=1, max_size=5), *(st.integers(1, most) for most in (16, 4, 6)))
def test_no_gpu_is_given_away_twice(counts, trainers, size, num_engines):
    engines = own(size, num_engines * size)
    try:
        placement = plan_placement(gpus(*counts), num_trainers=trainers, engines=engines, on_gpu=True)
    except PlacementError:
        return
    assert len(placement.trainers) == trainers
    assert len(placement.engines) == num_engines
    for index, node in enumerate(placement.nodes):
        slots = [*placement.trainers, *placement.engines]
        assert sum(slot.gpus for slot in slots if slot.node == index) <= node.gpus


def test_separate_engines_get_half_of_the_gpus_by_default(monkeypatch):
    """Rounded down to whole engines."""
    for count, size, trainers, engines in ((8, 2, 4, 2), (6, 2, 4, 1), (3, 1, 2, 1), (5, 4, 1, 1)):
        monkeypatch.setattr(reservation, "cluster_nodes", lambda count=count: gpus(count))
        asked = RolloutConfig(colocate=False, rollout_num_gpus_per_engine=size)
        placement = reservation.place_run(Config(rollout=asked))
        assert (len(placement.trainers), where(placement.engines)) == (trainers, [(0, size)] * engines)


# --- main memory

GIB = 1024**3


def elements_of(model):
    return {
        meta.name: meta.num_bytes // 2
        for meta in metadata_of(checkpoint_entries(read_hf_config(model), 0), torch.bfloat16)
    }


def test_a_node_with_too_little_memory_is_named():
    """Four nodes of eight GPUs. One pipeline stage a node, a quarter of the model; a stage without embeddings
    has less."""
    config = on_device(configured(NEXT_80B), read_hf_config(NEXT_80B), on_gpu=True)
    elements = elements_of(NEXT_80B)
    placement = placed(gpus(8, 8, 8, 8), 32, Engines(tensor_parallel_size=8, colocate=True))
    shape = read_hf_config(NEXT_80B)
    arguments = (config, shape, placement)
    enough = dict.fromkeys(range(4), 1000 * GIB)
    check_main_memory(*arguments, enough)
    config.run.save = False
    with pytest.raises(ValueError, match="main memory") as refused:
        check_main_memory(*arguments, enough | {2: 300 * GIB})
    said = str(refused.value)
    assert said.startswith("10.0.0.2 has 300.0 GiB of main memory, and this run needs at least ")
    layers = sum(count for name, count in elements.items() if ".layers." in name)
    optimizer = float(said.partition("; the optimizer ")[2].partition(";")[0])
    # norms and routers are on every tensor-parallel rank
    assert 1 <= optimizer / (16 * layers / 4 / GIB) < 1.002
    assert "--no-optimizer-cpu-offload keeps the optimizer's state on the GPUs" in said
    assert said.count("10.0.0.") == 1, "the others have enough"
    config.optimizer.optimizer_cpu_offload = config.rollout.offload_train = False
    check_main_memory(config, shape, placement, dict.fromkeys(range(4), 4 * GIB))


def test_on_cpus_trainers_and_engines_are_in_main_memory_themselves(models):
    """Four bytes a parameter of weights, of gradients and of each of Adam's means, and of an engine."""

    def on_cpus(model, **config) -> tuple[Config, Any, Any]:
        shape = read_hf_config(model)
        return on_device(Config(**config), shape, on_gpu=False), shape, placed(cpus(3), 2, own(1, 1))

    arguments = on_cpus(ROOT / "examples/models/qwen3_0_6b")
    parameters = sum(elements_of(ROOT / "examples/models/qwen3_0_6b").values())
    trainer = 16 * parameters + parameters * 12 // 2  # and half of a checkpoint
    engine = 4 * parameters + 512 * 1024**2
    with pytest.raises(ValueError, match="main memory") as refused:
        check_main_memory(*arguments, dict.fromkeys(range(3), GIB))
    needs = [float(found) for found in re.findall(r"at least ([\d.]+)", str(refused.value))]
    assert needs == pytest.approx([trainer / GIB + 0.4] * 2 + [engine / GIB + 0.5], abs=0.1)
    check_main_memory(*arguments, {0: trainer + GIB, 1: trainer + GIB, 2: engine + GIB})
    for tiny in models.values():
        little = dict.fromkeys(range(3), 3 * GIB // 2)
        check_main_memory(*on_cpus(tiny, parallel=ParallelConfig()), little)


@pytest.mark.parametrize(
    ("group", "file"),
    [("4:memory:/a/b\n1:cpu:/\n", "memory/{}memory.limit_in_bytes"), ("0::/a/b\n", "{}memory.max")],
)
def test_main_memory_is_the_smallest_limit_of_the_control_groups(tmp_path, group, file):
    assert main_memory(tmp_path, tmp_path / "none") == psutil.virtual_memory().total
    (tmp_path / "cgroup").write_text(group)
    limits = {"": "9223372036854771712", "a/": "3000000"}
    for own, least in (("max", 3_000_000), ("2000000", 2_000_000)):
        for place, limit in (limits | {"a/b/": own}).items():
            path = tmp_path / file.format(place)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(limit + "\n")
        assert main_memory(tmp_path, tmp_path / "cgroup") == least
