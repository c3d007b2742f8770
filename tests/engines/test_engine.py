"""Engines sample what they are asked, take new weights exactly, and leave nothing behind when they end.

Changes to vLLM's own functions do what they are for, and are made to no other version."""

import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
import torch

from megatron_ibpo.basics.records import SampleRequest, token_ids
from megatron_ibpo.basics.supervised import shared_memory
from megatron_ibpo.config import Config, ModelConfig
from megatron_ibpo.data.tokenizer import read_eos_token_ids
from megatron_ibpo.engines import Engine, EngineDiedError, EngineError, EngineStartError
from megatron_ibpo.engines.probe import Probe, compare_probes, probe
from megatron_ibpo.engines.registry import choose_transport
from megatron_ibpo.engines.vllm.engine import _environment
from megatron_ibpo.engines.vllm.engine_process import (
    Refusal,
    SamplingEngine,
    _device_arguments,
    _engine_args,
    _obey,
)
from megatron_ibpo.engines.vllm.messages import Answer, NumberedRequest, Refused
from megatron_ibpo.engines.vllm.settings import engine_settings, on_device, start_timeout, vllm_arguments
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.weights import WeightMismatchError, WeightPlanError
from megatron_ibpo.weights.transfer import gloo
from megatron_ibpo.weights.transfer.link import UpdateOrder
from megatron_ibpo.weights.transfer.update import update_engines
from support import engine_runs
from support.checkpoint_bytes import with_mtp
from support.engine_runs import TIMEOUT, CheckpointSource, connect, difference, start_engine, update
from support.tiny_models import EOS_ID, make_qwen3, make_qwen3_next
from support.waiting import eventually

SPECULATION = 'speculative_config={"method": "mtp", "num_speculative_tokens": 1}'


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root, makers = tmp_path_factory.mktemp("checkpoints"), {"dense": make_qwen3, "next": make_qwen3_next}
    return {f"{name} {n}": make(root / f"{name}{n}", n) for name, make in makers.items() for n in (0, 1)}


def test_an_update_whose_trainer_died_ends_before_the_engine_sleeps():
    """vLLM cannot save the buffers of a model that waits for tensors. Only GPUs sleep: vLLM is a mock."""
    engine = SamplingEngine.__new__(SamplingEngine)
    engine._llm, engine._settings = mock.Mock(), SimpleNamespace(device="cuda", tensor_parallel_size=1)
    engine.paused = engine._updating = False
    engine._updates = 0
    engine.start_weight_update(check=False)
    engine.sleep()
    engine.sleep()
    calls = [(name.split(".")[-1], *given[:1]) for name, given, _ in engine._llm.mock_calls]
    assert calls[-6:-4] == [("collective_rpc", "end_loading"), ("collective_rpc", "close_update")]
    assert calls[-4:] == [("sleep",), ("set_weight_version", "none")] * 2


@pytest.mark.engine
@pytest.mark.parametrize("lost", [False, True])
def test_a_cut_off_update_is_refused_and_the_engine_lives(lost):
    """NCCL neither raises nor delivers once a member is gone. Not run on GPUs: the group is none."""
    from megatron_ibpo.engines.vllm.receivers import NcclWorker
    from megatron_ibpo.engines.vllm.worker import WorkerExtension

    worker: Any = WorkerExtension()
    engine: Any = SamplingEngine.__new__(SamplingEngine)
    worker.weight_transfer_engine = NcclWorker.__new__(NcclWorker)
    worker.weight_transfer_engine.lost = lost
    worker._loading = SimpleNamespace(missing=lambda: ["a"])
    engine._llm = SimpleNamespace(
        collective_rpc=lambda method: [getattr(worker, method)()], has_unfinished_requests=lambda: False
    )
    answer = _obey(engine, "missing_weights", ())
    assert answer == (Refused("the weight update was cut off: another member of its group was lost") if lost
                      else Answer([["a"]]))  # fmt: skip


@pytest.mark.engine
@pytest.mark.parametrize(("version", "fits"), [("0.32.0", True), ("0.32.1+cpu", True), ("0.33.0", False)])
def test_a_vllm_fix_applies_only_to_its_version(monkeypatch, version, fits):
    from megatron_ibpo.engines.vllm import fixes

    made = []
    monkeypatch.setattr(fixes, "VERSION", version)

    @fixes.written_for("0.32")
    def change():
        made.append(version)

    if fits:
        change()
    else:
        with pytest.raises(RuntimeError, match=r"vLLM 0\.33\.0: .*change was written for vLLM 0\.32"):
            change()
    assert made == [version] * fits


@pytest.mark.engine
def test_every_change_is_guarded():
    from megatron_ibpo.engines.vllm import direct_layers, emulated_bfloat16, fixes

    changes = [fixes._sleep_beside_others, fixes._repack_experts_on_update, fixes._close_up_single_rows]
    changes += [fixes._hold_generators_of_discarded_tokens, fixes._cache_prompts_alone]
    changes += [fixes._read_single_tokens_as_prompts, fixes.take_updates_whole, fixes.take_norm_kernels]
    changes += [fixes._call_attention_directly, emulated_bfloat16.compute_in_float32]
    changes += [fixes._copy_parameters_once, direct_layers.call_directly]
    assert all(hasattr(change, "__wrapped__") for change in changes)


