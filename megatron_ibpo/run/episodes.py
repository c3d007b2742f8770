"""The episodes of a run: its environments, its model's chat format and its limits, joined for the sampler."""

from functools import partial

from megatron_ibpo.config import Config
from megatron_ibpo.data.row_prompts import with_system_prompt
from megatron_ibpo.environments import Sessions
from megatron_ibpo.run.inputs import Inputs
from megatron_ibpo.sampling.episodes import Episodes


def open_episodes(config: Config, inputs: Inputs, sessions: Sessions | None) -> Episodes | None:
    """Return what plays the run's episodes; None if no prompt names an environment.

    Args:
        config: the configuration with everything resolved that depends on the devices.
        sessions: the places where environments run.
    """
    if sessions is None or inputs.chat is None:
        return None
    return Episodes(
        sessions,
        inputs.chat,
        config.environment,
        config.run.seed,
        config.data.reward_threshold,
        config.rollout.rollout_max_context_len,
        partial(with_system_prompt, data=config.data),
    )
