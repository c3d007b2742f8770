"""The requests of one step, made from prompts."""

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
    """Return G requests per prompt, prompt by prompt, each with its own seed. Temperature, top-p and top-k go
    through their cycles, if any, starting at each group's first sample.

    Args:
        attempt: number of earlier requests for these prompts; each attempt has other seeds.
        prompt_ids: (prompt, number of the sample) → token ids to sample from; None: the prompt's own.
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
