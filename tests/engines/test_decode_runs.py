"""Engines on CPUs sample the same whether a step is one token or several, and whoever calls the layers."""

import os
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_ibpo.basics.records import SampleRequest, token_ids
from megatron_ibpo.engines.vllm.engine import STAND_INS, _environment
from megatron_ibpo.engines.vllm.engine_process import SamplingEngine
from megatron_ibpo.engines.vllm.messages import NumberedRequest
from megatron_ibpo.engines.vllm.settings import engine_settings
from megatron_ibpo.models import read_hf_config
from support.engine_runs import make_config, make_requests

pytestmark = [pytest.mark.engine, pytest.mark.forked]
MOST_RUNNING, JOIN_AFTER = 40, 21


def engine_of(checkpoint, dtype, scratch, is_interrupted=lambda: False, **changes):
    """Return an engine in this process."""
    rollout = make_config(scratch, dtype).rollout
    rollout.parameters["vllm_max_num_seqs"] = MOST_RUNNING
    shape = read_hf_config(checkpoint)
    settings = engine_settings(rollout, checkpoint, shape, "gloo", gpus=(), num_threads=1)
    os.environ |= _environment(os.environ, settings, scratch)
    sys.path.insert(0, str(STAND_INS))
    return SamplingEngine(replace(settings, **changes), is_interrupted)


def requests_of_all_kinds():
    """Return more requests than run at once, some of them greedy, some whose tokens need further blocks of
    the cache, and some that share a prompt."""
    draw = np.random.default_rng(0)
    requests = make_requests(50)
    requests += [replace(request, temperature=0.0) for request in make_requests(10, seed=1)]
    for length in (110, 119, 126, 127, 128, 129):
        prompt = token_ids(draw.integers(2, 64, length))
        requests += [SampleRequest(prompt, seed, max_tokens) for seed, max_tokens in enumerate((1, 7, 40))]
    return requests


def sampled(engine, most_tokens):
    """Return what the engine samples with so many tokens per step at most, and how many each step took."""
    requests = [NumberedRequest(number, request) for number, request in enumerate(requests_of_all_kinds())]
    engine.submit(0, requests[:-5])
    finished, steps = [], []
    while engine.busy:
        engine._runs.longest = min(most_tokens, JOIN_AFTER - sum(steps)) if requests else most_tokens
        finished += engine.step()
        steps.append(engine.num_tokens)
        if sum(steps) == JOIN_AFTER:  # some join running ones, in the same batch whatever a step samples
            engine.submit(0, requests[-5:])
            requests = []
    assert engine._llm.engine_core.engine_core.scheduler.kv_cache_manager.usage == 0, "blocks are left"
    return {sample.number: sample for sample in finished}, steps


def assert_equal(samples, expected, tolerance):
    assert samples.keys() == expected.keys()
    for number, sample in samples.items():
        other = expected[number]
        assert sample.token_ids.tolist() == other.token_ids.tolist(), number
        assert sample.finish_reason == other.finish_reason, number
        assert sample.versions == other.versions, number
        np.testing.assert_allclose(sample.logprobs, other.logprobs, atol=tolerance, rtol=0)


def call_layers_by_torch(model):
    """Undo what `direct_layers` did to this process."""
    from torch.nn import Module

    from megatron_ibpo.engines.vllm import direct_layers

    is_called = {kind for kind in map(type, model.modules()) if "__call__" in vars(kind)}
    assert {kind.__name__ for kind in is_called} > {"Attention", "SiluAndMul", "VocabParallelEmbedding"}
    for kind in is_called:
        if vars(kind)["__call__"] in (getattr(kind, "forward", None), direct_layers._call_chosen_method):
            kind.__call__ = Module.__call__
    changed: list[Any] = [direct_layers.ColumnParallelLinear, direct_layers.RowParallelLinear]
    for layer in (*changed, direct_layers.Attention):
        layer.forward = layer.forward.__wrapped__
    for module in model.modules():
        if isinstance(module, direct_layers.SiluAndMul):
            module._forward_method = module.forward_native


def test_attention_samples_alike_in_runs_and_whoever_calls_layers(models, tmp_path):
    answers = []
    engine = engine_of(models["dense"], "float32", tmp_path, lambda: bool(answers) and answers.pop(0))
    expected, single_steps = sampled(engine, 1)
    samples, steps = sampled(engine, 16)
    assert {sample.finish_reason for sample in samples.values()} == {"stop", "length"}
    assert set(single_steps) == {1}
    assert max(steps) > 4
    assert len(steps) < len(single_steps)
    assert_equal(samples, expected, 1e-5)

    answers += [False, False, True]  # there is something else to do after three tokens
    engine.submit(0, [NumberedRequest(0, SampleRequest(token_ids([5, 6, 7]), 2, 12))])
    engine.step()  # its prompt's
    engine.step()
    assert (engine.num_tokens, answers) == (3, [])
    while engine.busy:
        engine.step()

    call_layers_by_torch(engine._runs._runner.model)
    by_torch, _ = sampled(engine, 16)
    assert_equal(samples, by_torch, 0.0)


def test_delta_nets_sample_alike_in_runs_and_whoever_calls_layers(models, tmp_path):
    """Requests that end at their length alone run in the same batches, and to the same bits."""
    engine = engine_of(models["next"], "bfloat16", tmp_path, eos_token_ids=())
    expected, single_steps = sampled(engine, 1)
    samples, steps = sampled(engine, 16)
    assert len(steps) < len(single_steps)
    assert_equal(samples, expected, 0.0)
    call_layers_by_torch(engine._runs._runner.model)
    by_torch, _ = sampled(engine, 16)
    assert_equal(samples, by_torch, 0.0)
