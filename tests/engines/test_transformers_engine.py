"""The transformers engine: what it samples, its weights, and the models that no other engine takes."""

import time
from contextlib import closing, nullcontext
from dataclasses import replace

import numpy as np
import pytest

from megatron_ibpo.basics.records import SampleRequest, token_ids
from megatron_ibpo.config import Config, ConfigError, RolloutConfig
from megatron_ibpo.engines import EngineDiedError, EngineError, EngineStartError
from megatron_ibpo.engines.lean import LeanEngine, checkpoint_weights
from megatron_ibpo.engines.probe import compare_probes, probe
from megatron_ibpo.engines.registry import (
    check_engine,
    check_model,
    engine_settings,
    fallback_note,
    on_device,
    sampling_mask_obstacle,
)
from megatron_ibpo.engines.transformers_engine import TransformersEngine
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.run.settings import parse_config
from megatron_ibpo.weights import WeightPlanError
from support.engine_runs import (
    CONTEXT,
    TIMEOUT,
    CheckpointSource,
    connect,
    difference,
    ids_of,
    make_config,
    make_requests,
    reference_logprobs,
    update,
)
from support.example_runs import train_three_steps
from support.tiny_models import (
    EOS_ID,
    make_glm4_moe,
    make_gpt_oss,
    make_llama,
    make_qwen2,
    make_qwen3,
    make_qwen3_moe,
    make_qwen3_next,
)
from support.waiting import eventually

NAME = "transformers"
NOTE = "--rollout-backend transformers samples, since vLLM cannot: head_dim 16"
ENDLESS = SampleRequest(token_ids([5, 6, 7]), seed=0, max_tokens=CONTEXT)


def make_llama_of_16(directory, seed):
    return make_llama(directory, seed, head_dim=16)


def make_qwen2_of_16(directory, seed):
    return make_qwen2(directory, seed, heads=8)


def settings_of(checkpoint, log_dir, **options):
    options = {"rollout_backend": NAME, "parameters": {}} | options
    rollout = replace(make_config(log_dir, "float32").rollout, **options)
    return engine_settings(rollout, checkpoint, read_hf_config(checkpoint), "gloo", gpus=(), num_threads=1)


def started(checkpoint, log_dir, **options):
    engine = TransformersEngine(settings_of(checkpoint, log_dir, **options), log_dir / "logs" / "engine.log")
    engine.wait_ready(TIMEOUT)
    return engine


def take_all(engine, count):
    samples = {}
    while len(samples) < count:
        taken = engine.take(TIMEOUT)
        assert taken, "nothing came in time"
        samples |= dict(taken)
    return samples


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("models") / "dense", 0)


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    with closing(started(checkpoint, tmp_path_factory.mktemp("run"))) as engine:
        yield engine


def test_the_transformers_engine_samples_like_the_lean_one(engine, checkpoint):
    """Both draw with the same random numbers, so that only a rounding at a boundary could part them."""
    shape = read_hf_config(checkpoint)
    lean = LeanEngine(shape, (EOS_ID,), max_context=CONTEXT, most_at_once=64)
    lean.load(checkpoint_weights(shape, checkpoint), 0)
    cuts = ({}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.8})
    requests = [
        replace(request, **cut) for request, cut in zip(make_requests(60, seed=2), cuts * 12, strict=True)
    ]
    samples = engine.generate(requests, version=0, timeout=TIMEOUT)
    pairs = list(zip(samples, lean.generate(requests), strict=True))
    same = [(ours, theirs) for ours, theirs in pairs if np.array_equal(ours.token_ids, theirs.token_ids)]
    assert len(same) >= 58
    for ours, theirs in same:
        assert np.abs(ours.logprobs - theirs.logprobs).max() < 1e-4
        assert ours.finish_reason == theirs.finish_reason
        assert ours.versions == ((0, 0),)
        assert (ours.sampling_mask is None) == (theirs.sampling_mask is None)
        if ours.sampling_mask is not None:
            assert np.array_equal(ours.sampling_mask.token_ids, theirs.sampling_mask.token_ids)
            assert np.array_equal(ours.sampling_mask.offsets, theirs.sampling_mask.offsets)