@pytest.mark.engine
@pytest.mark.parametrize("taken", [0, 100])
def test_an_engine_sleeps_although_another_process_takes_memory(monkeypatch, taken):
    """vLLM's own `sleep` with stand-ins for the device and the allocator. The other process takes more than
    the engine gives back."""
    from vllm.v1.worker.gpu_worker import Worker

    from megatron_ibpo.engines.vllm import fixes

    memory, suspended = SimpleNamespace(free=50), []

    def suspend(level):
        suspended.append(level)
        memory.free += 60 - taken

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (memory.free, 200))
    monkeypatch.setattr(Worker, "sleep", Worker.sleep)  # undone afterwards
    worker = SimpleNamespace(
        sleep_mode_backend=SimpleNamespace(suspend=suspend),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False)),
    )
    if taken:
        with pytest.raises(AssertionError, match="Memory usage increased"):
            Worker.sleep(worker, 1)
        suspended.clear()
    fixes._sleep_beside_others()
    Worker.sleep(worker, 1)
    assert suspended == [1]


def test_transport_follows_the_devices():
    devices = ((False, True), (True, True), (True, False))
    assert [choose_transport(on_gpu=gpu, colocate=own) for gpu, own in devices] == ["gloo", "ipc", "nccl"]


def test_a_large_model_has_longer_to_start(tmp_path):
    rollout = Config().rollout
    assert start_timeout(rollout, tmp_path) == 600
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(160 * 10**9)  # takes no room
    assert start_timeout(rollout, tmp_path) == 600 + 160e9 / 0.25e9 == 1240
    rollout.parameters["vllm_start_timeout"] = 5.0
    assert start_timeout(rollout, tmp_path) == 5


@pytest.mark.parametrize("gone", [False, True])
def test_an_engine_whose_log_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch, gone):
    temporary, log = tmp_path / "tmp", tmp_path / "run" / "logs" / "engine_0.log"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    if not gone:
        log.mkdir(parents=True)
    with pytest.raises(FileNotFoundError if gone else IsADirectoryError):
        Engine(None, log, is_restart=True)
    assert list(temporary.iterdir()) == []
    assert log.parents[1].exists() is not gone, "a run's directory that was deleted is not made again"


