"""Plays every episode of a run's journal once more, in fresh environments."""

from collections.abc import Sequence
from pathlib import Path

from megatron_ibpo.data import load_tokenizer
from megatron_ibpo.data.row_prompts import template_settings
from megatron_ibpo.data.tokenizer import read_eos_token_ids
from megatron_ibpo.environments.adapters import load_environment
from megatron_ibpo.environments.chat import open_chat
from megatron_ibpo.journal import read_journal
from megatron_ibpo.run.run_data import training_prompts
from megatron_ibpo.run.settings import parse_config
from support.replayed_episodes import replay_problems


def audit_episodes(journal: Path, flags: Sequence[str]) -> tuple[list[str], int, int]:
    """Return (what is wrong, number of episodes with a reward, number of those without)."""
    config = parse_config(flags)
    hf_dir, target = config.model.hf_checkpoint, config.environment.environment
    assert hf_dir is not None
    assert target is not None
    tokenizer = load_tokenizer(hf_dir)
    prompts = training_prompts(config, tokenizer)
    chat = open_chat(
        hf_dir, tokenizer, applies_template=config.data.apply_chat_template,
        settings=template_settings(config.data),
    )  # fmt: skip
    make, ends = load_environment(target), read_eos_token_ids(hf_dir)
    problems, scored, absent = [], 0, 0
    for key, sample in read_journal(journal, 0).samples.items():
        if sample.reward is None:
            absent += 1
            continue
        scored += 1
        prompt, is_correction = prompts.at(key.prompt_index), key.kind == "correction"
        found = replay_problems(
            sample, prompt, make(), chat, ends=ends, seed=config.run.seed, is_correction=is_correction
        )
        problems += [f"{key}: {one}" for one in found]
    return problems, scored, absent