def test_requests_come_under_their_numbers_and_aborted_ones_never(engine):
    requests = make_requests(6, seed=4)
    alone = ids_of(engine.generate(requests, version=0, timeout=TIMEOUT))
    engine.submit([(10 + n, request) for n, request in enumerate(requests)], 0)
    engine.abort([13])
    samples = take_all(engine, 5)
    assert sorted(samples) == [10, 11, 12, 14, 15]
    assert ids_of(samples[number] for number in sorted(samples)) == alone[:3] + alone[4:]
    assert engine.take(0.1) == []


def test_an_aborted_request_takes_no_more_computation(checkpoint, tmp_path):
    """Its wave ends with it: without that, 200 tokens of 50 milliseconds would come first."""
    with closing(started(checkpoint, tmp_path)) as engine:
        engine._policy._waves = replace(engine._policy._waves, eos_token_ids=())
        written: list[int] = []
        decoder = engine._policy._decoder
        write = decoder.write

        def write_slowly(tokens, cache):
            time.sleep(0.05)
            written.append(1)
            return write(tokens, cache)

        decoder.write = write_slowly
        engine.submit([(0, ENDLESS)], 0)
        eventually(lambda: len(written) > 2, TIMEOUT)
        engine.abort([0])
        engine.submit([(1, replace(ENDLESS, max_tokens=3))], 0)
        assert list(take_all(engine, 1)) == [1]
        assert len(written) < 100


def test_new_weights_load_in_place_and_old_versions_are_refused(checkpoint, tmp_path):
    other = make_qwen3(tmp_path / "other", 1)
    requests = make_requests(12, seed=1)
    with closing(started(checkpoint, tmp_path)) as engine, closing(started(other, tmp_path)) as fresh:
        engine.submit([(0, requests[0])], 1)
        with pytest.raises(EngineError, match="policy version 1, the engine has 0"):
            engine.take(TIMEOUT)
        memory = {tensor.data_ptr() for tensor in engine._policy._model.parameters()}
        source = CheckpointSource(other)
        transport = connect(engine, source)
        update(transport, engine, source, 1)
        samples = engine.generate(requests, version=1, timeout=TIMEOUT)
        assert {sample.versions for sample in samples} == {((0, 1),)}
        logprobs = reference_logprobs(other, requests, samples)
        assert difference([sample.logprobs for sample in samples], logprobs).max() < 1e-4
        assert {tensor.data_ptr() for tensor in engine._policy._model.parameters()} == memory
        compare_probes(probe(engine, 1), probe(fresh, 0))


def test_requests_that_come_during_an_update_wait_for_its_weights(checkpoint, tmp_path):
    with closing(started(checkpoint, tmp_path)) as engine:
        engine.call("start_weight_update", False, timeout=TIMEOUT)
        engine.submit([(0, make_requests(1)[0])], 3)
        assert engine.take(0.2) == []
        missing = engine.call("missing_weights", timeout=TIMEOUT)[0]
        assert len(missing) == len(CheckpointSource(checkpoint).metadata())
        with pytest.raises(EngineError, match="policy version 0, the engine has none"):
            engine.generate(make_requests(1), version=0, timeout=TIMEOUT)
        engine.call("finish_weight_update", 3, timeout=TIMEOUT)
        assert take_all(engine, 1)[0].versions == ((0, 3),)


@pytest.mark.parametrize(
    ("make", "tolerance"),
    [
        (make_llama_of_16, 1e-4),
        pytest.param(make_qwen2_of_16, 1e-4, marks=pytest.mark.slow),
        pytest.param(make_qwen3_moe, 1e-4, marks=pytest.mark.slow),
        pytest.param(make_glm4_moe, 1e-4, marks=pytest.mark.slow),
        pytest.param(make_gpt_oss, 1e-4, marks=pytest.mark.slow),
        # transformers itself computes delta nets differently token by token and at once
        pytest.param(make_qwen3_next, 5e-3, marks=pytest.mark.slow),
    ],
)
def test_other_families_are_sampled_and_updated(tmp_path, make, tolerance):
    first, second = (make(tmp_path / f"model_{seed}", seed) for seed in (0, 1))
    with closing(started(first, tmp_path)) as engine:
        for version, model in enumerate((first, second)):
            if version:
                source = CheckpointSource(second)
                update(connect(engine, source), engine, source, 1)
            requests = make_requests(8, seed=1, temperature=0.8)
            samples = engine.generate(requests, version=version, timeout=TIMEOUT)
            logprobs = reference_logprobs(model, requests, samples)
            assert difference([sample.logprobs for sample in samples], logprobs).max() < tolerance, (
                f"{version=}"
            )