def test_end_of_sequence_comes_from_the_generation_config_first(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="names eos_token_id"):
        read_eos_token_ids(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read_eos_token_ids(tmp_path) == (5, 6)


def test_vllm_arguments_get_the_type_that_vllm_declares():
    pairs = "enable_expert_parallel=true data-parallel-size=2 load_format=dummy quantization=none tokenizer=4"
    assert vllm_arguments([*pairs.split(), SPECULATION]) == {
        "enable_expert_parallel": True, "data_parallel_size": 2, "load_format": "dummy", "quantization": None,
        "tokenizer": "4", "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
    }  # fmt: skip


@pytest.fixture
def settings(checkpoints, tmp_path):
    def resolved(checkpoint, transport="ipc", *vllm_arg, **options):
        rollout = engine_runs.make_config(tmp_path, "bfloat16").rollout
        rollout.parameters["vllm_arg"] = vllm_arg
        for name, value in options.items():
            setattr(rollout, name, value)
        gpus = () if transport == "gloo" else (0,)
        return engine_settings(
            rollout,
            checkpoints[checkpoint],
            read_hf_config(checkpoints[checkpoint]),
            transport,
            gpus=gpus,
            num_threads=1,
        )

    return resolved


def test_prefixes_are_cached_where_proven_or_requested(settings):
    asked = "enable-prefix-caching=true"
    for checkpoint, transport, argument, caches in (
        ("dense 0", "ipc", (), True), ("next 0", "ipc", (), False), ("next 0", "ipc", (asked,), True),
        ("next 0", "gloo", (), False), ("next 0", "gloo", (asked,), True),
    ):  # fmt: skip
        chosen = settings(checkpoint, transport, *argument)
        assert chosen.prefix_caching == caches
        assert ("prefix_match_unit" in chosen.extra_arguments) == (caches and transport == "gloo")
        assert "enable_prefix_caching" not in chosen.extra_arguments, "an engine is given it once"


def test_a_sleeping_engine_drops_both_allocator_variables(settings, tmp_path):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    base = dict.fromkeys(names, "expandable_segments:True") | {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    found = _environment(base, settings("dense 0"), tmp_path)
    assert not found.keys() & set(names)
    assert found["VLLM_USE_V2_MODEL_RUNNER"] == "0"  # what docs/gpus.md names to try


@pytest.mark.engine
@pytest.mark.parametrize(("replays", "experts"), [(False, 0), (True, 4)])
def test_on_gpus_vllm_records_routing_and_compiles_nothing(settings, tmp_path, monkeypatch, replays, experts):
    on_gpu, on_cpu = (settings("next 0", to, use_rollout_routing_replay=replays) for to in ("ipc", "gloo"))
    assert on_gpu.recorded_experts == on_cpu.recorded_experts == experts
    assert on_gpu.prefix_caching == replays
    arguments = _device_arguments(on_gpu)
    assert arguments.get("enable_return_routed_experts", False) == replays
    assert "enable_return_routed_experts" not in _device_arguments(on_cpu)
    assert arguments["gdn_prefill_backend"] == "triton"
    (tmp_path / "flashinfer_jit_cache").mkdir()  # FlashInfer's compiled kernels are there
    monkeypatch.syspath_prepend(tmp_path)
    assert "gdn_prefill_backend" not in _device_arguments(on_gpu)


@pytest.mark.engine
def test_vllm_returns_sampling_masks_with_the_tokens_on_gpus(settings):
    """Not run on a GPU: the output is made of vLLM's own classes, its engine is a mock."""
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, SamplingMask, WeightVersionSpan

    own = replace(settings("dense 0"), records_sampling_mask=True)
    assert _device_arguments(own)["return_sampling_mask"]
    assert _engine_args(own).return_sampling_mask
    assert not _engine_args(settings("dense 0")).return_sampling_mask
    engine = SamplingEngine.__new__(SamplingEngine)
    llm: Any = mock.Mock()
    engine._llm, engine._settings, engine._updates, engine.paused = llm, own, 0, False
    engine._version = "0"
    greedy, cut, whole, only_p = (
        NumberedRequest(number, SampleRequest(token_ids([5]), 1, 2, temperature, top_p, top_k))
        for number, (temperature, top_p, top_k) in enumerate(
            ((0, 1, -1), (1, 0.8, 20), (1, 1, -1), (1, 0.8, -1))
        )
    )
    engine.submit(0, [greedy, cut])
    asked = [call.args[2] for call in llm.add_request.call_args_list]
    assert [(params.temperature, params.top_p, params.top_k) for params in asked] == [(1, 1, 1), (1, 0.8, 20)]
    for refused in (whole, only_p):
        with pytest.raises(Refusal, match="only of requests with top-k"):
            engine.submit(0, [cut, refused])
    assert llm.add_request.call_count == 2, "none of a refused call is added"

    def finished(sets):
        mask = None if sets is None else SamplingMask(sets)
        spans = [WeightVersionSpan("0", 0, 2), WeightVersionSpan("1", 2, 3)]
        completion = CompletionOutput(
            0, "", [7, 9, 7], -1.5, FlatLogprobs(logprobs=[-0.5] * 3), finish_reason="length",
            weight_versions=spans, sampling_mask=mask,
        )  # fmt: skip
        llm.step.return_value = [
            SimpleNamespace(finished=True, request_id="4", prompt_token_ids=[5], outputs=[completion])
        ]
        return engine.step()

    (done,) = pickle.loads(pickle.dumps(finished([[7, 3], [9], [7, 8, 200]])))
    assert [own.tolist() for own in map(done.sampling_mask.__getitem__, range(3))] == [
        [3, 7],
        [9],
        [7, 8, 200],
    ]
    assert (done.token_ids.tolist(), done.versions) == ([7, 9, 7], ((0, 0), (2, 1)))
    for sets in (None, [[7], [9]], [[7], [9], [7], [7]], [[7], [8], [7]]):
        with pytest.raises(RuntimeError, match=r"vLLM's sampling mask of . sets"):
            finished(sets)


def test_settings_that_vllm_or_this_project_rejects_are_refused(settings):
    for checkpoint, transport, argument, says in (
        ("dense 0", "ipc", "enable_expert_paralel=true", "did you mean 'enable_expert_parallel'"),
        ("dense 0", "ipc", "data_parallel_size=two", "data_parallel_size=two: vLLM wants int"),
        ("dense 0", "ipc", "enable_expert_parallel=1", "vLLM wants bool"),
        ("dense 0", "ipc", "max_model_len=100", "use --rollout-max-context-len"),
        ("dense 0", "ipc", "logprobs_mode=raw_logprobs", "this project sets it"),
        ("dense 0", "ipc", "enforce_eager", "name=value"),
        ("dense 0", "ipc", "return_sampling_mask=true", "use --rollout-top-k"),
        (
            "dense 0",
            "ipc",
            "override_generation_config={top_k: 20}",
            "use --rollout-temperature, --rollout-top-p",
        ),
        ("dense 0", "ipc", "generation_config=elsewhere", "this project sets it"),
        ("next 0", "ipc", "enable_return_routed_experts=true", "use --use-rollout-routing-replay"),
        # weights that vLLM quantizes before it loads them
        ("dense 0", "ipc", "quantization=awq", r"quantization=awq: .* trainers send unquantized ones"),
        ("next 0", "gloo", SPECULATION, "speculative decoding samples wrongly from models with delta nets"),
        ("next 0", "ipc", "enable_prefix_caching=false", "vLLM records routing by the blocks of its prefix"),
    ):
        with pytest.raises(ValueError, match=says):
            settings(checkpoint, transport, argument, use_rollout_routing_replay="prefix" in argument)


def test_fp8_experts_use_kernels_without_state_across_updates(settings):
    fp8 = "quantization=fp8_per_channel"
    for checkpoint, arguments, backend in (
        ("next 0", [fp8], "triton"), ("next 0", [fp8, "moe-backend=marlin"], "marlin"),
        ("next 0", [], None), ("dense 0", [fp8], None),
    ):  # fmt: skip
        assert settings(checkpoint, "nccl", *arguments).extra_arguments.get("moe_backend") == backend


@pytest.fixture(scope="module")
def dense(checkpoints, tmp_path_factory):
    """An engine, asked in turn. The last test of this section kills it."""
    log = tmp_path_factory.mktemp("dense") / "engine.log"
    with closing(start_engine(checkpoints["dense 0"], log)) as engine:
        engine.wait_ready(TIMEOUT)
        yield engine
    assert not psutil.pid_exists(engine.pid)


@pytest.fixture(scope="module")
def updated(dense, checkpoints):
    """The engine, the trainer's side of its updates, the weights before and after an update, and what the
    engine answers with those that it was started with."""
    as_loaded = probe(dense, 0)
    before, after = (CheckpointSource(checkpoints[f"dense {seed}"]) for seed in (0, 1))
    return dense, connect(dense, after), before, after, as_loaded


@pytest.mark.engine
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_seeds_determine_samples_and_logprobs_match_a_reference(dense, checkpoints, temperature):
    requests = engine_runs.make_requests(60, temperature=temperature)
    samples, again = (dense.generate(requests, version=0, timeout=TIMEOUT) for _ in range(2))
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for request, sample, same in zip(requests, samples, again, strict=True):
        assert len(sample.logprobs) == len(sample.token_ids) <= request.max_tokens
        assert EOS_ID not in sample.token_ids[:-1]
        assert (sample.token_ids[-1] == EOS_ID) == (sample.finish_reason == "stop")
        assert sample.finish_reason == "stop" or len(sample.token_ids) == request.max_tokens
        assert (sample.versions, sample.temperature) == (((0, 0),), temperature)
        assert sample.prompt_token_ids is request.prompt_token_ids
        assert (sample.token_ids.dtype, sample.logprobs.dtype) == (np.int32, np.float32)
        assert sample.loss_mask.tolist() == [True] * len(sample.token_ids)
        assert sample.logprobs.tolist() == same.logprobs.tolist()
    reference = engine_runs.reference_logprobs(checkpoints["dense 0"], requests, samples)
    assert difference([s.logprobs for s in samples], reference).max() < 2e-5
    other_seeds = [replace(request, seed=request.seed + 1) for request in requests]
    others = dense.generate(other_seeds, version=0, timeout=TIMEOUT)
    first, second, third = map(engine_runs.ids_of, (samples, again, others))
    assert first == second != third


@pytest.mark.engine
def test_requests_join_running_ones_and_can_be_aborted(dense):
    endless = [SampleRequest(token_ids([5, 6, 7]), seed, 240) for seed in range(4)]
    whole = dense.generate(endless, version=0, timeout=TIMEOUT)
    longest = max(range(4), key=lambda number: len(whole[number].token_ids))
    assert len(whole[longest].token_ids) > 60
    dense.submit([(10, endless[longest])], version=0)
    dense.submit([(11, SampleRequest(token_ids([8, 9]), 1, 2))], version=0)
    (number, short), *_ = dense.take(TIMEOUT)
    assert (number, len(short.token_ids) <= 2) == (11, True)
    ((number, long),) = dense.take(TIMEOUT)
    assert (number, long.token_ids.tolist()) == (10, whole[longest].token_ids.tolist())
    dense.submit([(20, endless[longest]), (21, endless[longest])], version=0)
    with pytest.raises(EngineError, match="digests must wait until the engine has no requests"):
        dense.call("digests", timeout=TIMEOUT)
    dense.abort([20, 21])
    assert dense.call("digests", timeout=TIMEOUT)
    assert dense.take(0.0) == [], "an aborted request never comes back"


@pytest.mark.engine
def test_updated_weights_are_exact_and_old_cache_entries_forgotten(updated, checkpoints):
    engine, transport, before, after, as_loaded = updated
    update(transport, engine, before, 1)
    prompts = np.random.default_rng(5).integers(2, 64, (4, 200))  # whole cache blocks of these are kept
    long = [SampleRequest(token_ids(p), n, 40, temperature=0.0) for n, p in enumerate(prompts)]
    old = engine.generate(long, version=1, timeout=TIMEOUT)
    sent = update(transport, engine, after, 2)
    new = engine.generate(long, version=2, timeout=TIMEOUT)
    assert engine_runs.ids_of(new) != engine_runs.ids_of(old)
    assert {sample.versions for sample in new} == {((0, 2),)}
    reference = engine_runs.reference_logprobs(checkpoints["dense 1"], long, new)
    assert difference([s.logprobs for s in new], reference).max() < 2e-5
    assert sent.num_bytes == sum(t.nbytes for t in after.tensors.values())
    with pytest.raises(WeightMismatchError, match="greedy responses differ"):
        compare_probes(probe(engine, 2), as_loaded)
    update(transport, engine, before, 3)
    compare_probes(probe(engine, 3), as_loaded)


def test_digests_alone_compare_weights_where_batches_differ():
    one, other = (Probe([token_ids([n])], [np.array([-n], np.float32)], [{"w": "same"}]) for n in (1, 2))
    with pytest.raises(WeightMismatchError, match="greedy responses differ"):
        compare_probes(one, other)
    compare_probes(one, other, same_batches=False)
    with pytest.raises(WeightMismatchError, match="1 tensors of engine worker 0 differ"):
        compare_probes(one, replace(other, digests=[{"w": "another"}]), same_batches=False)


@pytest.mark.engine
def test_running_requests_continue_on_new_weights_and_record_the_version(updated, checkpoints):
    engine, transport, before, after, _ = updated
    update(transport, engine, before, 3)
    request = SampleRequest(token_ids([5, 6, 7]), 3, 240, temperature=0.0)
    engine.submit([(0, request)], version=3)
    time.sleep(0.05)  # for some tokens of the first
    update(transport, engine, after, 4)
    ((_, sample),) = engine.take(TIMEOUT)
    (first, old), (switch, new) = sample.versions
    assert (first, old, new) == (0, 3, 4)
    paths = checkpoints["dense 0"], checkpoints["dense 1"]
    (of_old,), (of_new,) = (engine_runs.reference_logprobs(path, [request], [sample]) for path in paths)
    expected = [*of_old[:switch], *of_new[switch:]]
    assert difference([sample.logprobs], [expected]).max() < 2e-5
    assert difference([sample.logprobs], [of_new]).max() > 1e-2
    assert difference([sample.logprobs], [of_old]).max() > 1e-2
    update(transport, engine, before, 3)


@pytest.mark.engine
def test_a_bit_that_flips_on_the_way_is_noticed(updated, monkeypatch):
    engine, transport, _, source, _ = updated
    send = gloo._Outbox.send

    def flip_once(outbox, bucket, flat, *rest):
        monkeypatch.setattr(gloo._Outbox, "send", send)
        flat[0] ^= 1
        send(outbox, bucket, flat, *rest)

    monkeypatch.setattr(gloo._Outbox, "send", flip_once)
    said = f"1 of {len(source.tensors)} tensors .*: {next(iter(source.tensors))}"
    with pytest.raises(WeightMismatchError, match=said):
        update(transport, engine, source, 4)
    update(transport, engine, source, 5)  # the next update mends it
    engine.generate(engine_runs.make_requests(2), version=5, timeout=TIMEOUT)


@pytest.mark.engine
def test_missing_and_unknown_weights_are_named(updated, checkpoints, monkeypatch):
    engine, _, _, source, _ = updated
    lacking, strange = (CheckpointSource(checkpoints["dense 1"]) for _ in range(2))
    del lacking.tensors["model.layers.1.mlp.down_proj.weight"]
    strange.tensors["model.layers.1.mlp.gate.weight"] = torch.zeros(4, 96)
    with pytest.raises(WeightPlanError, match=r"do not cover model\.layers\.1\.mlp\.down_proj\.weight"):
        engine_runs.open_gloo().connect(lacking, {0: engine}, [0])
    monkeypatch.setattr(engine, "settings", replace(engine.settings, stall_timeout=2.0))
    engine.submit([(0, engine_runs.make_requests(1)[0])], version=1)
    for _ in range(3):  # it has no weights: requests wait until some come, and it is not taken to hang
        assert engine.take(1.0) == []
    engine.abort([0])
    with pytest.raises(WeightPlanError, match=r"engine 0 .*layers\.1\.mlp\.gate"):
        engine_runs.open_gloo().connect(strange, {0: engine}, [0])
    update(connect(engine, source), engine, source, 6)  # the next connection mends it
    engine.generate(engine_runs.make_requests(2), version=6, timeout=TIMEOUT)
    assert engine_runs.left_out_unnoticed(engine, source) == [], "any weight is named"


@pytest.mark.engine
def test_an_update_whose_trainers_died_is_begun_anew_by_others(updated):
    engine, _, _, source, _ = updated
    engine.begin("digests")  # answers that were not fetched are dropped
    assert engine.call("start_weight_update", False, timeout=TIMEOUT) is None
    transport = connect(engine, source)
    update(transport, engine, source, 7)
    engine.call("start_weight_update", False, timeout=TIMEOUT)
    order = UpdateOrder(version=7, sleeping=False, check=False, timeout=TIMEOUT)
    assert transport.send(source, {0: engine}, [0], order).failures == {}
    update(connect(engine, source), engine, source, 8)
    engine.generate(engine_runs.make_requests(2), version=8, timeout=TIMEOUT)


@pytest.mark.engine
def test_an_engine_survives_a_failed_update_and_takes_the_next(updated, checkpoints, monkeypatch):
    """The connection breaks when the third bucket is to be sent: layers are loaded in part."""
    engine, _, before, after, _ = updated
    update(connect(engine, before), engine, before, 9)
    transport, send = connect(engine, after), gloo._Outbox.send

    def send_two(outbox, bucket, *rest):
        if bucket < 2:
            send(outbox, bucket, *rest)
        else:
            outbox.wait(0)
            outbox._groups.clear()
            transport._groups.clear()

    order = UpdateOrder(version=10, sleeping=False, check=True, timeout=TIMEOUT)
    with monkeypatch.context() as patched:
        patched.setattr(gloo._Outbox, "send", send_two)
        failures = update_engines(transport, engine_runs.WORLD, after, order, {0: engine}, [0]).failures
    assert "the weight update failed on worker 0: RuntimeError" in str(failures[0])
    update(connect(engine, after), engine, after, 10)
    requests = engine_runs.make_requests(8)
    samples = engine.generate(requests, version=10, timeout=TIMEOUT)
    reference = engine_runs.reference_logprobs(checkpoints["dense 1"], requests, samples)
    assert difference([sample.logprobs for sample in samples], reference).max() < 2e-5


@pytest.mark.engine
def test_a_killed_engine_returns_finished_samples_then_its_exit_reason(dense):
    short = SampleRequest(token_ids([5, 6]), 0, 2)
    dense.submit([(0, short)], version=10)
    assert eventually(lambda: dense._inbox.idle, seconds=TIMEOUT), "the sample is here"
    assert os.getsid(dense.pid) == dense.pid, "it does not hear Ctrl-C"
    os.kill(dense.pid, signal.SIGKILL)
    assert [number for number, _ in dense.take(TIMEOUT)] == [0]
    said = r"(?s)it has ended \(killed by signal 9, most often .*out-of-memory killer\); the end of .*\.log"
    with pytest.raises(EngineDiedError, match=said):
        dense.take(TIMEOUT)
    with pytest.raises(EngineDiedError):
        dense.submit([(1, short)], version=10)
    assert not dense._scratch.exists()


@pytest.mark.engine
@pytest.mark.slow
def test_an_fp8_engine_after_an_update_equals_a_fresh_one(checkpoints, tmp_path):
    fp8, old, new = ("quantization=fp8_per_channel",), checkpoints["dense 0"], checkpoints["dense 1"]
    with (
        closing(start_engine(old, tmp_path / "old.log", "bfloat16", fp8)) as engine,
        closing(start_engine(new, tmp_path / "new.log", "bfloat16", fp8)) as fresh,
    ):
        engine.wait_ready(TIMEOUT)
        fresh.wait_ready(TIMEOUT)
        source = CheckpointSource(new)
        update(connect(engine, source), engine, source, 7)
        compare_probes(probe(engine, 7), probe(fresh, 0))
        assert engine_runs.left_out_unnoticed(engine, source) == []


@pytest.mark.engine
@pytest.mark.slow
def test_an_engine_drafts_with_the_layer_that_an_update_brings(tmp_path, settings):
    """In the new weights layers add nothing and the multi-token prediction layer passes the embedding on: the
    policy's next token depends on the last one alone, and the layer guesses just that. No state of a delta
    net matters then, which vLLM would get wrong here."""
    kept = _engine_args(settings("next 0", "ipc", SPECULATION)).sleep_preserve_parameter_names
    assert kept == ["draft.*"], "on a GPU"
    hf_dir = with_mtp(make_qwen3_next(tmp_path / "random", 0, std=0.1), seed=6)
    greedy = engine_runs.make_requests(31, temperature=0.0)
    source, policy_alone = CheckpointSource(hf_dir), CheckpointSource(hf_dir)
    tensors = source.tensors
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "_norm_embedding.weight")):
            tensor.zero_()
    tensors["mtp.norm.weight"].copy_(tensors["model.norm.weight"])
    hidden = len(tensors["mtp.norm.weight"])
    tensors["mtp.fc.weight"].copy_(torch.eye(hidden, 2 * hidden))
    policy_alone.tensors = {n: t for n, t in tensors.items() if not n.startswith("mtp.")}

    def guessed(version):
        engine.generate(greedy, version=version, timeout=TIMEOUT)
        drafted, accepted = engine.call("drafts", timeout=TIMEOUT)
        assert drafted > 100
        return accepted / drafted

    rollout = engine_runs.make_config(tmp_path, "bfloat16").rollout
    plain = engine_settings(rollout, hf_dir, read_hf_config(hf_dir), "gloo", gpus=(), num_threads=1)
    # by itself it is refused
    drafting = replace(
        plain, prefix_caching=False, drafts=True, extra_arguments=vllm_arguments([SPECULATION])
    )
    with closing(Engine(drafting, tmp_path / "engine.log")) as engine:
        engine.wait_ready(TIMEOUT)
        assert guessed(0) < 0.2, "at random"
        update(connect(engine, source), engine, source, 7)
        assert guessed(7) > 0.9
        update(connect(engine, policy_alone), engine, policy_alone, 8)
        assert guessed(8) > 0.9, "a layer that is not trained stays what it is"


