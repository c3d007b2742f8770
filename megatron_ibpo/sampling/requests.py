"""The requests of one step, what becomes of their answers, and metrics of both."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from megatron_ibpo.basics.records import Prompt, Sample, SampleRequest, TokenIds
from megatron_ibpo.basics.sampling_mask import concatenated, unrestricted
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.config import RolloutConfig
from megatron_ibpo.rewards import Response, Verifier

T = TypeVar("T")

Score = Callable[[Prompt, Sample], Awaitable[None]]
"""Fills in `reward`, `correct`, `reward_error` and `reward_details` of a sample of the prompt."""


def group_requests(
    prompts: Sequence[Prompt],
    rollout: RolloutConfig,
    *,
    seed: int,
    step: int,
    attempt: int = 0,
    prompt_ids: Callable[[Prompt, int], TokenIds] | None = None,
) -> list[SampleRequest]:
    """Return G requests per prompt, prompt by prompt, each with its own seed. Temperature, top-p and top-k go
    through their cycles, if any, starting at each group's first sample.

    Args:
        attempt: number of earlier requests for these prompts; each attempt has other seeds.
        prompt_ids: (prompt, number of the sample) → token ids to sample from; None: the prompt's own.
    """
    temperatures = rollout.rollout_temperature_cycle or (rollout.rollout_temperature,)
    return [
        SampleRequest(
            prompt.token_ids if prompt_ids is None else prompt_ids(prompt, sample),
            derive_seed("sample", seed, step, prompt.index, sample, *([attempt] if attempt else [])),
            rollout.rollout_max_response_len,
            temperatures[sample % len(temperatures)],
            *rollout.top_p_and_k(sample),
        )
        for prompt in prompts
        for sample in range(rollout.n_samples_per_prompt)
    ]


def with_beginning(sample: Sample, num_begun: int) -> Sample:
    """Return the whole response of a sample whose prompt ended in the response's first `num_begun` tokens
    (`SampleRequest.num_begun_tokens`). The beginning has no log-probs and is not trained on."""
    if num_begun == 0:
        return sample
    cut = len(sample.prompt_token_ids) - num_begun
    (_, version), *later = sample.versions
    mask = sample.sampling_mask
    return replace(
        sample,
        prompt_token_ids=sample.prompt_token_ids[:cut],
        token_ids=np.concatenate([sample.prompt_token_ids[cut:], sample.token_ids]),
        logprobs=np.concatenate([np.zeros(num_begun, np.float32), sample.logprobs]),
        loss_mask=np.concatenate([np.zeros(num_begun, bool), sample.loss_mask]),
        versions=((0, version), *((first + num_begun, newer) for first, newer in later)),
        sampling_mask=None if mask is None else concatenated([unrestricted(num_begun), mask]),
    )


def scorer(verifier: Verifier, text: Callable[[Prompt, Sample], str | Response]) -> Score:
    """Return a function that lets the verifier score samples that are not scored yet, by the text that `text`
    returns for a sample of the prompt."""

    async def score(prompt: Prompt, sample: Sample) -> None:
        if sample.is_scored:
            return
        verdict = await verifier.score_one(prompt, text(prompt, sample))
        sample.reward, sample.correct, sample.reward_error = verdict.reward, verdict.correct, verdict.error
        sample.reward_details = verdict.details

    return score


async def run_concurrently(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await coroutines side by side and return the results in order. The first exception cancels the others
    and is raised unchanged."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


class Meter:
    """Counts requests, samples and deaths. Times are the event loop's, in seconds."""

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._reset()

    def _reset(self) -> None:
        self._requests = [0] * self._num_engines
        self._first: float | None = None
        self._last = 0.0
        self._asked_again = self._deaths = 0

    def requested(self, engine: int) -> None:
        self._requests[engine] += 1

    def finished(self, time: float) -> None:
        self._first = time if self._first is None else self._first
        self._last = time

    def died(self, unfinished: int) -> None:
        self._deaths += 1
        self._asked_again += unfinished

    def take(self) -> dict[str, float]:
        """Return, since the last call: most and fewest requests of an engine, engines that died, requests
        repeated for that reason, and the seconds from the first sample to the last."""
        metrics = {
            "engine_requests_max": float(max(self._requests)),
            "engine_requests_min": float(min(self._requests)),
            "engine_deaths": float(self._deaths),
            "requests_asked_again": float(self._asked_again),
            "sampling_tail_seconds": 0.0 if self._first is None else self._last - self._first,
        }
        self._reset()
        return metrics
