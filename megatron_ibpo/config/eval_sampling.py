"""Sampling of held-out prompts. Flags win over a preset, then the benchmark, then training's settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ibpo.config.config import Config
from megatron_ibpo.config.run import EVAL_PRESETS


@dataclass(frozen=True)
class EvalSampling:
    """Sampling settings for one set of held-out prompts."""

    samples: int
    """Responses per prompt."""
    max_tokens: int
    """Limit per response."""
    temperature: float
    top_p: float
    top_k: int
    """-1: off."""


def eval_sampling(config: Config, of_the_set: Mapping[str, Any] | None = None) -> EvalSampling:
    """Return the sampling settings of one set.

    Args:
        of_the_set: the benchmark's own settings, by field of `RunConfig`.
    """
    run, rollout = config.run, config.rollout
    preset = EVAL_PRESETS[run.eval_preset] if run.eval_preset is not None else {}
    in_general = {
        "n_samples_per_eval_prompt": 1,
        "eval_temperature": rollout.rollout_temperature,
        "eval_top_p": rollout.rollout_top_p,
        "eval_top_k": rollout.rollout_top_k,
        "eval_max_response_len": rollout.rollout_max_response_len,
    }
    given = {name: getattr(run, name) for name in in_general if getattr(run, name) is not None}
    chosen = in_general | dict(of_the_set or {}) | preset | given
    return EvalSampling(
        samples=chosen["n_samples_per_eval_prompt"],
        max_tokens=chosen["eval_max_response_len"],
        temperature=chosen["eval_temperature"],
        top_p=chosen["eval_top_p"],
        top_k=chosen["eval_top_k"],
    )