@pytest.mark.parametrize(("model", "on_gpu", "changes", "drafts"), [
    ("dense 0", True, {}, "on"), ("dense 0", False, {}, "off"), ("next 0", True, {}, "off"),
    ("dense 0", True, {"rollout_top_k": 20}, "off"), ("dense 0", True, {"ibpo_operator": "none"}, "off"),
])  # fmt: skip
def test_corrections_of_dense_models_are_drafted_on_gpus(checkpoints, model, on_gpu, changes, drafts):
    config = Config(model=ModelConfig(bf16=False))
    for name, value in changes.items():
        setattr(config.rollout if hasattr(config.rollout, name) else config.algorithm, name, value)
    resolved = on_device(config, read_hf_config(checkpoints[model]), on_gpu)
    assert resolved.parameters["ibpo_draft_from_prompt"] == drafts


@pytest.mark.engine
@pytest.mark.slow
def test_only_corrections_are_drafted_and_drafting_changes_no_sample(checkpoints, tmp_path):
    """Of a random policy. Greedy tokens are the likeliest, and log-probs those of the policy."""
    hf_dir, rollout = checkpoints["dense 0"], engine_runs.make_config(tmp_path, "float32").rollout
    rollout.parameters["ibpo_draft_from_prompt"] = "on"
    drafting = engine_settings(rollout, hf_dir, read_hf_config(hf_dir), "gloo", gpus=(), num_threads=1)
    with closing(Engine(drafting, tmp_path / "engine.log")) as engine:

        def sampled(temperature, repeats_prompt):
            requests = [
                replace(request, repeats_prompt=repeats_prompt)
                for request in engine_runs.make_requests(40, temperature=temperature)
            ]
            samples = engine.generate(requests, version=0, timeout=TIMEOUT)
            return requests, samples, engine.call("drafts", timeout=TIMEOUT)

        engine.wait_ready(TIMEOUT)
        for repeats_prompt in (False, True):
            requests, greedy, (drafted, accepted) = sampled(0.0, repeats_prompt)
            assert (0 < accepted < drafted) if repeats_prompt else drafted == 0
            assert engine_runs.short_of_best(hf_dir, requests, greedy) < 1e-4, f"{repeats_prompt=}"
            requests, samples, (drafted, _) = sampled(1.0, repeats_prompt)
            assert (drafted > 0) == repeats_prompt
            reference = engine_runs.reference_logprobs(hf_dir, requests, samples)
            assert difference([s.logprobs for s in samples], reference).max() < 2e-5, f"{repeats_prompt=}"


