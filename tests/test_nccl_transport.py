"""Engines on other GPUs than the trainers' get exact weights over NCCL, and one that dies hangs nobody.

Trainer ranks, engines and vLLM's packed transfer are the real ones; NCCL and CUDA's streams are stand-ins
over gloo (`nccl_stand_in`). Not run on GPUs.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from test_engine import (
    TIMEOUT,
    CheckpointSource,
    difference,
    make_config,
    make_requests,
    reference_logprobs,
)
from tiny_models import make_qwen3

from megatron_ibpo.records import Sample, SampleRequest
from megatron_ibpo.rollout import Engine
from megatron_ibpo.rollout.settings import engine_settings
from megatron_ibpo.weights.transfer.order import Order


def start(checkpoint: Path, log: Path, dies_at: int = 0) -> Engine:
    """An engine on a CPU that takes weights over nccl. It dies at its so many-th bucket."""

    import nccl_stand_in

    folders = [str(Path(__file__).parent / "engine_stand_ins"), str(Path(__file__).parent)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    os.environ[nccl_stand_in.DIE_AT] = str(dies_at)
    settings = engine_settings(
        make_config(log.parent, "float32").rollout, checkpoint, "gloo", gpus=(), num_threads=1
    )
    return Engine(replace(settings, transport="nccl"), log)


def whose(checkpoints: list[str], requests: list[SampleRequest], samples: list[Sample]) -> int | None:
    """Which checkpoint's weights the samples are of."""
    for number, checkpoint in enumerate(checkpoints):
        reference = reference_logprobs(Path(checkpoint), requests, samples)
        if difference([sample.logprobs for sample in samples], reference).max() < 2e-5:
            return number
    return None


def two_engines_of_which_one_dies(world: Any, checkpoints: list[str], folder: str) -> dict[str, Any]:
    """Rank r owns engine r. Engine 1 dies in the second update and is replaced for the third."""
    import nccl_stand_in

    nccl_stand_in.install()
    from megatron_ibpo.weights.transfer.update import open_transport, update_engines

    source = CheckpointSource(Path(checkpoints[0]), world)
    others = CheckpointSource(Path(checkpoints[1])).tensors
    transport = open_transport("nccl", world, workers_per_engine=1, bucket_bytes=100_000, timeout=60.0)
    # seven buckets at most in the first update
    links = {world.rank: start(Path(checkpoints[0]), Path(folder) / f"{world.rank}.log", 15 * world.rank)}
    found: dict[str, Any] = {"failures": [], "weights": []}
    try:
        links[world.rank].wait_ready(TIMEOUT)
        transport.connect(source, links, [0, 1])
        for version in (1, 2, 3):  # the trainers' weights change: to the others, back, to the others
            source.tensors, others = others, source.tensors
            if version == 3 and world.rank == 1:
                links[1] = start(Path(checkpoints[0]), Path(folder) / "1 again.log")
                links[1].wait_ready(TIMEOUT)
            if version == 3:
                transport.connect(source, links if world.rank == 1 else {}, [1])
            order = Order(version=version, sleeping=False, check=True, timeout=60.0)
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
def test_an_engine_that_dies_over_nccl_hangs_nobody_and_the_others_get_the_weights(tmp_path: Path) -> None:
    checkpoints = [str(make_qwen3(tmp_path / str(seed), seed)) for seed in (0, 1)]
    well, dying = run_ranks(two_engines_of_which_one_dies, 2, checkpoints, str(tmp_path), timeout=300)
    assert well["failures"] == [{}, {}, {}]
    assert [list(failed) for failed in dying["failures"]] == [[], [1], []]
    assert "exit status 9" in dying["failures"][1][1]
    assert well["weights"] == [1, 0, 1]
    assert dying["weights"] == [1, 1]
