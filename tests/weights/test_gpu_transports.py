"""Engines on GPUs get exact and whole weights, and over NCCL the death of one hangs no other.

Trainer ranks, engines and vLLM's packed transfers are the real ones; NCCL, CUDA's memory handles and streams
are stand-ins (`transfer_stand_ins`). Not run on GPUs.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ibpo.basics.records import Sample, SampleRequest
from megatron_ibpo.engines import Engine
from megatron_ibpo.engines.vllm.settings import engine_settings
from megatron_ibpo.weights.transfer.link import Sent
from megatron_ibpo.weights.transfer.update_order import TransportName, UpdateOrder
from megatron_ibpo.weights.weight_errors import WeightPlanError
from support.engine_runs import (
    TIMEOUT,
    CheckpointSource,
    difference,
    make_config,
    make_requests,
    reference_logprobs,
)
from support.paths import TESTS
from support.ranks import run_ranks
from support.tiny_models import make_qwen3
from support.transfer_stand_ins import AT_MEETING
from support.weight_sources import DividedWeights

pytestmark = [pytest.mark.world, pytest.mark.engine]


def start(checkpoint: Path, log: Path, transport: TransportName, dies_at: int = 0) -> Engine:
    """An engine on a CPU that takes weights over `transport`. It dies at its so many-th bucket over nccl."""

    from support import transfer_stand_ins

    folders = [str(TESTS / "support/engine_stand_ins"), str(TESTS)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    os.environ[transfer_stand_ins.DIE_AT] = str(dies_at)
    settings = engine_settings(
        make_config(log.parent, "float32").rollout, checkpoint, "gloo", gpus=(), num_threads=1
    )
    return Engine(replace(settings, transport=transport), log)


def whose(checkpoints: list[str], requests: list[SampleRequest], samples: list[Sample]) -> int | None:
    """Return the index of the checkpoint whose weights gave the samples."""
    for number, checkpoint in enumerate(checkpoints):
        reference = reference_logprobs(Path(checkpoint), requests, samples)
        if difference([sample.logprobs for sample in samples], reference).max() < 2e-5:
            return number
    return None


def two_engines_of_which_one_dies(
    world: Any, checkpoints: list[str], folder: str, dies_at: int
) -> dict[str, Any]:
    """Rank r owns engine r. Engine 1 dies at its so many-th bucket and is replaced for the third update."""
    from support import transfer_stand_ins

    transfer_stand_ins.install()
    from megatron_ibpo.weights.transfer.update import open_transport, update_engines

    source = CheckpointSource(Path(checkpoints[0]), world)
    others = CheckpointSource(Path(checkpoints[1])).tensors
    transport = open_transport("nccl", world, workers_per_engine=1, bucket_bytes=100_000, timeout=60.0)
    log = Path(folder) / f"{world.rank}.log"
    links = {world.rank: start(Path(checkpoints[0]), log, "nccl", dies_at * world.rank)}
    found: dict[str, Any] = {"failures": [], "weights": []}
    try:
        links[world.rank].wait_ready(TIMEOUT)
        transport.connect(source, links, [0, 1])
        for version in (1, 2, 3):  # the trainers' weights change: to the others, back, to the others
            source.tensors, others = others, source.tensors
            if version == 3 and world.rank == 1:
                links[1] = start(Path(checkpoints[0]), log, "nccl")
                links[1].wait_ready(TIMEOUT)
            if version == 3:
                transport.connect(source, links if world.rank == 1 else {}, [1])
            order = UpdateOrder(version=version, sleeping=False, check=True, timeout=60.0)
            sent = update_engines(transport, world, source, order, links, [0, 1])
            found["failures"].append({engine: str(error) for engine, error in sent.failures.items()})
            if links[world.rank].is_alive():
                requests = make_requests(8)
                samples = links[world.rank].generate(requests, version=version, timeout=TIMEOUT)
                found["weights"].append(whose(checkpoints, requests, samples))
    finally:
        links[world.rank].close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dies_at", [15, AT_MEETING])  # seven buckets and more are an update
def test_an_engine_that_dies_over_nccl_hangs_nobody_and_the_others_get_the_weights(
    tmp_path: Path, dies_at: int
) -> None:
    checkpoints = [str(make_qwen3(tmp_path / str(seed), seed)) for seed in (0, 1)]
    arguments = (checkpoints, str(tmp_path), dies_at)
    well, dying = run_ranks(two_engines_of_which_one_dies, 2, *arguments, timeout=300)
    assert well["failures"] == [{}, {}, {}]
    assert well["weights"] == [1, 0, 1]
    first, second, third = dying["failures"]
    assert (list(first), list(second), third) == ([] if dies_at > 0 else [1], [1], {})
    assert "exit status 9" in second[1]
    assert dying["weights"] == ([1, 1] if dies_at > 0 else [1])


def engines_on_the_trainers_gpus(world: Any, checkpoints: list[str], folder: str) -> list[Any]:
    """Rank r owns engine r on its GPU. Weights that change, an update that is not whole, and one after it."""
    from support import transfer_stand_ins

    os.environ[transfer_stand_ins.GPU] = f"GPU {world.rank}"
    transfer_stand_ins.install()
    from megatron_ibpo.weights.transfer.update import open_transport, update_engines

    source = CheckpointSource(Path(checkpoints[1]), world)
    others = CheckpointSource(Path(checkpoints[0])).tensors
    transport = open_transport("ipc", world, workers_per_engine=1, bucket_bytes=100_000, timeout=60.0)
    engine = start(Path(checkpoints[0]), Path(folder) / f"{world.rank}.log", "ipc")
    found: list[Any] = []
    try:
        engine.wait_ready(TIMEOUT)

        def update(version: int) -> int | None:
            order = UpdateOrder(version=version, sleeping=False, check=True, timeout=60.0)
            transport.connect(source, {world.rank: engine}, [0, 1])
            sent = update_engines(transport, world, source, order, {world.rank: engine}, [0, 1])
            assert sent.failures == {}
            requests = make_requests(8)
            return whose(checkpoints, requests, engine.generate(requests, version=version, timeout=TIMEOUT))

        found.append(update(1))
        source.tensors, others = others, source.tensors
        lacking = source.tensors.pop("model.layers.1.self_attn.k_proj.weight")
        try:
            update(2)
        except WeightPlanError as error:
            found.append(str(error))
        source.tensors["model.layers.1.self_attn.k_proj.weight"] = lacking
        found.append(update(3))
        assert transfer_stand_ins.RELEASED == []  # the engines let go of what they opened
        alone = {0: engine} if world.rank == 0 else {}
        order = UpdateOrder(version=4, sleeping=False, check=True, timeout=60.0)
        assert update_engines(transport, world, source, order, alone, [0]).failures == {}
        found.append(len(transfer_stand_ins.RELEASED))
    finally:
        engine.close()
    return found


class Taker:
    """An engine that takes whatever it is handed."""

    def __init__(self) -> None:
        self.handed: list[str] = []

    def begin(self, method: str, *arguments: Any) -> None:
        if method == "update_weights":
            self.handed += arguments[0]["names"]

    def result(self, timeout: float) -> None:
        pass


def lent_to_two(world: Any) -> tuple[Sent, list[str], list[str]]:
    """What one trainer says that it sent to two engines of two workers, and what it handed to each."""
    from support import transfer_stand_ins

    os.environ[transfer_stand_ins.GPU] = "GPU 0"
    transfer_stand_ins.install()
    from megatron_ibpo.weights.transfer.update import open_transport

    source = DividedWeights({"a": torch.ones(6), "b": torch.ones(4, 4)}, rank=0, size=1)
    transport = open_transport("ipc", world, workers_per_engine=2, bucket_bytes=100, timeout=60.0)
    engines = {0: Taker(), 1: Taker()}
    transport.connect(source, engines, [0, 1])
    sent = transport.send(source, engines, [0, 1], check=True)
    return sent, engines[0].handed, engines[1].handed


@pytest.mark.slow  # vLLM is imported, for ten seconds
def test_what_engines_take_from_the_trainers_gpus_is_counted() -> None:
    """Tensors of 24 and 64 bytes, whole for each of four workers."""
    ((sent, *handed),) = run_ranks(lent_to_two, 1)
    assert handed == [["a", "b"]] * 2
    assert (sent.failures, sent.needed_bytes, sent.num_bytes) == ({}, 2 * 88, 4 * 88)
    assert list(sent.sums) == ["a", "b"]


@pytest.mark.slow
def test_colocated_engines_get_the_weights_and_say_which_are_missing(tmp_path: Path) -> None:
    checkpoints = [str(make_qwen3(tmp_path / str(seed), seed)) for seed in (0, 1)]
    ranks = run_ranks(engines_on_the_trainers_gpus, 2, checkpoints, str(tmp_path), timeout=300)
    for rank, (first, said, third, taken_back) in enumerate(ranks):
        assert (first, third) == (1, 0)
        assert taken_back == rank  # the last update went to the first engine alone
        assert "did not bring a part of model.layers.1.self_attn.qkv_proj" in said
