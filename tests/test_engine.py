"""Engines sample what they are asked, take new weights exactly, and leave nothing behind when they end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_models import EOS_ID, make_qwen3, make_qwen3_next

from megatron_ibpo.config import Config
from megatron_ibpo.records import Response, SampleRequest
from megatron_ibpo.rollout import Engine, EngineDiedError, EngineError, EnginePool, EngineStartError
from megatron_ibpo.rollout.placement import EnginePlace, place_engines
from megatron_ibpo.rollout.pool import _shares
from megatron_ibpo.rollout.settings import engine_settings, read_eos_token_ids
from megatron_ibpo.weights.layout.regions import whole
from megatron_ibpo.weights.layout.weight_source import Box, Region, TensorMeta
from megatron_ibpo.weights.transfer import gloo
from megatron_ibpo.weights.transfer.errors import WeightMismatchError, WeightPlanError
from megatron_ibpo.weights.transfer.open import open_transport
from megatron_ibpo.weights.transfer.order import Order, choose_transport
from megatron_ibpo.weights.transfer.update import update_engines
from megatron_ibpo.world import World

CONTEXT = 256


class CheckpointSource:
    """The weights of a checkpoint, offered as a trainer offers its own: in shards, one a rank, where a
    tensor's rows can be divided."""

    def __init__(self, directory: Path, world: World | None = None) -> None:
        self.tensors = load_file(directory / "model.safetensors")
        self.rank, self.size = (0, 1) if world is None else (world.rank, world.size)

    def metadata(self) -> list[TensorMeta]:
        return [TensorMeta(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]

    def regions(self) -> list[tuple[Region, ...]]:
        return [
            tuple(Region(box, (rank,)) for rank, box in enumerate(self.shards(tensor)))
            for tensor in self.tensors.values()
        ]

    def local(self) -> Iterator[dict[Box, torch.Tensor]]:
        for tensor in self.tensors.values():
            boxes = self.shards(tensor)
            if self.rank < len(boxes):
                (start, stop), *_ = boxes[self.rank]
                yield {boxes[self.rank]: tensor[start:stop]}
            else:
                yield {}

    def shards(self, tensor: torch.Tensor) -> list[Box]:
        parts = self.size if len(tensor) % self.size == 0 else 1
        rows = len(tensor) // parts
        return [((part * rows, (part + 1) * rows), *whole(tensor.shape[1:])) for part in range(parts)]


def make_config(run_dir: Path, dtype: str) -> Config:
    config = Config()
    config.run.run_dir = run_dir
    config.rollout.rollout_max_context_len = CONTEXT
    config.rollout.vllm_dtype = dtype  # type: ignore[assignment]
    config.rollout.vllm_kv_cache_bytes = 128 * 1024**2
    config.rollout.update_weight_buffer_size = 100_000  # several buckets
    config.rollout.check_weight_update_equal = True
    return config


def make_requests(count: int, *, seed: int = 0, temperature: float = 1.0) -> list[SampleRequest]:
    draw = random.Random(seed)
    return [
        SampleRequest(
            tuple(draw.randrange(2, 64) for _ in range(draw.randint(3, 20))),
            seed=100 * seed + number,
            max_tokens=draw.randint(1, 40),
            temperature=temperature,
        )
        for number in range(count)
    ]


def reference_logprobs(
    directory: Path, requests: Sequence[SampleRequest], responses: Sequence[Response]
) -> list[list[float]]:
    """What transformers in float32 says of the sampled tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for request, response in zip(requests, responses, strict=True):
        ids = torch.tensor([[*request.prompt_token_ids, *response.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.prompt_token_ids) - 1 : -1]
        logprobs = (logits / request.temperature).log_softmax(-1)
        chosen = torch.tensor(response.token_ids)
        found.append(logprobs.gather(1, chosen[:, None])[:, 0].tolist())
    return found


def difference(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> torch.Tensor:
    return torch.cat([(torch.tensor(a) - torch.tensor(b)).abs() for a, b in zip(ours, theirs, strict=True)])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    made = {f"dense {seed}": make_qwen3(root / f"dense{seed}", seed) for seed in (0, 1)}
    return made | {f"next {seed}": make_qwen3_next(root / f"next{seed}", seed) for seed in (0, 1)}


# --- plain functions ---------------------------------------------------------------------------------


def test_every_group_of_ranks_has_an_engine_on_its_own_gpus() -> None:
    assert place_engines(8, 2, local_world_size=4, colocate=True, on_gpu=True) == [
        EnginePlace(0, 0, (0, 1)),
        EnginePlace(1, 2, (2, 3)),
        EnginePlace(2, 4, (0, 1)),
        EnginePlace(3, 6, (2, 3)),
    ]


def test_separate_engines_take_the_gpus_after_the_trainers() -> None:
    assert place_engines(4, 4, local_world_size=4, colocate=False, on_gpu=True) == [
        EnginePlace(0, 0, (4, 5, 6, 7))
    ]


def test_engines_on_cpus_have_no_gpus() -> None:
    assert [place.gpus for place in place_engines(2, 1, local_world_size=2, colocate=True, on_gpu=False)] == [
        (),
        (),
    ]


def test_an_engine_must_lie_within_a_machine() -> None:
    with pytest.raises(ValueError, match="--rollout-num-gpus-per-engine 8: an engine must lie within one"):
        place_engines(8, 8, local_world_size=4, colocate=True, on_gpu=True)


def test_transport_follows_the_devices() -> None:
    assert choose_transport(on_gpu=False, colocate=True) == "gloo"
    assert choose_transport(on_gpu=True, colocate=True) == "ipc"
    assert choose_transport(on_gpu=True, colocate=False) == "nccl"


@given(count=st.integers(0, 50), engines=st.integers(1, 6))
def test_shares_are_contiguous_and_even(count: int, engines: int) -> None:
    requests = list(range(count))
    shares = _shares(requests, engines)  # type: ignore[arg-type]
    assert [item for index in sorted(shares) for item in shares[index]] == requests
    sizes = [len(share) for share in shares.values()]
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_end_of_sequence_comes_from_the_generation_config_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert read_eos_token_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read_eos_token_ids(tmp_path) == (5, 6)


def test_a_checkpoint_without_end_of_sequence_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="names eos_token_id"):
        read_eos_token_ids(tmp_path)


# --- one dense engine in float32 ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = make_config(tmp_path_factory.mktemp("dense"), "float32")
    world = World(0, 1, 0, torch.device("cpu"), None)
    with EnginePool(config, world, checkpoints["dense 0"]) as pool:
        pool.start()
        yield pool
    torch.set_num_threads(threads)


def test_responses_have_the_asked_form(dense: EnginePool) -> None:
    requests = make_requests(60)
    responses = dense.generate(requests)
    assert {response.finish_reason for response in responses} == {"stop", "length"}
    for request, response in zip(requests, responses, strict=True):
        assert len(response.logprobs) == len(response.token_ids) <= request.max_tokens
        assert EOS_ID not in response.token_ids[:-1]
        assert (response.token_ids[-1] == EOS_ID) == (response.finish_reason == "stop")
        assert response.finish_reason == "stop" or len(response.token_ids) == request.max_tokens
        assert (response.policy_version, response.temperature) == (0, 1.0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampled_distribution(
    dense: EnginePool, checkpoints: dict[str, Path], temperature: float
) -> None:
    requests = make_requests(20, temperature=temperature)
    responses = dense.generate(requests)
    reference = reference_logprobs(checkpoints["dense 0"], requests, responses)
    assert difference([r.logprobs for r in responses], reference).max() < 2e-5


def test_the_same_seeds_give_the_same_responses_and_others_give_others(dense: EnginePool) -> None:
    requests = make_requests(20)
    first, second = dense.generate(requests), dense.generate(requests)
    assert first == second
    other = dense.generate([SampleRequest(r.prompt_token_ids, r.seed + 1, r.max_tokens) for r in requests])
    assert [r.token_ids for r in other] != [r.token_ids for r in first]


def test_a_prompt_without_room_for_a_response_is_refused(dense: EnginePool) -> None:
    with pytest.raises(ValueError, match=f"request 0: its prompt of {CONTEXT} tokens leaves no room"):
        dense.generate([SampleRequest((3,) * CONTEXT, 0, 4)])


def test_the_engine_does_not_hear_ctrl_c(dense: EnginePool) -> None:
    (engine,) = dense._mine.values()
    assert os.getsid(engine.pid) == engine.pid


def test_updated_weights_are_exact_and_old_cache_entries_forgotten(
    dense: EnginePool, checkpoints: dict[str, Path]
) -> None:
    draw = random.Random(5)
    long = [
        SampleRequest(tuple(draw.randrange(2, 64) for _ in range(200)), number, 40, temperature=0.0)
        for number in range(4)
    ]
    before = dense.generate(long)  # whole cache blocks of these prompts are kept
    metrics = dense.update_weights(CheckpointSource(checkpoints["dense 1"]), 1)
    after = dense.generate(long)
    assert [r.token_ids for r in after] != [r.token_ids for r in before]
    assert {r.policy_version for r in after} == {dense.policy_version} == {1}
    reference = reference_logprobs(
        checkpoints["dense 1"], [SampleRequest(r.prompt_token_ids, 0, 1) for r in long], after
    )
    assert difference([r.logprobs for r in after], reference).max() < 2e-5
    assert metrics["weight_update_bytes"] == sum(
        t.nbytes for t in CheckpointSource(checkpoints["dense 1"]).tensors.values()
    )
    dense.check_against_fresh_engine(checkpoints["dense 1"])
    assert dense.generate(long) == after


def test_a_bit_that_flips_on_the_way_is_noticed(
    dense: EnginePool, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = CheckpointSource(checkpoints["dense 1"])
    send = gloo._Outbox.send

    def flip_once(outbox: gloo._Outbox, bucket: int, flat: torch.Tensor, *rest: Any) -> None:
        monkeypatch.setattr(gloo._Outbox, "send", send)
        flat[0] ^= 1
        send(outbox, bucket, flat, *rest)

    monkeypatch.setattr(gloo._Outbox, "send", flip_once)
    with pytest.raises(
        WeightMismatchError, match=f"1 of {len(source.tensors)} tensors .*: {next(iter(source.tensors))}"
    ):
        dense.update_weights(source, 2)
    dense.update_weights(source, 3)  # the next update mends it
    dense.generate(make_requests(2))


def test_a_killed_engine_is_restarted_once_with_the_current_weights(
    dense: EnginePool, checkpoints: dict[str, Path]
) -> None:
    requests = make_requests(8, temperature=0.0)
    dense.update_weights(CheckpointSource(checkpoints["dense 1"]), 4)
    before = dense.generate(requests)
    os.kill(dense._mine[0].pid, signal.SIGKILL)
    assert dense.generate(requests) == before
    assert dense.restarts == 1


def test_a_second_death_ends_the_run(dense: EnginePool, checkpoints: dict[str, Path]) -> None:
    assert dense.restarts == 1
    os.kill(dense._mine[0].pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"(?s)engine 0 died.*killed by signal 9.*only once"):
        dense.update_weights(CheckpointSource(checkpoints["dense 1"]), 5)


def test_weights_that_do_not_come_and_unknown_ones_are_named_before_anything_is_sent(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    lacking, strange = (CheckpointSource(checkpoints["dense 1"]) for _ in range(2))
    del lacking.tensors["model.layers.1.mlp.down_proj.weight"]
    strange.tensors["model.layers.1.mlp.gate.weight"] = torch.zeros(4, 96)
    config = make_config(tmp_path, "float32")
    with EnginePool(config, World(0, 1, 0, torch.device("cpu"), None), checkpoints["dense 0"]) as pool:
        pool.start()
        with pytest.raises(WeightPlanError, match=r"do not bring model\.layers\.1\.mlp\.down_proj\.weight"):
            pool.update_weights(lacking, 1)
        with pytest.raises(EngineError, match="asked to sample with policy version 1, the engine has none"):
            pool.generate(make_requests(2))
        with pytest.raises(WeightPlanError, match=r"engine 0 .*layers\.1\.mlp\.gate"):
            pool.update_weights(strange, 2)
        assert pool.restarts == 0


# --- two trainer ranks, an engine each, Qwen3-Next in bfloat16 --------------------------------------


def next_on_two_ranks(world: World, first: Path, second: Path, run_dir: Path) -> dict[str, object]:
    config = make_config(run_dir, "bfloat16")
    requests = make_requests(31)
    source = CheckpointSource(second, world)
    with EnginePool(config, world, first) as pool:
        pool.start()
        before = pool.generate(requests)
        pool.update_weights(source, 7)
        pool.check_against_fresh_engine(second)
        after = pool.generate(requests)
        if world.rank == 1:
            os.kill(pool._mine[1].pid, signal.SIGKILL)
        mended = pool.generate(requests)
        pids = [engine.pid for engine in pool._mine.values()]
    return {"before": before, "after": after, "mended": mended, "restarts": pool.restarts, "pids": pids}


@pytest.fixture(scope="module")
def two_ranks(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, object]]:
    run_dir = tmp_path_factory.mktemp("next")
    return run_ranks(next_on_two_ranks, 2, checkpoints["next 0"], checkpoints["next 1"], run_dir, timeout=240)


def test_both_ranks_have_the_same_responses_in_order(
    two_ranks: list[dict[str, list[Response]]], checkpoints: dict[str, Path]
) -> None:
    assert two_ranks[0]["before"] == two_ranks[1]["before"]
    assert two_ranks[0]["after"] == two_ranks[1]["after"]
    requests = make_requests(31)
    for moment, checkpoint in (("before", "next 0"), ("after", "next 1")):
        responses = two_ranks[0][moment]
        reference = reference_logprobs(checkpoints[checkpoint], requests, responses)
        # bfloat16 flips the choice of experts now and then; a response of another request is off by nats
        assert difference([r.logprobs for r in responses], reference).mean() < 0.2


def test_a_restarted_engine_of_another_rank_has_the_current_weights(
    two_ranks: list[dict[str, list[Response]]],
) -> None:
    assert two_ranks[0]["restarts"] == two_ranks[1]["restarts"] == 1
    assert two_ranks[0]["mended"] == two_ranks[0]["after"]
    assert {response.policy_version for response in two_ranks[0]["mended"]} == {7}


def test_nothing_runs_after_the_pools_are_closed(two_ranks: list[dict[str, list[int]]]) -> None:
    assert not any(runs(pid) for results in two_ranks for pid in results["pids"])


# --- what goes wrong ---------------------------------------------------------------------------------


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def start_engine(checkpoint: Path, log: Path) -> Engine:
    rollout = make_config(log.parent, "float32").rollout
    return Engine(engine_settings(rollout, checkpoint, "gloo", gpus=(), num_threads=1), log)


def test_a_failed_start_shows_what_vllm_said(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "generation_config.json"):
        (broken / name).write_text((checkpoints["dense 0"] / name).read_text())
    engine = start_engine(broken, tmp_path / "engine.log")
    with pytest.raises(
        EngineStartError, match=r"(?s)vLLM did not start.*engine\.log.*Cannot find any model weights"
    ):
        engine.wait_ready(120)
    assert not engine.is_alive()
    assert not engine._scratch.exists()


def test_an_engine_that_does_not_start_in_time_is_gone(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    engine = start_engine(checkpoints["dense 0"], tmp_path / "engine.log")
    with pytest.raises(EngineStartError, match=r"no answer within 0\.1 seconds"):
        engine.wait_ready(0.1)
    assert not runs(engine.pid)


OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_engine import start_engine
engine = start_engine(Path({checkpoint!r}), Path({log!r}))
engine.wait_ready(120)
print(engine.pid, engine._scratch, flush=True)
time.sleep(600)
"""


def test_an_engine_ends_with_its_owner_and_leaves_nothing(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    program = OWNER.format(
        tests=str(Path(__file__).parent),
        checkpoint=str(checkpoints["dense 0"]),
        log=str(tmp_path / "engine.log"),
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner, owner.stdout:
        pid, scratch = owner.stdout.readline().split()
        mapped = Path(f"/proc/{pid}/maps").read_text()
        shared = {word for word in mapped.split() if word.startswith("/dev/shm/")}
        owner.kill()
    deadline = time.monotonic() + 10
    while runs(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not runs(int(pid))
    assert not Path(scratch).exists()
    assert not any(Path(path).exists() for path in shared)


@pytest.mark.slow
def test_a_tensor_parallel_engine_takes_new_weights_and_leaves_no_shared_memory(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    rollout = make_config(tmp_path, "float32").rollout
    rollout.rollout_num_gpus_per_engine = 2
    settings = engine_settings(rollout, checkpoints["dense 0"], "gloo", gpus=(), num_threads=1)
    world = World(0, 1, 0, torch.device("cpu"), None)
    requests = make_requests(20)
    there_before = set(os.listdir("/dev/shm"))
    engine = Engine(settings, tmp_path / "engine.log")
    try:
        engine.wait_ready(200)
        transport = open_transport(
            "gloo", world, num_engines=1, workers_per_engine=2, bucket_bytes=10_000, timeout=100
        )
        source = CheckpointSource(checkpoints["dense 1"])
        assert transport.connect(source, {0: engine}, [0]) == {}
        order = Order(version=1, sleeping=False, check=True, timeout=100)
        sent = update_engines(transport, world, source, order, {0: engine}, [0])
        responses = engine.generate(requests, version=1, timeout=100)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDiedError):
            engine.generate(requests, version=1, timeout=100)
    finally:
        engine.close()
    reference = reference_logprobs(checkpoints["dense 1"], requests, responses)
    assert difference([r.logprobs for r in responses], reference).max() < 2e-5
    assert sent.failures == {}
    replicated = sum(t.nbytes for name, t in source.tensors.items() if "norm" in name)
    whole_model = sum(t.nbytes for t in source.tensors.values())
    assert sent.num_bytes == sent.needed_bytes == whole_model + replicated  # each worker its shard only
    left = set(os.listdir("/dev/shm")) - there_before
    assert not {name for name in left if name.startswith(("psm_", "sem.mp-", "vllm"))}
