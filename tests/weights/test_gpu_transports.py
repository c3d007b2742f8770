"""Trainer ranks, engines and vLLM's packed transfers are the real ones; NCCL, CUDA's memory handles and
streams are stand-ins (`transfer_stand_ins`). Not run on GPUs."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing import reductions

from megatron_ibpo.engines import Engine
from megatron_ibpo.engines.registry import TRANSPORTS
from megatron_ibpo.engines.vllm.settings import engine_settings
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.weights import WeightPlanError
from megatron_ibpo.weights.transfer.link import UpdateOrder
from megatron_ibpo.weights.transfer.update import open_transport, update_engines
from support import engine_runs, transfer_stand_ins
from support.engine_runs import TIMEOUT, WORLD, CheckpointSource
from support.paths import TESTS
from support.tiny_models import make_qwen3
from support.weight_sources import DividedWeights

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def open_stood_in(world, transport, workers=1, bucket_bytes=100_000):
    transfer_stand_ins.install()
    path = TRANSPORTS[transport]
    return open_transport(path, world, workers_per_engine=workers, bucket_bytes=bucket_bytes, timeout=60)


def failures_of_update(transport, world, source, version, links, engines):
    order = UpdateOrder(version=version, sleeping=False, check=True, timeout=60.0)
    return update_engines(transport, world, source, order, links, engines).failures


def start(checkpoint, log, transport, dies_at=0):
    folders = [str(TESTS / "support/engine_stand_ins"), str(TESTS)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    os.environ[transfer_stand_ins.DIE_AT] = str(dies_at)
    rollout = engine_runs.make_config(log.parent, "float32").rollout
    settings = engine_settings(
        rollout, checkpoint, read_hf_config(checkpoint), "gloo", gpus=(), num_threads=1
    )
    engine = Engine(replace(settings, transport=transport), log)
    engine.wait_ready(TIMEOUT)
    return engine


def whose(checkpoints, engine, version):
    requests = engine_runs.make_requests(8)
    samples = engine.generate(requests, version=version, timeout=TIMEOUT)
    references = [engine_runs.reference_logprobs(path, requests, samples) for path in checkpoints]
    own = [sample.logprobs for sample in samples]
    (found,) = [n for n, known in enumerate(references) if engine_runs.difference(own, known).max() < 2e-5]
    return found


@pytest.fixture
def checkpoints(tmp_path):
    return [make_qwen3(tmp_path / str(seed), seed) for seed in (0, 1)]


# seven buckets and more are an update
@pytest.mark.world(2)
@pytest.mark.parametrize("dies_at", [15, transfer_stand_ins.AT_MEETING])
def test_an_engine_that_dies_over_nccl_hangs_nobody(world, tmp_path, checkpoints, dies_at):
    """Rank r owns engine r. Engine 1 dies at its so many-th bucket and is replaced for the third update."""
    source, others = CheckpointSource(checkpoints[0], world), CheckpointSource(checkpoints[1]).tensors
    transport, log = open_stood_in(world, "nccl"), tmp_path / f"{world.rank}.log"
    links = {world.rank: start(checkpoints[0], log, "nccl", dies_at * world.rank)}
    failures, weights = [], []
    try:
        transport.connect(source, links, [0, 1])
        for version in (1, 2, 3):  # the trainers' weights change: to the others, back, to the others
            source.tensors, others = others, source.tensors
            if version == 3:
                if world.rank == 1:
                    links[1] = start(checkpoints[0], log, "nccl")
                transport.connect(source, links if world.rank == 1 else {}, [1])
            failures.append(failures_of_update(transport, world, source, version, links, [0, 1]))
            if links[world.rank].is_alive():
                weights.append(whose(checkpoints, links[world.rank], version))
    finally:
        links[world.rank].close()
    if world.is_rank_0:
        assert (failures, weights) == ([{}, {}, {}], [1, 0, 1])
    else:
        assert [list(failed) for failed in failures] == [[] if dies_at > 0 else [1], [1], []]
        assert "exit status 9" in str(failures[1][1])
        assert weights == ([1, 1] if dies_at > 0 else [1])


@pytest.mark.world(2)
def test_colocated_engines_get_the_weights_and_say_which_are_missing(world, tmp_path, checkpoints):
    """Rank r owns engine r on its GPU. Weights that change, an update that is not whole, and one after it."""
    os.environ[transfer_stand_ins.GPU] = f"GPU {world.rank}"
    transport, projection = open_stood_in(world, "ipc"), "model.layers.1.self_attn.k_proj.weight"
    of_first, of_second = (CheckpointSource(path, world) for path in checkpoints)
    lacking = CheckpointSource(checkpoints[0], world)
    del lacking.tensors[projection]
    engine = start(checkpoints[0], tmp_path / f"{world.rank}.log", "ipc")

    def updated(version, source):
        transport.connect(source, {world.rank: engine}, [0, 1])
        assert failures_of_update(transport, world, source, version, {world.rank: engine}, [0, 1]) == {}
        return whose(checkpoints, engine, version)

    try:
        assert updated(1, of_second) == 1
        with pytest.raises(WeightPlanError, match=r"a part of model\.layers\.1\.self_attn\.qkv_proj"):
            updated(2, lacking)
        assert updated(3, of_first) == 0
        assert transfer_stand_ins.RELEASED == []  # the engines let go of what they opened
        alone = {0: engine} if world.rank == 0 else {}
        assert failures_of_update(transport, world, of_first, 4, alone, [0]) == {}
        assert len(transfer_stand_ins.RELEASED) == world.rank, "this update went to the first engine alone"
    finally:
        engine.close()


@pytest.mark.world(1)
def test_bytes_taken_by_engines_from_trainers_gpus_are_counted(world):
    """Tensors of 24 and 64 bytes, whole for each of four workers, two of either engine."""
    handed = []

    def begin(method, *arguments):
        if method == "update_weights":
            handed.append(arguments[0]["names"])

    os.environ[transfer_stand_ins.GPU] = "GPU 0"
    source = DividedWeights({"a": torch.ones(6), "b": torch.ones(4, 4)}, rank=0, size=1)
    transport = open_stood_in(world, "ipc", workers=2, bucket_bytes=100)
    engine = SimpleNamespace(begin=begin, result=lambda timeout: None)
    transport.connect(source, {0: engine, 1: engine}, [0, 1])
    order = UpdateOrder(version=1, sleeping=False, check=True, timeout=60.0)
    sent = transport.send(source, {0: engine, 1: engine}, [0, 1], order)
    assert sorted(name for names in handed for name in names) == ["a", "a", "b", "b"]
    assert (sent.failures, sent.needed_bytes, sent.num_bytes) == ({}, 2 * 88, 4 * 88)
    assert list(sent.sums) == ["a", "b"]
    assert sent.waits[0] == 2, "a bucket each"


@pytest.mark.parametrize("lacks", ["the use count", "its release"])
def test_an_unknown_torch_memory_sharing_is_refused_at_start(monkeypatch, lacks):
    from megatron_ibpo.engines.vllm.gpu_transports import IpcTransport

    if lacks == "the use count":
        monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda handle, size: None)
    else:
        monkeypatch.setattr(torch, "UntypedStorage", object)
    with pytest.raises(RuntimeError, match=r"lends GPU memory .* in an unknown way.*--no-colocate"):
        IpcTransport(WORLD, workers_per_engine=1, bucket_bytes=100, timeout=1.0)
