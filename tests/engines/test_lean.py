"""The lean back end: a policy that samples in the trainer's own process."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

from megatron_ibpo.basics.records import SampleRequest, token_ids
from megatron_ibpo.basics.sampling_mask import unrestricted
from megatron_ibpo.config import ConfigError
from megatron_ibpo.engines import EngineError
from megatron_ibpo.engines.lean import LeanEngine, check_shape, checkpoint_weights
from megatron_ibpo.engines.registry import sampling_precision
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.run.in_one_process import InOneProcess
from megatron_ibpo.run.resolve import read_foundation, resolve, settle
from megatron_ibpo.run.settings import check_evaluation, check_run, check_settings, parse_config
from support.engine_runs import difference, ids_of, make_requests, reference_logprobs, reference_model
from support.paths import ROOT
from support.tiny_models import EOS_ID, make_qwen3

RECIPE = ROOT / "examples/recipes/tiny_qwen3_study.yaml"
TINY = ROOT / "examples/tiny_qwen3"
CONTEXT = 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("models") / "dense", 0)


@pytest.fixture(scope="module")
def engine(checkpoint):
    return opened(checkpoint)


def opened(directory, most_at_once=64):
    shape = read_hf_config(directory)
    engine = LeanEngine(shape, (EOS_ID,), max_context=CONTEXT, most_at_once=most_at_once)
    engine.load(checkpoint_weights(shape, directory), 0)
    return engine


def reference(directory, request, tokens):
    """Logits of transformers before each of the sampled tokens."""
    ids = torch.tensor([[*request.prompt_token_ids, *tokens]])
    with torch.no_grad():
        return reference_model(directory)(ids).logits[0, len(request.prompt_token_ids) - 1 : -1]


@pytest.mark.parametrize("tie", [False, True])
def test_greedy_and_drawn_samples_match_transformers(tmp_path, tie):
    directory = make_qwen3(tmp_path / "dense", 0, tie=tie)
    engine = opened(directory)
    greedy, drawn = (make_requests(12, seed=1, temperature=temperature) for temperature in (0.0, 0.7))
    likeliest = engine.generate(greedy)
    for request, sample in zip(greedy, likeliest, strict=True):
        logits = reference(directory, request, sample.token_ids)
        assert sample.token_ids.tolist() == logits.argmax(-1).tolist()
    for requests, samples in ((greedy, likeliest), (drawn, engine.generate(drawn))):
        expected = reference_logprobs(directory, requests, samples, torch.float64)  # its float32 errs as much
        assert difference([sample.logprobs for sample in samples], expected).max() < 1e-5


def test_samples_end_at_eos_or_length_and_follow_their_seed(engine):
    requests = make_requests(60, seed=2)
    samples = engine.generate(requests)
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for request, sample in zip(requests, samples, strict=True):
        assert len(sample.logprobs) == len(sample.token_ids) == len(sample.loss_mask) <= request.max_tokens
        assert EOS_ID not in sample.token_ids[:-1]
        assert (sample.token_ids[-1] == EOS_ID) == (sample.finish_reason == "stop")
        assert sample.finish_reason == "stop" or len(sample.token_ids) == request.max_tokens
        assert sample.versions == ((0, 0),)
    full = token_ids(np.full(CONTEXT - 3, 7))
    inside = engine.generate([SampleRequest(full, seed, max_tokens=30) for seed in (*range(20), 0)])
    assert max(len(sample.token_ids) for sample in inside) == 3, "the context ends"
    assert inside[0].token_ids.tolist() == inside[-1].token_ids.tolist()
    assert len({tuple(sample.token_ids) for sample in inside}) > 5


def test_samples_do_not_depend_on_other_requests_or_their_order(checkpoint, engine):
    requests = make_requests(20, seed=3)
    for place, changes in enumerate(({"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5})):
        requests[place] = replace(requests[place], **changes)
    together = engine.generate(requests)
    order = np.random.default_rng(0).permutation(20)
    shuffled = engine.generate([requests[index] for index in order])
    for place, index in enumerate(order):
        assert shuffled[place].token_ids.tolist() == together[index].token_ids.tolist()
        assert np.abs(shuffled[place].logprobs - together[index].logprobs).max() < 1e-5
    assert ids_of(opened(checkpoint, most_at_once=7).generate(requests)) == ids_of(together)
    assert ids_of(engine.generate([request])[0] for request in requests[:10]) == ids_of(together[:10])


@pytest.mark.parametrize(("cut", "kept"), [({}, 64), ({"top_k": 3}, 3), ({"top_p": 0.8}, None)])
def test_tokens_come_as_often_as_the_distribution_says(engine, checkpoint, cut, kept):
    """4,000 draws of a token: each frequency within four standard deviations of what both cuts leave."""
    prompt = token_ids([3, 9, 27])
    requests = [SampleRequest(prompt, seed, max_tokens=1, temperature=2.0, **cut) for seed in range(4000)]
    drawn = engine.generate(requests)
    chances = (reference(checkpoint, requests[0], [0])[0] / 2.0).softmax(-1).double().numpy()
    order = np.argsort(-chances)
    if kept is None:  # the fewest that reach .8 together
        kept = int(np.searchsorted(np.cumsum(chances[order]), 0.8)) + 1
    left = np.where(np.isin(np.arange(64), order[:kept]), chances, 0)
    left /= left.sum()
    counts = np.bincount([sample.token_ids[0] for sample in drawn], minlength=64)
    assert not counts[left == 0].any()
    assert (np.abs(counts - 4000 * left) <= 4 * np.sqrt(4000 * left * (1 - left)) + 1).all()
    for sample in drawn[:50]:
        assert sample.logprobs[0] == pytest.approx(np.log(left[sample.token_ids[0]]), abs=1e-5)


def nucleus(logits, request):
    """Return the ids that top-k and top-p leave, by trying them one after the other; None if rounding may
    decide about one."""
    chances = (logits.double() / request.temperature).softmax(-1).tolist()
    order = sorted(range(len(chances)), key=lambda token: -chances[token])
    order = order[: request.top_k] if request.top_k > 0 else order
    whole, mass, kept = sum(chances[token] for token in order), 0.0, []
    for token in order:
        if abs(mass / whole - request.top_p) < 1e-4:
            return None
        if mass / whole >= request.top_p:
            break
        kept.append(token)
        mass += chances[token]
    return sorted(kept)


def test_a_sampling_mask_holds_the_ids_that_normalise_each_logprob(engine, checkpoint):
    both, greedy = {"top_p": 0.9, "top_k": 20}, {"temperature": 0.0, "top_p": 0.5}
    cuts = ({"top_k": 3}, {"top_p": 0.5}, both, {"top_p": 0.95}, {}, greedy)
    asked = [
        replace(request, **{"temperature": 1.5} | cut)
        for request, cut in zip(make_requests(24, seed=5), cuts * 4, strict=True)
    ]
    tried = 0
    for request, sample in zip(asked, engine.generate(asked), strict=True):
        mask, logits = sample.sampling_mask, reference(checkpoint, request, sample.token_ids)
        assert (mask is not None) == request.is_cut, "greedy samples are not cut, as in vLLM"
        mask = unrestricted(len(sample.token_ids)) if mask is None else mask
        assert len(mask) == len(sample.token_ids)
        logprobs = (logits / (request.temperature or 1.0)).log_softmax(-1)
        for place, (token, own) in enumerate(zip(sample.token_ids, logprobs, strict=True)):
            left = mask[place].tolist() or list(range(64))
            assert token in left
            assert sample.logprobs[place] == pytest.approx(
                float(own[token] - own[left].logsumexp(0)), abs=1e-5
            )
            if request.is_cut and (wanted := nucleus(logits[place], request)) is not None:
                tried += 1
                assert left == wanted, (request, place)
    assert tried > 150


def test_tokens_tied_with_the_last_of_top_k_are_sampled(checkpoint):
    shape = read_hf_config(checkpoint)
    weights = dict(checkpoint_weights(shape, checkpoint))
    weights["lm_head.weight"][1::2] = weights["lm_head.weight"][::2]  # pairs of equal tokens
    engine = LeanEngine(shape, (EOS_ID,), max_context=CONTEXT, most_at_once=64)
    engine.load(iter(weights.items()), 0)
    for sample in engine.generate([replace(request, top_k=1) for request in make_requests(5, seed=6)]):
        assert (sample.sampling_mask.counts == 2).all()
        assert sample.logprobs == pytest.approx(np.log(0.5), abs=1e-6)
        assert (sample.sampling_mask.token_ids[::2] // 2 == sample.token_ids // 2).all()


def test_a_position_of_which_nothing_was_cut_has_no_ids(engine):
    (sample,) = engine.generate([SampleRequest(token_ids([5, 6, 7]), 0, 20, temperature=2.0, top_k=64)])
    assert not sample.sampling_mask.counts.any()


def test_the_engine_answers_an_event_loop_by_request_number(engine):
    requests = make_requests(6, seed=4)

    async def ask():
        ran = []
        asyncio.get_running_loop().call_soon(ran.append, "submit")
        assert (await engine.take(1.0), ran) == ([], ["submit"]), "who takes first lets others ask"
        await engine.submit([(10 + n, request) for n, request in enumerate(requests[:3])], 0)
        await engine.submit([(20 + n, request) for n, request in enumerate(requests[3:])], 0)
        await engine.abort([21])
        return dict(await engine.take(1.0)), await engine.take(1.0)

    found, rest = asyncio.run(ask())
    assert (sorted(found), rest) == ([10, 11, 12, 20, 22], [])
    assert found[22].token_ids.tolist() == engine.generate([requests[5]])[0].token_ids.tolist()


def test_new_weights_are_copied_and_old_or_oversized_ones_refused(checkpoint, tmp_path):
    engine, request = opened(checkpoint), SampleRequest(token_ids([5, 6, 7]), 0, 20, temperature=0.0)
    with pytest.raises(EngineError, match="policy version 1, the engine has 0"):
        engine.generate([request], version=1)
    before = engine.generate([request])
    other = make_qwen3(tmp_path / "other", 1)
    weights = {n: tensor.clone() for n, tensor in checkpoint_weights(read_hf_config(other), other)}
    engine.load(weights.items(), 1)
    after = engine.generate([request], version=1)
    assert ids_of(before) != ids_of(after)
    assert after[0].versions == ((0, 1),)
    for tensor in weights.values():
        tensor.zero_()  # as training on would change them
    assert ids_of(engine.generate([request], version=1)) == ids_of(after)
    with pytest.raises(EngineError, match=r"at most 4 M parameters, and this one has 5\.0 M; take vllm"):
        engine.load([("model.embed_tokens.weight", torch.zeros(5_000_000))], 0)


LEAN = ["--config", str(RECIPE), "--hf-checkpoint", str(TINY), "--rollout-backend", "lean"]


def test_everything_that_one_process_cannot_do_is_refused_at_once():
    processes = {"--num-trainers 2": "one process trains", "--ray-address auto": "it uses no Ray"}
    processes |= {"--load-debug-rollout-data .": "a replay samples nothing"}
    sampling = {"--max-staleness 1": "one process cannot sample while it trains"}
    for because in (sampling, processes):
        every = [f"--rollout-backend lean with {flag.split()[0]}: {why}" for flag, why in because.items()]
        for check in (check_run, check_settings):
            with pytest.raises(ConfigError) as refused:
                check(parse_config([*LEAN, *" ".join(because).split()]))
            assert str(refused.value).split("\n  ")[1:] == every, because


def test_settings_of_vllm_are_refused():
    with pytest.raises(ConfigError, match=r"--rollout-backend lean has no .*--rollout-backend vllm has"):
        parse_config([*LEAN, "--vllm-arg", "block_size=16"])


def test_one_process_trains_dense_models_only_on_one_rank():
    config = parse_config([*LEAN, "--eval-prompt-data", "reasoning_gym://leg_counting"])
    backend, foundation = InOneProcess(), read_foundation(config)
    backend.check(config, foundation.shape)
    alone = resolve(settle(config, foundation, None), foundation, backend.place(config)).config
    assert (alone.cluster.num_trainers, sampling_precision(alone.rollout).dtype) == (1, "float32")
    two = parse_config([*LEAN, "--tensor-model-parallel-size", "2"])
    with pytest.raises(ValueError, match=r"TP x PP = 2 does not divide the world size \(1\)"):
        InOneProcess().check(two, read_hf_config(TINY))
    with pytest.raises(ValueError, match="dense models built like qwen3, not qwen3_next with exp"):
        check_shape(read_hf_config(ROOT / "examples/tiny_qwen3_next"))
    check_run(config)
    with pytest.raises(ConfigError, match=r"--rollout-backend lean: only for runs that train; .* with vllm$"):
        check_evaluation(config)


@pytest.mark.ray
@pytest.mark.slow  # tests/examples/test_learning.py runs one too
def test_a_resumed_lean_run_ends_as_if_never_stopped(tmp_path):
    def lean_run(run_dir, *flags):
        usual = "--rollout-backend lean --rollout-batch-size 4 --n-samples-per-prompt 4 --eval-num-prompts 8 "
        usual += "--advantage-estimator ibpo --num-rollout 3 --save"
        command = [sys.executable, "-m", "megatron_ibpo.commands.train", "--config", str(RECIPE)]
        command += ["--run-dir", str(run_dir), *usual.split(), *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]

    whole = lean_run(tmp_path / "whole", "--check-weight-update-equal")
    assert [row["kind"] for row in whole] == ["evaluation", "step", "step", "step", "evaluation"]
    for row in whole[1:4]:
        assert row["logprob_diff_abs_max"] < 1e-4  # of trainer and sampler
        assert row["corrections"] > 0
        assert row["grad_norm"] > 0
    assert yaml.safe_load((tmp_path / "whole/config.yaml").read_text())["rollout-backend"] == "lean"
    summary = json.loads((tmp_path / "whole/summary.json").read_text())
    assert summary["status"] == "finished"
    assert 1.5 < summary["break_even"]["price"] < 5
    first = lean_run(tmp_path / "parts", "--budget", "1", "--budget-unit", "flops")
    assert [row["step"] for row in first if row["kind"] == "step"] == [1]
    rest = lean_run(tmp_path / "parts", "--load", str(tmp_path / "parts"))
    assert [row["reward"] for row in rest if row["kind"] == "step"][-1] == whole[-2]["reward"]
    assert rest[-1]["accuracy"] == whole[-1]["accuracy"]
