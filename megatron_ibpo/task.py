"""What a run works on: its tokenizer, its prompts, and what credit must know of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_ibpo.config import Config
from megatron_ibpo.credit import ThinkingMarks, Vocabulary
from megatron_ibpo.data import (
    CorrectionTemplate,
    PromptSource,
    PromptSuffixes,
    Tokenizer,
    load_tokenizer,
    open_source,
    thinking_marks,
    token_texts,
)
from megatron_ibpo.records import Prompt
from megatron_ibpo.rewards import answer_extractor

__all__ = ["Task", "open_task"]


@dataclass(frozen=True)
class Task:
    """Fixed for the whole run."""

    tokenizer: Tokenizer
    vocabulary: Vocabulary
    suffixes: PromptSuffixes
    """Of --rollout-prompt-suffixes."""
    prompts: PromptSource | None
    """None when recorded rollouts are replayed."""
    eval_prompts: list[Prompt]
    extract_answer: Callable[[str], str | None] | None
    """For votes at evaluation, where the verifier's module has one and several samples are taken."""


def open_task(config: Config) -> Task:
    """Read and check everything of the task that the run will need.

    Raises:
        ValueError, OSError: a tokenizer or data that does not serve; with what, where, and what to do.
    """
    assert config.model.hf_checkpoint is not None  # check_config saw to it
    tokenizer = load_tokenizer(config.model.hf_checkpoint)
    thinking = None
    if config.algorithm.ibpo_strip_thinking:
        thinking = ThinkingMarks(*thinking_marks(tokenizer))
    vocabulary = Vocabulary(
        CorrectionTemplate(tokenizer, config.algorithm.ibpo_k),
        token_texts(tokenizer),
        thinking,
        _placeholder(config, tokenizer),
    )
    suffixes = PromptSuffixes(tokenizer, config.rollout.rollout_prompt_suffixes)
    prompts, eval_prompts = _open_prompts(config, tokenizer, suffixes.longest)
    votes = config.run.n_samples_per_eval_prompt > 1
    return Task(
        tokenizer,
        vocabulary,
        suffixes,
        prompts,
        eval_prompts,
        answer_extractor(config.data.rm_type) if votes else None,
    )


def _open_prompts(
    config: Config, tokenizer: Tokenizer, growth: int
) -> tuple[PromptSource | None, list[Prompt]]:
    """(source of training prompts, held-out prompts); neither when recorded rollouts are replayed.

    Args:
        growth: tokens that perturbation may add to a training prompt.
    """
    if config.run.load_debug_rollout_data is not None:
        return None, []
    rollout = config.rollout
    assert rollout.rollout_max_context_len is not None  # start-up resolved it
    assert config.data.prompt_data is not None
    room = rollout.rollout_max_context_len - rollout.rollout_max_response_len
    prompts = open_source(
        config.data.prompt_data, tokenizer, config.data, split="train", max_prompt_len=room - growth
    )
    if config.run.eval_num_prompts == 0:
        return prompts, []
    assert config.data.eval_prompt_data is not None
    held_out = open_source(
        config.data.eval_prompt_data, tokenizer, config.data, split="eval", max_prompt_len=room
    )
    count = config.run.eval_num_prompts
    return prompts, held_out.batch(0, min(count, len(held_out) or count))


def _placeholder(config: Config, tokenizer: Tokenizer) -> int | None:
    if config.algorithm.ciw_placeholder == "pad":
        return tokenizer.pad_id
    if tokenizer.unk_id is None and config.algorithm.ibpo_operator == "span-masking":
        raise ValueError("--ciw-placeholder unk: the tokenizer has no unknown token; use pad")
    return tokenizer.unk_id
