"""Sampling plans: from prompts to the requests of one step."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from megatron_ibpo.basics.records import Prompt, SampleRequest, TokenIds
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.config import RolloutConfig

T = TypeVar("T")


def group_requests(
    prompts: Sequence[Prompt],
    rollout: RolloutConfig,
    *,
    seed: int,
    step: int,
    attempt: int = 0,
    prompt_ids: Callable[[Prompt, int], TokenIds] | None = None,
) -> list[SampleRequest]:
    """G requests for each prompt, prompt by prompt, each with a seed of its own. Temperature, top-p and top-k
    go through their cycles, where there are any, from each group's first sample on.

    Args:
        attempt: how often these prompts were asked before; other seeds each time.
        prompt_ids: (prompt, number of the sample) → what it is sampled from; the prompt as it is by default.
    """
    return [
        SampleRequest(
            prompt.token_ids if prompt_ids is None else prompt_ids(prompt, sample),
            derive_seed("sample", seed, step, prompt.index, sample, *([attempt] if attempt else [])),
            rollout.rollout_max_response_len,
            _in_turn(rollout.rollout_temperature_cycle, sample, rollout.rollout_temperature),
            _in_turn(rollout.rollout_top_p_cycle, sample, rollout.rollout_top_p),
            _in_turn(rollout.rollout_top_k_cycle, sample, rollout.rollout_top_k),
        )
        for prompt in prompts
        for sample in range(rollout.n_samples_per_prompt)
    ]


def _in_turn(cycle: Sequence[T], sample: int, otherwise: T) -> T:
    return cycle[sample % len(cycle)] if cycle else otherwise
