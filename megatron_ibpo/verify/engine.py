"""Log-probs of sampled tokens: the engine's beside the trainer's."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from megatron_ibpo.basics.records import Floats, Group, Sample, TrainSequence
from megatron_ibpo.policy.transformers_reference import transformers_model
from megatron_ibpo.run.state import Run
from megatron_ibpo.verify.reference import logprobs
from megatron_ibpo.verify.rows import NotCheckedError, Row, measured

FLOOR, SPREADS = 5e-5, 4.0
"""Least bound in nats, and how many times the spread of the engine's precision is right."""
BIN = 8
"""Tokens of a part of a response whose mean difference is looked at."""
FEWEST = 24
"""Tokens that such a mean must have."""

Array = npt.NDArray[np.float64]


def engine_rows(when: str, run: Run, groups: Sequence[Group], hf_dir: Path) -> Iterator[Row]:
    """Compare the log-probs of a step's samples under the weights in `hf_dir`, over all tokens and by their
    place in the response."""
    samples = [sample for group in groups for sample in group.samples if sample.loss_mask.any()]
    sequences = [as_trained(sample) for sample in samples]
    gaps = differences(samples, run.policy.logprobs(sequences))
    dtype = engine_dtype(run)
    spreads = precision_spread(hf_dir, dtype, sequences)
    mean, spread = float(np.concatenate(gaps).mean()), float(np.concatenate(spreads).mean())
    source = f"{SPREADS:.0f} x the spread of transformers in {_name(dtype)}, {spread:.1e}"
    next_step = "temperature, top-p and top-k of both, the engine's precision, weight updates (arrival)"
    yield measured(
        f"engine: {when}", mean, max(FLOOR, SPREADS * spread), source,
        f"mean |difference| in nats over {sum(map(len, gaps))} tokens of {len(samples)} samples, largest "
        f"{max(own.max() for own in gaps):.1e}", next_step,
    )  # fmt: skip
    place, where = furthest(gaps)
    allowed, _ = furthest(spreads)
    yield measured(
        f"engine: {when}, by place", place, max(2 * FLOOR, 2 * SPREADS * max(allowed, spread)), source,
        f"largest mean over {where}", "positions, a cache that outlives its weights, a state not reset",
    )  # fmt: skip


def as_trained(sample: Sample) -> TrainSequence:
    """Return the sample as a sequence for which trainers compute log-probs."""
    return TrainSequence(
        sample.prompt_token_ids, sample.token_ids, sample.loss_mask, 0.0, 0.0, 0, 0, 0,
        temperature=sample.temperature, sampling_mask=sample.sampling_mask,
    )  # fmt: skip


def differences(samples: Sequence[Sample], trainer: Sequence[Floats]) -> list[Array]:
    """Return |engine - trainer| of each token that the policy wrote, by sample."""
    return [
        np.abs(np.subtract(s.logprobs, own, dtype=float))[s.loss_mask]
        for s, own in zip(samples, trainer, strict=True)
    ]


def engine_dtype(run: Run) -> torch.dtype:
    """Return the precision that the engine computes in."""
    name = run.config.rollout.parameters.get("vllm_dtype", "float32")
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def precision_spread(hf_dir: Path, dtype: torch.dtype, sequences: Sequence[TrainSequence]) -> list[Array]:
    """Return the differences of each token's log-prob between transformers in `dtype` and in float64.

    Raises:
        NotCheckedError: transformers cannot compute the model.
    """
    try:
        exact, rounded = transformers_model(hf_dir, torch.float64), transformers_model(hf_dir, dtype)
    except (ValueError, ImportError) as error:
        raise NotCheckedError(f"transformers cannot load the model: {error}") from error
    with torch.no_grad():
        return [
            (logprobs(rounded, s).double() - logprobs(exact, s)).abs().numpy()[s.loss_mask] for s in sequences
        ]


def furthest(gaps: Sequence[Array]) -> tuple[float, str]:
    """Return the largest mean over a part, and that part: positions, or responses of a length."""
    longest = max(map(len, gaps))
    parts = {
        f"tokens {start} to {start + BIN - 1}": [own[start : start + BIN] for own in gaps]
        for start in range(0, longest, BIN)
    }
    by_length = sorted(gaps, key=len)
    for number in range(4):
        own = by_length[number * len(gaps) // 4 : (number + 1) * len(gaps) // 4]
        if own:
            parts[f"responses of {len(own[0])} to {len(own[-1])} tokens"] = own
    means = {
        name: float(np.concatenate(own).mean()) for name, own in parts.items() if sum(map(len, own)) >= FEWEST
    }
    if not means:
        return float(np.concatenate(gaps).mean()), "all tokens"
    where = max(means, key=lambda name: means[name])
    return means[where], where


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
