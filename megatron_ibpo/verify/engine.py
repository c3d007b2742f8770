"""Log-probs of sampled tokens: the engine's beside the trainer's."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ibpo.basics.records import Group, Sample, SampleRequest, TrainSequence
from megatron_ibpo.engines.probe import TIMEOUT_S
from megatron_ibpo.run.saving import sleep_engines, wake_engines
from megatron_ibpo.run.state import Run
from megatron_ibpo.verify.reference import Array, differences, loaded, logprobs_of, mean_difference
from megatron_ibpo.verify.rows import Row, measured

FLOOR, SPREADS = 5e-5, 4.0
"""Least bound in nats, and how many times the spread of the engine's precision is right."""
BIN = 8
"""Tokens of a part of a response whose mean difference is looked at."""
FEWEST = 24
"""Tokens that such a mean must have."""

OTHER_TEMPERATURES = (0.5, 0.8, 1.25, 2.0)
"""Factors of the temperature at which samples could have been drawn instead."""
SURE = 13.8
"""Logarithm of a million: chances below its inverse are none."""


def engine_rows(when: str, run: Run, groups: Sequence[Group], hf_dir: Path) -> Iterator[Row]:
    """Compare the log-probs of a step's samples under the weights in `hf_dir`, over all tokens and by their
    place in the response; then the samples with their own probabilities."""
    samples = [sample for group in groups for sample in group.samples if sample.loss_mask.any()]
    sequences = [as_trained(sample) for sample in samples]
    trainer = run.policy.logprobs(sequences)
    gaps = differences([sample.logprobs for sample in samples], trainer, sequences)
    dtype = engine_dtype(run)
    model = loaded(hf_dir, torch.float64)
    exact = logprobs_of(model, sequences)
    spreads = differences(logprobs_of(loaded(hf_dir, dtype), sequences), exact, sequences)
    mean, spread = float(np.concatenate(gaps).mean()), float(np.concatenate(spreads).mean())
    bound = max(FLOOR, SPREADS * spread)
    source = (
        f"{SPREADS:.0f} x the spread of transformers in {str(dtype).removeprefix('torch.')}, {spread:.1e}"
    )
    next_step = "temperature, top-p and top-k of both, the engine's precision, weight updates (arrival)"
    yield measured(
        f"engine: {when}", mean, bound, source,
        f"mean |difference| in nats over {sum(map(len, gaps))} tokens of {len(samples)} samples, largest "
        f"{max(gap.max() for gap in gaps):.1e}", next_step,
    )  # fmt: skip
    largest, place = furthest(gaps)
    allowed, _ = furthest(spreads)
    yield measured(
        f"engine: {when}, by place", largest, max(2 * FLOOR, 2 * SPREADS * max(allowed, spread)), source,
        f"largest mean over {place}", "positions, a cache that outlives its weights, a state not reset",
    )  # fmt: skip
    if all(sample.sampling_mask is None for sample in samples):  # the reference knows no cut distribution
        yield measured(
            f"reference: written {when}", mean_difference(trainer, exact, sequences), bound, source,
            "mean |difference| in nats between the trainer and transformers on the weights that it wrote",
            "the export in Hugging Face format",
        )  # fmt: skip
    yield drawn_row(f"engine: {when}, the draw", model, sequences)


def drawn_row(check: str, model: Any, sequences: Sequence[TrainSequence]) -> Row:
    """Check that tokens are drawn from the distribution that is reported. The ratio of their probability at
    another temperature to that at their own has the mean 1, so a ratio of x or more has a chance of at most
    1/x.

    Args:
        model: transformers' model with the weights that they were sampled with.
    """
    if any(s.sampling_mask is not None for s in sequences):
        return Row(
            check, "not checked", reason="top-p or top-k cuts what is drawn from, which only the engine has"
        )

    def total_logprob(factor: float) -> float:
        scaled = [replace(s, temperature=s.temperature * factor) for s in sequences]
        pairs = zip(logprobs_of(model, scaled), sequences, strict=True)
        return sum(float(logprobs[s.loss_mask].sum()) for logprobs, s in pairs)

    log_ratios = {factor: total_logprob(factor) - total_logprob(1.0) for factor in OTHER_TEMPERATURES}
    likeliest = max(log_ratios, key=lambda factor: log_ratios[factor])
    return measured(
        check, log_ratios[likeliest], SURE, "chance of 1 in a million",
        f"nats by which the samples are likelier at {likeliest:g} times their temperature",
        "temperature and seeds of the engine's sampler",
    )  # fmt: skip


def engine_samples(run: Run, requests: Sequence[SampleRequest]) -> list[Sample]:
    """Return what the first engine samples for the requests under its present weights."""
    assert run.engines is not None
    wake_engines(run)
    samples = run.engines.idle(0).generate(requests, version=run.engines.version, timeout=TIMEOUT_S)
    sleep_engines(run)
    return samples


def as_trained(sample: Sample) -> TrainSequence:
    """Return the sample as a sequence for which trainers compute log-probs."""
    return TrainSequence(
        sample.prompt_token_ids, sample.token_ids, sample.loss_mask, 0.0, 0.0, 0, 0, 0,
        temperature=sample.temperature, sampling_mask=sample.sampling_mask,
    )  # fmt: skip


def engine_dtype(run: Run) -> torch.dtype:
    """Return the precision that the engine computes in."""
    name = run.config.rollout.parameters.get("vllm_dtype", "float32")
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def furthest(gaps: Sequence[Array]) -> tuple[float, str]:
    """Return the largest mean over a part, and that part: positions, or responses of a length."""
    parts = {
        f"tokens {start} to {start + BIN - 1}": [gap[start : start + BIN] for gap in gaps]
        for start in range(0, max(map(len, gaps)), BIN)
    }
    by_length = sorted(gaps, key=len)
    for quarter in range(4):
        part = by_length[quarter * len(gaps) // 4 : (quarter + 1) * len(gaps) // 4]
        if part:
            parts[f"responses of {len(part[0])} to {len(part[-1])} tokens"] = part
    means = {
        name: float(np.concatenate(part).mean())
        for name, part in parts.items()
        if sum(map(len, part)) >= FEWEST
    }
    if not means:
        return float(np.concatenate(gaps).mean()), "all tokens"
    worst = max(means, key=lambda name: means[name])
    return means[worst], worst
