"""Our engine alone: does it sample what the model says, the same for the same seeds, with log-probs that
transformers and the trainer confirm?"""

import time

import numpy as np
from job import check
from references import free_memory, judge_samples
from training import start_policy
from vllm_engine import TIMEOUT_S, config_of, only_with, open_engine, requests_of, sequences_of

REPEATED = 0.5  # least share of first tokens that the same seeds give again; other seeds give hardly any


def run(job):
    config = config_of(job, "qwen3")
    count, tokens = (64, 128) if job.on_gpu else (64, 32)
    model = config.model.hf_checkpoint
    with open_engine(job, config) as engine:

        def sampled(**how):
            requests = requests_of(model, count, tokens, **how)
            started = time.perf_counter()
            samples = engine.generate(requests, version=0, timeout=TIMEOUT_S)
            return samples, time.perf_counter() - started

        first, first_seconds = sampled()
        again, seconds = sampled()
        cold, _ = sampled(seed=1, temperature=0.7)
        sure, _ = sampled(seed=2, top_k=1)
    repeated = share_equal(first, again)
    speed = count * tokens / seconds
    job.note(
        requests=count, tokens_per_request=tokens, seconds=[first_seconds, seconds], tokens_per_second=speed,
        same_seeds=repeated, assumptions=assumptions(first, sure, tokens),
    )  # fmt: skip
    samples = [*first, *cold[: count // 4]]
    policy, _ = start_policy(config)
    trained = policy.logprobs(sequences_of(samples))
    free_memory()
    found = judge_samples(job, config, samples, trained)
    job.note(logprobs=found, summary=summary(job, speed, found, repeated))
    wrong = [name for name, holds in job.found["assumptions"].items() if not holds]
    check(not wrong, f"vLLM does not do what this project takes for granted: {', '.join(wrong)}")
    check(repeated["first_tokens"] >= (REPEATED if job.on_gpu else 1.0), f"seeds are not kept: {repeated}")
    check(not found["problem"], found["problem"])


def share_equal(ours, theirs):
    """Return the shares of tokens, first tokens and whole responses that are equal in both."""
    equal = [one.token_ids == other.token_ids for one, other in zip(ours, theirs, strict=True)]
    firsts, wholes = (float(np.mean(part)) for part in ([e[0] for e in equal], [e.all() for e in equal]))
    return {"tokens": float(np.concatenate(equal).mean()), "first_tokens": firsts, "responses": wholes}


def assumptions(samples, sure, tokens):
    """Return what this project takes for granted about vLLM's records, and whether it holds."""
    return {
        "every response has the requested length": all(len(one.token_ids) == tokens for one in samples),
        "flat_logprobs: a log-prob for every token": all(len(one.logprobs) == tokens for one in samples),
        "processed_logprobs: with top-k 1 every log-prob is 0": all(not one.logprobs.any() for one in sure),
        "weight_versions: version 0 wrote every token": all(one.versions == ((0, 0),) for one in samples),
    }


def summary(job, speed, found, repeated):
    engine, trainer = found["engine"]["mean"], found["engine_to_trainer"]["mean"]
    how = f"{job.found['vllm']['model_runner']} runner{only_with(job)}"
    errors = f"log-probs {engine:.1e} from transformers', {trainer:.1e} from the trainer's"
    return f"{speed:,.0f} tokens/s ({how}), {errors}; same seeds: {repeated['tokens']:.1%} of tokens again"