@pytest.mark.engine
@pytest.mark.slow
def test_a_cache_kept_over_an_update_serves_running_requests_alone(checkpoints, tmp_path):
    """A request that comes afterwards with the same prompt is all the new policy's."""
    before, after = checkpoints["dense 0"], checkpoints["dense 1"]
    prompt = token_ids(np.random.default_rng(5).integers(2, 64, 200))  # whole cache blocks
    running = SampleRequest(prompt, 3, 240, temperature=0.0)
    with closing(start_engine(before, tmp_path / "engine.log", recompute_kv=False)) as engine:
        engine.wait_ready(TIMEOUT)
        transport = connect(engine, CheckpointSource(after))
        for old in range(1, 21, 2):
            samples = {}
            update(transport, engine, CheckpointSource(before), old)
            engine.submit([(0, running)], version=old)
            time.sleep(0.05)  # for some tokens of the first
            update(transport, engine, CheckpointSource(after), old + 1)
            engine.submit([(1, replace(running, max_tokens=20))], version=old + 1)
            while len(samples) < 2:
                samples.update(engine.take(TIMEOUT))
            if len(samples[0].versions) == 2:
                break  # on a busy machine the update may come before or after all its tokens
    (_, first), (switch, second) = samples[0].versions
    assert (first, second, samples[1].versions) == (old, old + 1, ((0, old + 1),))
    both = (engine_runs.reference_logprobs(path, [running], [samples[0]]) for path in (before, after))
    (of_old,), (of_new,) = both
    assert difference([samples[0].logprobs[:switch]], [of_old[:switch]]).max() < 2e-5
    for of_one in (of_old, of_new):  # it went on from the old policy's cache with the new weights
        assert difference([samples[0].logprobs[switch:]], [of_one[switch:]]).max() > 1e-3
    expected = engine_runs.reference_logprobs(after, [running], [samples[1]])
    assert difference([samples[1].logprobs], expected).max() < 2e-5


