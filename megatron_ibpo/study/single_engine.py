"""Instruments that sample from one policy: an engine in its own process, without Ray and trainers, held-out
prompts, and the skill of a checkpoint, which answers these and corrects its own wrong answers."""

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.config import Config, as_specs
from megatron_ibpo.credit import Vocabulary
from megatron_ibpo.data import CorrectionTemplate, ResponseText, Tokenizer, load_tokenizer, open_sources
from megatron_ibpo.engines import Engine, ThreadedEngine
from megatron_ibpo.engines.registry import (
    check_model,
    fallback_note,
    on_device,
    start_instrument,
    start_timeout,
)
from megatron_ibpo.rewards import open_verifier
from megatron_ibpo.run.operator_skill import Asking, operator_skill, try_corrections
from megatron_ibpo.run.resolve import Foundation, read_foundation
from megatron_ibpo.run.run_data import thinking_marks
from megatron_ibpo.sampling import Sampler, scorer


def open_engine(config: Config, foundation: Foundation, stack: ExitStack) -> Engine:
    """Start an engine that keeps its initial weights."""
    import torch

    on_gpu = torch.cuda.is_available()
    hf_dir, shape, context = foundation.hf_dir, foundation.shape, foundation.max_context
    if note := fallback_note(config.rollout, shape, on_gpu=on_gpu):
        print(note, file=sys.stderr, flush=True)
    rollout = on_device(config, shape, on_gpu=on_gpu, max_context=context).rollout
    check_model(rollout, shape, on_gpu=on_gpu)
    log, threads = config.run.run_dir / "logs" / "engine.log", torch.get_num_threads()
    engine = start_instrument(rollout, hf_dir, shape, on_gpu=on_gpu, num_threads=threads, log=log)
    stack.callback(engine.close)
    engine.wait_ready(start_timeout(rollout, hf_dir))
    return engine


def held_out_prompts(config: Config, tokenizer: Tokenizer, max_context: int, count: int) -> list[Prompt]:
    """Return the first held-out prompts of a recipe's task.

    Args:
        max_context: limit of tokens in prompt and response together.

    Raises:
        ValueError: the recipe names no prompts, or they are played in environments.
    """
    data = config.data
    held_out = as_specs(data.eval_prompt_data)
    spec = held_out[0].spec if held_out else next(iter(data.prompt_data), None)
    if spec is None:
        raise ValueError("the recipe names no prompts: --prompt-data or --eval-prompt-data")
    room = max_context - config.rollout.rollout_max_response_len
    source = open_sources(
        [spec],
        tokenizer,
        data,
        split="eval",
        max_prompt_len=room,
        holds_out=not held_out,
        environment=config.environment,
    )
    prompts = source.batch(0, min(count, len(source) or count))
    if any(prompt.environment is not None for prompt in prompts):
        raise ValueError(
            f"{spec}: its prompts are played in environments, and here responses are of one turn"
        )
    return prompts


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
    foundation = read_foundation(config)
    operator, context = foundation.method.operator, foundation.max_context
    with ExitStack() as stack:
        tokenizer = load_tokenizer(hf_dir, embedding_rows=foundation.shape.vocab_size)
        prompt_list = held_out_prompts(config, tokenizer, context, prompts)
        verifier = stack.enter_context(open_verifier(config.data))
        engine = ThreadedEngine(open_engine(config, foundation, stack))
        sampler = Sampler(
            [engine],
            scorer(verifier, ResponseText(tokenizer)),
            stall_timeout=config.rollout.engine_stall_timeout,
            max_context=context,
        )
        marks = thinking_marks(operator, tokenizer)
        vocabulary = Vocabulary(CorrectionTemplate(tokenizer, operator.ibpo_k), thinking=marks)
        asking = Asking(operator.ibpo_k, config.rollout, vocabulary, context, seed, targets)
        with sampler:
            return operator_skill(sampler.run(try_corrections(sampler, prompt_list, asking)))
