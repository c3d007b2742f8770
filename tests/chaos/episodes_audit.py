import numpy as np

from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.data import load_tokenizer
from megatron_ibpo.data.row_prompts import template_settings
from megatron_ibpo.data.tokenizer import read_eos_token_ids
from megatron_ibpo.environments.chat import open_chat
from megatron_ibpo.environments.frameworks import load_environment
from megatron_ibpo.journal import read_journal
from megatron_ibpo.run.inputs import training_prompts
from megatron_ibpo.run.resolve import read_foundation
from megatron_ibpo.run.settings import parse_config


def audit_episodes(journal, flags):
    """Return (what is wrong, episodes with a reward, episodes without) of a run with these flags."""
    config = parse_config(flags)
    hf_dir, applies = config.model.hf_checkpoint, config.data.apply_chat_template
    tokenizer, ends = load_tokenizer(hf_dir), read_eos_token_ids(hf_dir)
    prompts = training_prompts(config, tokenizer, read_foundation(config).max_context)
    chat = open_chat(tokenizer, ends, applies_template=applies, settings=template_settings(config.data))
    make = load_environment(config.environment.environment)
    problems, scored, absent = [], 0, 0
    for key, sample in read_journal(journal, 0).samples.items():
        if sample.reward is None:
            absent += 1
            continue
        scored += 1
        prompt, environment = prompts.at(key.prompt_index), make()
        seed = derive_seed("environment", config.run.seed, prompt.index)
        opening = environment.reset(prompt.text, prompt.label, prompt.metadata, seed)
        asked = sample.prompt_token_ids.tolist()
        if key.kind == "response" and chat.open(opening.messages, opening.tools) != asked:
            problems.append(f"{key}: the opening differs")
        problems += [f"{key}: {one}" for one in turn_problems(sample, environment, opening.tools, chat, ends)]
    return problems, scored, absent


def turn_problems(sample, environment, tools, chat, ends):
    """Return how an episode differs from a fresh environment's, which sees no turn without one of `ends`."""
    ids, answer, problems = sample.prompt_token_ids.tolist(), None, []
    edges = np.flatnonzero(np.diff(sample.loss_mask.astype(int))) + 1
    stretches, masks = np.split(sample.token_ids, edges), np.split(sample.loss_mask, edges)
    for stretch, mask in zip((own.tolist() for own in stretches), masks, strict=True):
        if mask[0]:  # the policy wrote it
            answer = environment.step(chat.read(stretch, tools)) if stretch[-1] in ends else None
        elif answer is None or chat.extend(ids, answer.messages) != stretch:
            problems.append(f"another answer after {len(ids)} tokens")
        ids += stretch
    scored = environment.score()
    reward = scored["score"] if isinstance(scored, dict) else scored
    if float(reward) != sample.reward:
        problems.append(f"reward {sample.reward}, and {reward} when played again")
    return problems
