"""Measurement of a checkpoint's skill: it answers held-out prompts of a task and corrects its own wrong
answers."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ibpo.config import Config
from megatron_ibpo.credit import ThinkingMarks, Vocabulary, find_operator
from megatron_ibpo.data import CorrectionTemplate, load_tokenizer, thinking_marks
from megatron_ibpo.engines import ThreadedEngine
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.rewards import open_verifier
from megatron_ibpo.run.operator_skill import Asking, operator_skill, try_corrections
from megatron_ibpo.sampling import Sampler, scorer
from megatron_ibpo.study.single_engine import held_out_prompts, open_engine


def skill_of_checkpoint(
    config: Config, scratch: Path, *, prompts: int, targets: int, seed: int
) -> dict[str, Any]:
    """Return `operator_skill` of the policy in config.model.hf_checkpoint, on held-out prompts of the
    recipe's task.

    Args:
        scratch: directory for the engine's logs.
        prompts: number of prompts, each answered by a group as in training.
        targets: most wrong responses per group to correct.

    Raises:
        ValueError: an unsuitable checkpoint or task.
        EngineError: the engine did not start or died.
    """
    hf_dir = config.model.hf_checkpoint
    if hf_dir is None or not (hf_dir / "config.json").exists():
        raise ValueError(f"{hf_dir} holds no policy in Hugging Face format (config.json)")
    config = replace(config, run=replace(config.run, run_dir=scratch))
    context = config.rollout.rollout_max_context_len or read_hf_config(hf_dir).max_position_embeddings
    config = replace(config, rollout=replace(config.rollout, rollout_max_context_len=context))
    with ExitStack() as stack:
        tokenizer = load_tokenizer(hf_dir)
        asked = held_out_prompts(config, tokenizer, prompts)
        verifier = stack.enter_context(open_verifier(config.data))
        engine = ThreadedEngine(open_engine(config, hf_dir, stack))
        sampler = Sampler(
            [engine],
            scorer(verifier, lambda _, sample: tokenizer.decode(sample.token_ids)),
            stall_timeout=config.rollout.engine_stall_timeout,
            max_context=context,
        )
        operator = find_operator(config.algorithm)
        thinking = ThinkingMarks(*thinking_marks(tokenizer)) if operator.ibpo_strip_thinking else None
        vocabulary = Vocabulary(CorrectionTemplate(tokenizer, operator.ibpo_k), thinking=thinking)
        asking = Asking(config.algorithm, config.rollout, vocabulary, context, seed, targets)
        with sampler:
            return operator_skill(sampler.run(try_corrections(sampler, asked, asking)))
