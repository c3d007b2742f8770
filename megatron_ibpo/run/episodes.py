"""The episodes of a run: its environments, its model's chat format and its limits, joined for the sampler."""

from functools import partial

from megatron_ibpo.config import Config
from megatron_ibpo.data.row_prompts import template_settings, with_system_prompt
from megatron_ibpo.environments import Sessions
from megatron_ibpo.environments.chat import open_chat
from megatron_ibpo.run.run_data import RunData
from megatron_ibpo.sampling.episodes import Episodes


def open_episodes(
    config: Config, data: RunData, sessions: Sessions | None
) -> tuple[Episodes | None, tuple[str, ...]]:
    """Return (what plays the run's episodes, lines about the chat format to print); None if nothing does.

    Args:
        sessions: where environments run; None if no prompt names one.

    Raises:
        DataError: the chat template cannot be used for conversations; says why.
    """
    if sessions is None:
        return None, ()
    assert config.model.hf_checkpoint is not None  # resolved at start-up
    chat = open_chat(
        config.model.hf_checkpoint,
        data.tokenizer,
        applies_template=config.data.apply_chat_template,
        settings=template_settings(config.data),
    )
    episodes = Episodes(
        sessions,
        chat,
        config.environment,
        config.run.seed,
        config.data.reward_threshold,
        config.rollout.rollout_max_context_len,
        partial(with_system_prompt, data=config.data),
    )
    return episodes, chat.notes
