"""What vLLM's engines record of their routers is what the model routes, also beside their prefix cache."""

import time
from contextlib import closing, contextmanager

import numpy as np
import pytest
import torch

from megatron_ibpo.basics.records import SampleRequest, TrainSequence, no_expert, token_ids
from megatron_ibpo.engines import Engine
from megatron_ibpo.engines.vllm.settings import engine_settings
from megatron_ibpo.models import read_hf_config
from support import engine_runs
from support.engine_runs import CONTEXT, CheckpointSource, connect, make_config, make_requests, update
from support.example_runs import finished, rows_of, start_script
from support.layouts import layout
from support.ranks import run_ranks
from support.tiny_models import make_qwen3_next
from support.trainers import all_updated, replaying

pytestmark, TIMEOUT = [pytest.mark.engine, pytest.mark.slow], 600.0


@contextmanager
def recording_engine(checkpoint, log, dtype, *vllm_arg, context=CONTEXT):
    rollout = make_config(log.parent, dtype).rollout
    rollout.rollout_max_context_len, rollout.parameters["vllm_arg"] = context, vllm_arg
    rollout.use_rollout_routing_replay = True
    settings = engine_settings(
        rollout, checkpoint, read_hf_config(checkpoint), "gloo", gpus=(), num_threads=1
    )
    with closing(Engine(settings, log)) as engine:
        engine.wait_ready(TIMEOUT)
        yield engine


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """(checkpoints before and after an update, samples of the first, one that was running at the update, some
    of the second), in bfloat16."""
    place = tmp_path_factory.mktemp("hybrid")
    old, new = (make_qwen3_next(place / str(seed), seed) for seed in (0, 1))
    requests = make_requests(31)
    with recording_engine(old, place / "engine.log", "bfloat16") as engine:
        samples = engine.generate(requests, version=0, timeout=TIMEOUT)
        source = CheckpointSource(new)
        transport = connect(engine, source)
        update(transport, engine, CheckpointSource(old), 1)
        engine.submit([(0, SampleRequest(token_ids([5, 6, 7]), 3, 240, temperature=0.0))], version=1)
        time.sleep(0.1)  # for some tokens of the first
        update(transport, engine, source, 2)
        engine.submit([(1, requests[0])], version=2)
        engine.abort([1])
        ((_, across),) = engine.take(TIMEOUT)
        again = engine.generate([requests[2], requests[1]], version=2, timeout=TIMEOUT)
    return (old, new), samples, across, again


def test_a_hybrid_engine_records_its_routing_before_and_after_updates(hybrid):
    """Some choices of bfloat16 are not those of float32; chance would be 1 in 6."""

    def routed_by_transformers(directory, samples):
        """[tokens read, layers, K] of each sample, of the model in float32, each row's ids sorted."""
        model = engine_runs.reference_model(directory)
        found = []
        for sample in samples:
            ids = torch.tensor([[*sample.prompt_token_ids, *sample.token_ids[:-1]]])
            with torch.no_grad():
                logits = model(ids, output_router_logits=True).router_logits
            chosen = [layer.topk(model.config.num_experts_per_tok).indices for layer in logits]
            found.append(torch.stack(chosen, 1).sort(-1).values.numpy())
        return found

    def agreement(recorded, expected):
        return float((np.sort(recorded, -1) == expected).all(-1).mean())

    (old, new), samples, across, again = hybrid
    for sample in [*samples, *again]:
        tokens = len(sample.prompt_token_ids) + len(sample.token_ids) - 1
        assert sample.routed_experts.shape == (tokens, 4, 2)
        assert sample.routed_experts.dtype == np.uint8
        assert sample.routed_experts.max() < 4
    recorded = [sample.routed_experts for sample in samples]
    expected = routed_by_transformers(old, samples)
    assert agreement(np.concatenate(recorded), np.concatenate(expected)) > 0.9
    others = [agreement(own[1:], right[:-1]) for own, right in zip(recorded, expected, strict=True)]
    assert np.mean(others) < 0.6  # one token off
    assert agreement(np.concatenate(recorded)[:, ::-1], np.concatenate(expected)) < 0.6  # other layers
    # all was computed again with the new weights; what was sampled with the old keeps their choices
    (_, first), (switch, second) = across.versions
    assert (first, second) == (1, 2)
    read = 3 + switch - 1
    (of_old,), (of_new,) = (routed_by_transformers(path, [across]) for path in (old, new))
    assert agreement(across.routed_experts[:read], of_old[:read]) > 0.8
    assert agreement(across.routed_experts[:read], of_new[:read]) < 0.6
    assert agreement(across.routed_experts[read:], of_new[read:]) > 0.8
    assert agreement(again[0].routed_experts, routed_by_transformers(new, again)[0]) > 0.8


