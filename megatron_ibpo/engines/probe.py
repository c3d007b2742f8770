"""A comparison of two engines by the same requests, to check that they have the same weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron_ibpo.basics.records import Floats, Sample, SampleRequest, TokenIds, token_ids
from megatron_ibpo.weights import WeightMismatchError

NUM_PROMPTS = 16
PROMPT_LENGTH = 12
MAX_TOKENS = 32
VOCABULARY = 60
"""Token ids below this are in every model's vocabulary."""
TIMEOUT_S = 600.0
LOGPROB_TOLERANCE = 1e-5
"""Tolerance between two runs of the same kernels on the same weights; other weights differ by far more."""


class IdleEngine(Protocol):
    """An engine with a single caller: `engines.Engine`, or one in another process."""

    def generate(self, requests: Sequence[SampleRequest], *, version: int, timeout: float) -> list[Sample]:
        """Return one sample for each request, in order."""

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Return the result of a control method of the engine's process."""


@dataclass(frozen=True, slots=True)
class Probe:
    """An engine's answers to the probing requests."""

    token_ids: list[TokenIds]
    logprobs: list[Floats]
    digests: list[dict[str, str]]
    """Digests, for each worker, of the weights that vLLM keeps as tensors. On CPUs most are packed out of
    sight, and only the greedy output shows them."""


def probe(engine: IdleEngine, version: int) -> Probe:
    """Request the greedy responses to fixed prompts, and digests of the weights."""
    requests = [
        SampleRequest(
            token_ids([(7 * number + 13 * position) % VOCABULARY for position in range(PROMPT_LENGTH)]),
            seed=0,
            max_tokens=MAX_TOKENS,
            temperature=0.0,
        )
        for number in range(NUM_PROMPTS)
    ]
    samples = engine.generate(requests, version=version, timeout=TIMEOUT_S)
    return Probe(
        [sample.token_ids for sample in samples],
        [sample.logprobs for sample in samples],
        engine.call("digests", timeout=TIMEOUT_S),
    )


def compare_probes(updated: Probe, fresh: Probe, *, same_batches: bool = True) -> None:
    """Raise WeightMismatchError if two engines' answers show that they do not have the same weights. With
    `same_batches` both computed the requests in the same batches, so that outputs agree to the last bits. On
    GPUs vLLM's core begins with the first request that arrives; there digests, which cover all weights,
    decide alone."""
    if same_batches:
        pairs = zip(updated.token_ids, fresh.token_ids, strict=True)
        if different := sum(not np.array_equal(ours, theirs) for ours, theirs in pairs):
            raise WeightMismatchError(
                "after weight updates the engine's greedy responses differ from a freshly loaded engine's "
                f"in {different} of {NUM_PROMPTS} prompts"
            )
        gap = float(np.abs(np.concatenate(updated.logprobs) - np.concatenate(fresh.logprobs)).max())
        if gap > LOGPROB_TOLERANCE:
            raise WeightMismatchError(
                f"after weight updates the engine's log-probs differ from a fresh engine's by up to {gap}"
            )
    for rank, (ours_, theirs_) in enumerate(zip(updated.digests, fresh.digests, strict=True)):
        if wrong := sorted(name for name in theirs_ if ours_.get(name) != theirs_[name]):
            raise WeightMismatchError(
                f"after weight updates {len(wrong)} tensors of engine worker {rank} differ from a freshly "
                f"loaded engine's: {', '.join(wrong[:5])}"
            )