@pytest.mark.engine
def test_an_engine_that_is_killed_for_a_reason_says_it(checkpoints, tmp_path):
    engine = start_engine(checkpoints["dense 0"], tmp_path / "engine.log")
    waiting = threading.Timer(0.1, engine.kill, ["no sample within 3 seconds"])
    waiting.start()
    with pytest.raises(EngineDiedError, match="no sample within 3 seconds"):
        engine.take(TIMEOUT)
    waiting.join()


@pytest.mark.engine
@pytest.mark.parametrize(
    ("fault", "seconds", "said"),
    [
        ("a signal", TIMEOUT, "illegal instruction on this processor; try --vllm-dtype float32"),
        ("too slow", 0.1, r"no answer within 0\.1 seconds"),
        pytest.param("no weights", TIMEOUT, "Cannot find any model weights", marks=pytest.mark.slow),
    ],
)
def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(checkpoints, tmp_path, fault, seconds, said):
    model = shutil.copytree(checkpoints["dense 0"], tmp_path / "model")
    if fault == "no weights":
        (model / "model.safetensors").unlink()
    engine = start_engine(model, tmp_path / "engine.log")
    if fault == "a signal":
        os.kill(engine.pid, signal.SIGILL)
    with pytest.raises(EngineStartError, match=rf"(?s)vLLM did not start.*{said}"):
        engine.wait_ready(seconds)
    assert not psutil.pid_exists(engine.pid)
    assert not engine._scratch.exists()