@pytest.mark.timeout(900)  # it starts three engines
def test_cached_turns_change_no_bit_of_a_conversation(tmp_path):
    """vLLM keeps a delta net's state at every 64th token of a prompt."""
    old, new = (make_qwen3_next(tmp_path / str(seed), seed) for seed in (0, 1))

    def asked(prompts, turn):
        return [
            SampleRequest(token_ids(prompt), 10 * turn + number, 30, temperature=temperature)
            for number, prompt in enumerate(prompts)
        ]

    def unrecorded(samples):
        absent = [(s.routed_experts == no_expert(s.routed_experts)).all((1, 2)) for s in samples]
        counts = [int(rows.sum()) for rows in absent]
        assert all(rows[:count].all() for rows, count in zip(absent, counts, strict=True))
        return counts

    def bits(samples):
        return [(sample.token_ids.tolist(), sample.logprobs.tolist()) for sample in samples]

    caches = "enable_prefix_caching="
    with (
        recording_engine(old, tmp_path / "0.log", "bfloat16", f"{caches}true", context=512) as caching,
        recording_engine(old, tmp_path / "1.log", "bfloat16", f"{caches}false", context=512) as plain,
        recording_engine(new, tmp_path / "2.log", "bfloat16", f"{caches}false", context=512) as fresh,
    ):
        for temperature in (0.0, 1.0):
            draw, before = np.random.default_rng([7, int(temperature)]), [0, 0, 0]  # cached of each prompt
            prompts = [draw.integers(2, 64, length) for length in (60, 65, 150)]
            for turn in range(4):  # past blocks of the cache that a response filled
                requests = asked(prompts, turn)
                ours = caching.generate(requests, version=0, timeout=TIMEOUT)
                theirs = plain.generate(requests, version=0, timeout=TIMEOUT)
                assert bits(ours) == bits(theirs), (temperature, turn)
                assert (unrecorded(ours), unrecorded(theirs)) == (before, [0, 0, 0]), (temperature, turn)
                for one, other, first in zip(ours, theirs, before, strict=True):
                    assert np.array_equal(one.routed_experts[first:], other.routed_experts[first:]), (
                        temperature,
                        turn,
                    )
                before = [(len(prompt) - 1) // 64 * 64 for prompt in prompts]
                prompts = [
                    np.concatenate([prompt, sample.token_ids, draw.integers(2, 64, 50)])
                    for prompt, sample in zip(prompts, ours, strict=True)
                ]
            assert all(before)
        source = CheckpointSource(new)
        update(connect(caching, source), caching, source, 1)
        requests = asked(prompts, 3)
        ours = caching.generate(requests, version=1, timeout=TIMEOUT)
        theirs = fresh.generate(requests, version=0, timeout=TIMEOUT)
    assert unrecorded(ours) == [0, 0, 0], "the old policy's cache is gone"
    assert bits(ours) == bits(theirs)


@pytest.mark.world
def test_replaying_an_engines_routing_brings_log_probs_closer(hybrid):
    """Under TP2 and EP2: the trainer computes in float32, the engine in bfloat16."""
    (old, _), samples, _, _ = hybrid
    rows = [
        TrainSequence(
            sample.prompt_token_ids, sample.token_ids, sample.loss_mask,
            advantage=1.0 if number % 2 else -1.0, weight=1 / len(samples), prompt_index=number, group=number,
            index=0, rollout_logprobs=sample.logprobs, routed_experts=sample.routed_experts,
        )
        for number, sample in enumerate(samples)
    ]  # fmt: skip
    configs = [replaying(layout(tp=2, ep=2), rollout=replays) for replays in (False, True)]
    (alone, *_), (replayed, *_) = run_ranks(all_updated, 2, old, configs, rows, timeout=600)[0]
    # .72 of it on an AMD EPYC; what bfloat16 leaves differs between processors
    assert replayed["logprob_diff_abs_mean"] < 0.85 * alone["logprob_diff_abs_mean"]
    assert replayed["routing_live"] == 0
    assert 0 < replayed["routing_changed"] < 0.1


@pytest.mark.ray
def test_a_trainer_that_replays_takes_every_choice_from_its_engine(tmp_path):
    """Two trainers, TP2 and EP2. So few tokens say nothing of how much closer log-probs come: bfloat16 moves
    them more than the routing that changes."""
    loop = "--num-rollout 2 --rollout-batch-size 8 --n-samples-per-prompt 4 --eval-num-prompts 0"
    loop += " --num-steps-per-rollout 2 --use-rollout-routing-replay --use-routing-replay"
    status, output = finished(start_script(tmp_path / "run", *loop.split()), timeout=900)
    assert status == 0, output[-5000:]
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 2
    assert any("grad_norm" in row for row in rows), "a step may sample groups of equal rewards alone"
    for row in rows:
        assert row["routing_live"] == 0
        assert row["routing_changed"] < 0.2  # of so few tokens, a processor may route all as the engine did
