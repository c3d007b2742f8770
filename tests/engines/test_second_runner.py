"""vLLM's second model runner, which GPUs take, keeps what this project assumes of it. Here it runs on a CPU,
its Triton kernels on Triton's interpreter; of a GPU nothing is tested."""

import os
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_ibpo.basics.records import SampleRequest, token_ids
from megatron_ibpo.config import Config
from megatron_ibpo.engines import Engine
from megatron_ibpo.engines.vllm.settings import (
    VARIABLE,
    check_runner,
    engine_settings,
    sampling_mask_obstacle,
    uses_second_runner,
)
from megatron_ibpo.models import read_hf_config
from support import engine_runs
from support.engine_runs import CheckpointSource, connect, difference, update
from support.paths import TESTS
from support.tiny_models import make_qwen3_moe

TIMEOUT = 600.0


def test_the_runner_follows_from_the_device_unless_it_is_chosen(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert (uses_second_runner("cuda"), uses_second_runner("cpu")) == (True, False)
    for chosen in ("0", "1"):
        monkeypatch.setenv(VARIABLE, chosen)
        assert {uses_second_runner(device) for device in ("cuda", "cpu")} == {chosen == "1"}


def test_records_of_the_second_runner_are_refused_without_it(monkeypatch):
    config = Config()
    config.rollout.rollout_top_k, config.run.eval_num_prompts = 20, 0
    monkeypatch.setenv(VARIABLE, "0")
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in sampling_mask_obstacle(config, on_gpu=True)
    monkeypatch.delenv(VARIABLE)
    assert sampling_mask_obstacle(config, on_gpu=True) is None
    assert "only on GPUs" in sampling_mask_obstacle(config, on_gpu=False)
    check_runner(second=False, needs_second=False)
    with pytest.raises(RuntimeError, match="vLLM took its first model runner"):
        check_runner(second=False, needs_second=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return [make_qwen3_moe(root / str(seed), seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def engine(checkpoints, tmp_path_factory):
    """An engine of a mixture of experts that records all that it can."""
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(TESTS / "support/second_runner"), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv(VARIABLE, "1")
        log = tmp_path_factory.mktemp("second") / "engine.log"
        rollout = engine_runs.make_config(log.parent, "float32").rollout
        rollout.use_rollout_routing_replay = True
        settings = engine_settings(
            rollout,
            checkpoints[0],
            read_hf_config(checkpoints[0]),
            "gloo",
            gpus=(),
            num_threads=1,
            records_sampling_mask=True,
        )
        with closing(Engine(settings, log)) as engine:
            engine.wait_ready(TIMEOUT)
            assert "Using V2 Model Runner" in log.read_text()
            yield engine


def make_requests(count, **settings):
    return [replace(request, **settings) for request in engine_runs.make_requests(count)]


def left_to_sample_from(logits, request):
    """Return the log-probs after temperature, top-k, and top-p over what top-k left, [tokens, vocabulary];
    minus infinity for what was cut. In float64, one token after the other."""
    rows = []
    for row in (logits.double() / request.temperature).log_softmax(-1):
        order = row.argsort(descending=True)[: request.top_k]
        chances = row[order].softmax(-1)
        order = order[chances.cumsum(-1) - chances < request.top_p]
        rows.append(torch.full_like(row, -torch.inf).index_put((order,), row[order].log_softmax(-1)))
    return torch.stack(rows)


def passes(directory, samples):
    """Yield transformers' logits of each response's tokens, and the experts chosen for all tokens read,
    [tokens, layers, K] with each row's ids sorted."""
    model = engine_runs.reference_model(directory)
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_token_ids, *sample.token_ids[:-1]]])
        with torch.no_grad():
            out = model(ids, output_router_logits=True)
        chosen = [layer.topk(model.config.num_experts_per_tok).indices for layer in out.router_logits]
        yield (
            out.logits[0, len(sample.prompt_token_ids) - 1 :],
            torch.stack(chosen, 1).sort(-1).values.numpy(),
        )


@pytest.mark.engine
@pytest.mark.slow
def test_samples_carry_their_logprobs_sampling_masks_and_experts(engine, checkpoints):
    requests = make_requests(8, top_k=8, top_p=0.8, temperature=0.7)
    samples = engine.generate(requests, version=0, timeout=TIMEOUT)
    for request, sample, (logits, experts) in zip(
        requests, samples, passes(checkpoints[0], samples), strict=True
    ):
        expected = left_to_sample_from(logits, request)
        tokens = torch.tensor(sample.token_ids, dtype=torch.long)
        assert difference([sample.logprobs], [expected.gather(1, tokens[:, None])[:, 0]]).max() < 2e-5
        kept = [row.isfinite().nonzero()[:, 0].tolist() for row in expected]
        assert [sample.sampling_mask[place].tolist() for place in range(len(tokens))] == kept
        assert max(map(len, kept)) > 1
        assert (np.sort(sample.routed_experts, -1) == experts).all()
        assert sample.versions == ((0, 0),)


@pytest.mark.engine
@pytest.mark.slow
def test_tokens_follow_from_seeds_whatever_else_the_engine_samples(engine):
    requests = make_requests(5, top_k=20)
    together = engine.generate(requests, version=0, timeout=TIMEOUT)
    apart = engine.generate(requests[::-2], version=0, timeout=TIMEOUT)
    assert engine_runs.ids_of(apart) == engine_runs.ids_of(together[::-2])
    others = [replace(request, seed=request.seed + 1) for request in requests]
    assert engine_runs.ids_of(engine.generate(others, version=0, timeout=TIMEOUT)) != engine_runs.ids_of(
        together
    )
    greedy = make_requests(3, temperature=0.0)
    likeliest = engine.generate(greedy, version=0, timeout=TIMEOUT)
    assert all((sample.logprobs == 0).all() for sample in likeliest)
    seeds = [replace(request, seed=request.seed + 1) for request in greedy]
    assert engine_runs.ids_of(engine.generate(seeds, version=0, timeout=TIMEOUT)) == engine_runs.ids_of(
        likeliest
    )


@pytest.mark.engine
@pytest.mark.slow
def test_running_requests_continue_on_new_weights_and_record_the_version(engine, checkpoints):
    before, after = map(CheckpointSource, checkpoints)
    transport = connect(engine, after)
    update(transport, engine, before, 1)
    long = [SampleRequest(token_ids([5, 6, seed]), seed, 30, 1.0, top_k=8) for seed in range(3)]
    engine.submit([*enumerate(long), (3, replace(long[0], max_tokens=2))], version=1)
    samples = dict(engine.take(TIMEOUT))  # of the short one at least: the others have as many tokens
    update(transport, engine, after, 2)
    while len(samples) < 4:
        samples.update(engine.take(TIMEOUT))
    across = {number: sample for number, sample in samples.items() if len(sample.versions) == 2}
    assert across, "some were running"
    for number, sample in across.items():
        (first, old), (switch, new) = sample.versions
        assert (first, old, new) == (0, 1, 2)
        tokens = torch.tensor(sample.token_ids, dtype=torch.long)[:, None]
        of_old, of_new = (
            left_to_sample_from(logits, long[number]).gather(1, tokens)[:, 0]
            for path in checkpoints
            for logits, _ in passes(path, [sample])
        )
        expected = torch.cat([of_old[:switch], of_new[switch:]])
        assert difference([sample.logprobs], [expected]).max() < 2e-5
        assert difference([sample.logprobs], [of_new]).max() > 1e-2
