"""The processes of a run are placed as planned on paper."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ibpo.cluster.placement import Engines, Node, PlacementError, plan_placement
from megatron_ibpo.config import Config, RolloutConfig
from megatron_ibpo.run import on_cluster


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


def test_engines_of_their_own_take_the_nodes_without_trainers_first_as_a_table_says():
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


@pytest.mark.parametrize(
    ("nodes", "trainers", "engines", "words"),
    [
        (gpus(8, 8), 32, Engines(1, colocate=True), ["--num-trainers 32", "16 GPUs", "10.0.0.1: 8"]),
        (gpus(8), 8, Engines(3, colocate=True), ["--rollout-num-gpus-per-engine 3", "10.0.0.0: 8"]),
        (gpus(8), 8, Engines(1, colocate=False), ["--no-colocate", "room for 0 of 8 engines"]),
        (gpus(8, 8), 8, own(3, 8), ["--rollout-num-gpus 8", "multiple"]),
        (cpus(1), 2, None, ["--num-trainers 2", "1 CPUs"]),
        (cpus(3), 2, own(1, 2), ["--rollout-num-gpus 2", "2 trainers there is room for 1 of 2 engines"]),
    ],
)
def test_what_does_not_fit_is_refused_with_what_there_is(nodes, trainers, engines, words):
    with pytest.raises(PlacementError) as refused:
        placed(nodes, trainers, engines)
    for word in words:
        assert word in str(refused.value)


@given(
    counts=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    trainers=st.integers(1, 16),
    size=st.integers(1, 4),
    num_engines=st.integers(1, 6),
)
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


@pytest.mark.parametrize(
    ("count", "size", "trainers", "engines"), [(8, 2, 4, 2), (6, 2, 4, 1), (3, 1, 2, 1), (5, 4, 1, 1)]
)
def test_without_a_number_engines_of_their_own_get_half_of_the_gpus_as_far_as_whole_engines_go(
    count, size, trainers, engines, monkeypatch
):
    monkeypatch.setattr(on_cluster, "cluster_nodes", lambda: gpus(count))
    asked = RolloutConfig(colocate=False, rollout_num_gpus_per_engine=size)
    placement = on_cluster._placed(Config(rollout=asked))
    assert (len(placement.trainers), where(placement.engines)) == (trainers, [(0, size)] * engines)