def test_tensors_of_another_model_are_refused_before_any_is_sent(engine, tmp_path):
    deeper = make_qwen3(tmp_path / "deeper", 0, layers=3)
    wider = make_qwen3(tmp_path / "wider", 0, head_dim=64)
    with pytest.raises(WeightPlanError, match=r"has no place for model\.layers\.2"):
        connect(engine, CheckpointSource(deeper))
    with pytest.raises(WeightPlanError, match=r"k_norm\.weight is \[64\], the engine's \[32\]"):
        connect(engine, CheckpointSource(wider))


def test_an_engine_that_ended_says_why(checkpoint, tmp_path):
    engine = started(checkpoint, tmp_path)
    engine.submit([(0, ENDLESS)], 0)
    engine.kill("a test ended it")
    for ask in (lambda: engine.take(0.0), lambda: engine.submit([], 0), lambda: engine.begin("digests")):
        with pytest.raises(EngineDiedError, match="a test ended it"):
            ask()
    engine.close()
    broken = started(checkpoint, tmp_path)
    broken._policy._decoder = None
    broken.submit([(0, ENDLESS)], 0)
    with pytest.raises(EngineDiedError, match="sampling failed: AttributeError"):
        broken.take(TIMEOUT)
    broken.close()
    (tmp_path / "empty").mkdir()
    absent = TransformersEngine(replace(engine.settings, model=str(tmp_path / "empty")), tmp_path / "log")
    with pytest.raises(EngineStartError, match="transformers did not start"):
        absent.wait_ready(TIMEOUT)
    assert "Traceback" in (tmp_path / "log").read_text()


def test_vllms_refusal_of_a_model_names_the_transformers_engine(tmp_path):
    check_engine(RolloutConfig(rollout_backend=NAME))
    shape = read_hf_config(make_llama_of_16(tmp_path / "model", 0))
    rollout = RolloutConfig(rollout_backend="vllm")
    with pytest.raises(ValueError, match=r"(?s)head_dim 16 .*\n--rollout-backend transformers can compute"):
        check_model(rollout, shape, on_gpu=False)
    ours = replace(rollout, rollout_backend=NAME)
    check_model(ours, shape, on_gpu=False)
    with pytest.raises(ValueError, match="--rollout-backend transformers: samples on CPUs only; take vllm"):
        check_model(ours, shape, on_gpu=True)
    assert sampling_mask_obstacle(Config(rollout=ours), on_gpu=False) is None


def test_without_a_named_engine_a_run_falls_back_with_notice(tmp_path):
    shape = read_hf_config(make_qwen2_of_16(tmp_path / "model", 0))
    for flags, on_gpu, name in (
        ((), False, NAME),
        ((), True, "vllm"),
        (("--rollout-backend", "vllm"), False, "vllm"),
        (("--vllm-max-num-seqs", "8"), False, NAME),
        (("--rollout-num-gpus-per-engine", "2"), False, "vllm"),  # here neither can
    ):
        config = parse_config(flags)
        note = fallback_note(config.rollout, shape, on_gpu=on_gpu)
        rollout = on_device(config, shape, on_gpu=on_gpu).rollout
        assert (rollout.rollout_backend, note is not None) == (name, name == NAME)
        refused = not on_gpu and name == "vllm"
        with pytest.raises(ValueError, match="head_dim 16") if refused else nullcontext():
            check_model(rollout, shape, on_gpu=on_gpu)
        idle = " (--vllm-max-num-seqs: no effect)" if "--vllm-max-num-seqs" in flags else ""
        assert note is None or note.startswith(NOTE.replace(",", f"{idle},")), (name, flags)
    assert parse_config(["--rollout-backend", NAME, "--transformers-max-num-seqs", "8"])
    with pytest.raises(ConfigError, match=r"--vllm-dtype: --rollout-backend transformers has no such"):
        parse_config(["--rollout-backend", NAME, "--vllm-dtype", "float32"])


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("make", [make_llama_of_16, make_qwen2_of_16])
def test_a_random_model_with_heads_of_16_trains(tmp_path, capfd, make):
    """On two tensor-parallel ranks, each update compared with what the engine holds."""
    rows = train_three_steps(tmp_path, make(tmp_path / "model", 0))
    assert max(row["logprob_diff_abs_max"] for row in rows) < 1e-3
    assert NOTE.replace(",", " (--vllm-kv-cache-bytes: no effect),") in capfd.readouterr().out