@pytest.mark.parametrize("ready", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_engine_ends_with_its_owner_and_leaves_nothing(checkpoints, tmp_path, ready):
    forked = multiprocessing.get_context("fork")
    here, there = forked.Pipe()

    def own():
        engine = start_engine(checkpoints["dense 0"], tmp_path / "engine.log")
        if ready:
            engine.wait_ready(TIMEOUT)
        there.send((engine.pid, engine._scratch))
        time.sleep(600)

    owner = forked.Process(target=own)
    owner.start()
    assert here.poll(TIMEOUT)
    pid, scratch = here.recv()
    mapped = Path(f"/proc/{pid}/maps").read_text().split()
    owner.kill()
    owner.join()
    assert eventually(lambda: not psutil.pid_exists(pid), seconds=10)
    assert not scratch.exists()
    assert not any(Path(word).exists() for word in mapped if word.startswith("/dev/shm/"))


@pytest.mark.slow
def test_a_failing_engine_removes_its_own_scratch_folder(tmp_path):
    """Its owner may have died of the same."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    here, there = multiprocessing.Pipe()
    program = "import os; from megatron_ibpo.engines.vllm.engine_process import run; "
    program += f"run({there.fileno()}, os.getppid(), {str(scratch)!r})"
    options: Any = {"pass_fds": [there.fileno()], "stderr": subprocess.PIPE, "start_new_session": True}
    engine = subprocess.Popen([sys.executable, "-c", program], text=True, **options)
    there.close()
    here.send("no settings")
    _, said = engine.communicate(timeout=TIMEOUT)
    assert engine.returncode == 1
    assert "AttributeError" in said
    assert not scratch.exists()


@pytest.mark.engine
@pytest.mark.slow
def test_a_tensor_parallel_engine_takes_weights_and_frees_shared_memory(checkpoints, tmp_path, monkeypatch):
    rollout = engine_runs.make_config(tmp_path, "float32").rollout
    rollout.rollout_num_gpus_per_engine = 2
    settings = engine_settings(
        rollout,
        checkpoints["dense 0"],
        read_hf_config(checkpoints["dense 0"]),
        "gloo",
        gpus=(),
        num_threads=1,
    )
    requests, source = engine_runs.make_requests(20), CheckpointSource(checkpoints["dense 1"])
    with closing(Engine(settings, tmp_path / "engine.log")) as engine:
        engine.wait_ready(200)
        transport = engine_runs.open_gloo(workers=2, bucket_bytes=10_000)
        assert transport.connect(source, {0: engine}, [0]) == {}
        send, asked, answers = transport.send, ThreadPoolExecutor(1), []

        def send_while_asked(*given, **named):
            answers.append(asked.submit(engine.generate, requests, version=1, timeout=100))
            time.sleep(1)  # vLLM's core, which had nothing to do, would take its first steps
            return send(*given, **named)

        monkeypatch.setattr(transport, "send", send_while_asked)
        sent = update(transport, engine, source, 1)
        samples = answers[0].result()
        shared = shared_memory(engine.pid)
        assert shared
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDiedError):
            engine.generate(requests, version=1, timeout=100)
    assert {sample.versions for sample in samples} == {((0, 1),)}
    reference = engine_runs.reference_logprobs(checkpoints["dense 1"], requests, samples)
    assert difference([s.logprobs for s in samples], reference).max() < 2e-5
    sizes = {name: tensor.nbytes for name, tensor in source.tensors.items()}
    replicated = sum(size for name, size in sizes.items() if "norm" in name)
    assert sent.num_bytes == sent.needed_bytes == sum(sizes.values()) + replicated  # each worker its shard
    assert not {entry.name for entry in os.scandir("/dev/shm") if entry.inode() in shared}
