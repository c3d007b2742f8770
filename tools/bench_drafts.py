"""What corrections gain where vLLM drafts their tokens from their prompts, and that their distribution stays.

    python tools/bench_drafts.py --hf-checkpoint examples/tiny_qwen3 --rollouts runs/NAME/rollouts

samples the recorded corrections' prompts again on CPUs, in float32, with and without drafts. Seconds are the
medians of turns that alternate. Tokens that greedy sampling changes are compared by transformers' logits.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.records import Sample, SampleRequest
from megatron_ibpo.basics.versions import machine
from megatron_ibpo.config import Config, RolloutConfig
from megatron_ibpo.engines.registry import on_device, start_instrument
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.report import load_step

TIMEOUT = 400.0
TIE = 1e-4
"""Difference of the two best logits below which float32 does not tell them apart."""
HOT = 2.0
"""Temperature of the test of the distribution, the highest that vLLM takes: at 1 a trained policy is sure of
most tokens."""


@dataclass
class Arguments:
    hf_checkpoint: Path
    """A dense model."""
    rollouts: Path
    """Directory of recorded rollouts with corrections (--save-debug-rollout-data)."""
    prompts: int = 64
    """Most corrections to sample again."""
    turns: int = 3
    draws: int = 20_000
    """Draws for the test of the distribution; 0: none."""
    drafts: tuple[str, ...] = ("1 3 4", "2 4 4", "2 4 8", "3 5 8")
    """Shortest and longest n-gram to look up, and tokens to draft."""
    save: Path | None = None


def correction_requests(directory: Path, most: int) -> list[SampleRequest]:
    """Return requests for the recorded corrections, spread evenly over the recording."""
    files = sorted(directory.glob("step_*.json"))
    groups = [group for file in files for group in load_step(file).groups]
    samples = [correction.response for group in groups for correction in group.corrections]
    if not samples:
        raise ValueError(f"--rollouts {directory}: no correction in {len(files)} files step_*.json")
    longest = max(len(sample.token_ids) for sample in samples)
    picked = [
        samples[i] for i in np.linspace(0, len(samples) - 1, min(most, len(samples))).round().astype(int)
    ]
    return [SampleRequest(sample.prompt_token_ids, seed, longest) for seed, sample in enumerate(picked)]


class Engine:
    """vLLM on one CPU thread, with or without drafts."""

    def __init__(self, hf_dir: Path, speculation: Mapping[str, Any] | None, log: Path):
        arguments = () if speculation is None else (f"speculative_config={json.dumps(speculation)}",)
        parameters = {"vllm_kv_cache_bytes": 512 * 1024**2, "vllm_arg": arguments}
        shape = read_hf_config(hf_dir)
        context = min(1024, shape.max_position_embeddings)
        config = Config(rollout=RolloutConfig(rollout_max_context_len=context, parameters=parameters))
        rollout = on_device(config, shape, on_gpu=False).rollout
        self._engine = start_instrument(rollout, hf_dir, shape, on_gpu=False, num_threads=1, log=log)
        self._engine.wait_ready(TIMEOUT)

    def sample(self, requests: Sequence[SampleRequest]) -> tuple[list[Sample], float, tuple[int, int]]:
        """Return the samples, the seconds taken, and (tokens drafted, of these accepted)."""
        started = time.perf_counter()
        samples = self._engine.generate(requests, version=0, timeout=TIMEOUT)
        seconds = time.perf_counter() - started
        drafted, accepted = self._engine.call("drafts", timeout=TIMEOUT)
        return samples, seconds, (drafted, accepted)

    def close(self) -> None:
        self._engine.close()


@torch.no_grad()
def compare(model: Any, plain: Sequence[Sample], drafted: Sequence[Sample]) -> dict[str, int]:
    """Count greedy samples that differ, by whether the two tokens at the first difference tie."""
    counts = Counter(samples=len(plain), equal=0, ties=0, wrong=0)
    for plain_sample, drafted_sample in zip(plain, drafted, strict=True):
        ours, theirs = plain_sample.token_ids.tolist(), drafted_sample.token_ids.tolist()
        if ours == theirs:
            counts["equal"] += 1
            continue
        place = next(i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
        ids = torch.tensor([[*plain_sample.prompt_token_ids.tolist(), *ours[:place]]])
        best = model(ids).logits[0, -1].topk(2).values
        counts["ties" if best[0] - best[1] < TIE else "wrong"] += 1
    return dict(counts)


@torch.no_grad()
def logprob_gap(model: Any, samples: Sequence[Sample]) -> float:
    """Return the largest difference of a sampled token's log-prob from transformers'."""
    worst = 0.0
    for sample in samples:
        prompt = len(sample.prompt_token_ids)
        ids = torch.tensor([[*sample.prompt_token_ids.tolist(), *sample.token_ids.tolist()]])
        logprobs = (
            model(ids).logits[0, prompt - 1 : -1].log_softmax(-1).gather(1, ids[0, prompt:, None])[:, 0]
        )
        gap = (logprobs - torch.from_numpy(sample.logprobs)).abs().max()
        worst = torch.maximum(torch.tensor(worst), gap).item()  # NaN too
    return worst


@torch.no_grad()
def chi_square(model: Any, engine: Engine, request: SampleRequest, draws: int) -> dict[str, float]:
    """Compare the first two tokens of draws, the second of which may be drafted, with their exact
    probabilities at a high temperature. Cells that expect fewer than 5 draws are one."""
    ids = torch.tensor([request.prompt_token_ids.tolist()])
    first_V = (model(ids).logits[0, -1].double() / HOT).softmax(-1)
    vocabulary = len(first_V)
    continued = torch.cat([ids.expand(vocabulary, -1), torch.arange(vocabulary)[:, None]], 1)
    second_VV = (model(continued).logits[:, -1].double() / HOT).softmax(-1)
    expected = (first_V[:, None] * second_VV * draws).numpy()
    requests = [replace(request, seed=seed, max_tokens=4, temperature=HOT) for seed in range(draws)]
    samples, _, (drafted, accepted) = engine.sample(requests)
    counts_VV, expected_VV = np.zeros_like(expected), expected
    for sample in samples:
        first, *second = sample.token_ids.tolist()[:2]
        if not second and expected_VV[first, 0] < expected_VV[first].sum():  # the first token ends a response
            expected_VV[first] = [expected_VV[first].sum(), *[0.0] * (vocabulary - 1)]
        counts_VV[first, second[0] if second else 0] += 1
    large_VV = expected_VV >= 5
    cells = [*zip(counts_VV[large_VV], expected_VV[large_VV], strict=True)]
    cells.append((counts_VV[~large_VV].sum(), expected_VV[~large_VV].sum()))
    value = sum((count - expectation) ** 2 / expectation for count, expectation in cells)
    counts = {"draws": draws, "drafted": drafted, "accepted": accepted, "cells": len(cells)}
    return counts | {"chi_square": value, "p": float(chi2.sf(value, len(cells) - 1))}


def speculation_of(text: str) -> dict[str, Any]:
    shortest, longest, count = map(int, text.split())
    lookup = {"prompt_lookup_min": shortest, "prompt_lookup_max": longest}
    return {"method": "ngram", "num_speculative_tokens": count, **lookup}


def measure(
    arguments: Arguments, text: str, requests: Sequence[SampleRequest], model: Any, engines: Sequence[Engine]
) -> dict[str, Any]:
    """Return what one setting of the drafts gains, between an engine without drafts and one with them."""
    for engine in engines:
        engine.sample(requests)  # warm
    turns = [[engine.sample(requests) for engine in engines] for _ in range(arguments.turns)]
    greedy = [engine.sample([replace(r, temperature=0.0) for r in requests])[0] for engine in engines]
    samples, _, (drafted, accepted) = turns[-1][1]
    tokens = sum(len(sample.token_ids) for sample in samples)
    seconds = [statistics.median(turn[side][1] for turn in turns) for side in (0, 1)]
    return {
        "drafts": text,
        "corrections": len(samples),
        "tokens": tokens,
        "accepted_share": accepted / max(1, drafted),
        "drafted_per_token": drafted / tokens,
        "steps_per_token": (tokens - accepted) / tokens,
        "seconds": dict(zip(("plain", "drafts"), seconds, strict=True)),
        "greedy": compare(model, *greedy),
        "logprob_gap": logprob_gap(model, samples[:16]),
        "distribution": chi_square(model, engines[1], requests[0], arguments.draws)
        if arguments.draws
        else None,
    }


def main(arguments: Arguments) -> None:
    from transformers import AutoModelForCausalLM

    requests = correction_requests(arguments.rollouts, arguments.prompts)
    hf_dir, rows = arguments.hf_checkpoint, []
    model: Any = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        plain = Engine(hf_dir, None, Path(scratch) / "plain.log")
        stack.callback(plain.close)
        for text in arguments.drafts:
            drafting = Engine(hf_dir, speculation_of(text), Path(scratch) / "drafts.log")
            try:
                rows.append(measure(arguments, text, requests, model, [plain, drafting]))
            finally:
                drafting.close()
            print(json.dumps(rows[-1]), flush=True)
    if arguments.save is not None:
        arguments.save.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
