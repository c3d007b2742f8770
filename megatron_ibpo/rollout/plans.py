"""Sampling plans: from prompts to the requests of one step."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ibpo.config import RolloutConfig
from megatron_ibpo.records import Prompt, SampleRequest
from megatron_ibpo.seeds import derive_seed

__all__ = ["group_requests"]


def group_requests(
    prompts: Sequence[Prompt], rollout: RolloutConfig, *, seed: int, step: int
) -> list[SampleRequest]:
    """G requests for each prompt, prompt by prompt, each with a seed of its own."""
    return [
        SampleRequest(
            prompt.token_ids,
            derive_seed("sample", seed, step, prompt.index, sample),
            rollout.rollout_max_response_len,
            rollout.rollout_temperature,
            rollout.rollout_top_p,
            rollout.rollout_top_k,
        )
        for prompt in prompts
        for sample in range(rollout.n_samples_per_prompt)
    ]
