"""Instruments that sample from one policy, by an engine in its own process, without Ray and trainers: the
skill of a checkpoint, which answers held-out prompts and corrects its own wrong answers; and the audit of a
run, whose policy also continues from every step of its wrong answers."""

import random
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_ibpo.basics.records import Correction, Flags, Group, Prompt, Sample, SampleRequest
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.config import Config, as_specs
from megatron_ibpo.credit import CreditContext, Operator, ThinkingMarks, Vocabulary, any_group
from megatron_ibpo.credit.corrections import CompareAndCorrect
from megatron_ibpo.credit.edits import find_edits, gradient_mask
from megatron_ibpo.credit.pairing import compared_pairs, is_wrong, split_spans
from megatron_ibpo.credit.shaping import counts
from megatron_ibpo.data import (
    CorrectionTemplate,
    ResponseText,
    Tokenizer,
    TokenTexts,
    load_tokenizer,
    open_sources,
)
from megatron_ibpo.engines import Engine, ThreadedEngine
from megatron_ibpo.engines.registry import (
    check_model,
    fallback_note,
    on_device,
    start_instrument,
    start_timeout,
)
from megatron_ibpo.rewards import Response, open_verifier
from megatron_ibpo.run.inputs import thinking_marks
from megatron_ibpo.run.operator_skill import Asking, operator_skill, try_corrections
from megatron_ibpo.run.resolve import Foundation, read_foundation
from megatron_ibpo.run.settings import parse_config
from megatron_ibpo.sampling import Sampler, scorer
from megatron_ibpo.sampling.groups import GroupSampler, Rules, sample_batch
from megatron_ibpo.sampling.requests import group_requests
from megatron_ibpo.study.credit_audit import AuditedResponse


class _Policy:
    """A policy with its held-out prompts, one engine and one verifier, used as in the training loop."""

    def __init__(self, config: Config, hf_dir: Path, prompts: int, scratch: Path, stack: ExitStack):
        """Start the engine.

        Args:
            hf_dir: the policy in Hugging Face format.
            prompts: most prompts to read.
            scratch: directory for the engine's logs.

        Raises:
            ValueError: an unsuitable checkpoint or task.
            EngineError: the engine did not start.
        """
        model, run = replace(config.model, hf_checkpoint=hf_dir), replace(config.run, run_dir=scratch)
        self.config = replace(config, model=model, run=run)
        foundation = read_foundation(self.config)
        self.operator, self.max_context = foundation.method.operator, foundation.max_context
        self.tokenizer = load_tokenizer(hf_dir, embedding_rows=foundation.shape.vocab_size)
        self.texts = ResponseText(self.tokenizer)
        self.prompts = _held_out_prompts(self.config, self.tokenizer, self.max_context, prompts)
        self._verifier = stack.enter_context(open_verifier(config.data))
        self._engine = ThreadedEngine(open_engine(self.config, foundation, stack))

    def vocabulary(self, operator: Operator) -> Vocabulary:
        template, marks = CorrectionTemplate(self.tokenizer, operator.ibpo_k), self.thinking(operator)
        return Vocabulary(template, TokenTexts(self.tokenizer), marks)

    def thinking(self, operator: Operator) -> ThinkingMarks | None:
        return thinking_marks(operator, self.tokenizer)

    def sampler(self, text: Callable[[Prompt, Sample], Response] | None = None) -> Sampler:
        """Return a sampler.

        Args:
            text: gives what the verifier judges of a sample; None: the response.
        """
        return Sampler(
            [self._engine],
            scorer(self._verifier, text or self.texts),
            stall_timeout=self.config.rollout.engine_stall_timeout,
            max_context=self.max_context,
        )


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


def _held_out_prompts(config: Config, tokenizer: Tokenizer, max_context: int, count: int) -> list[Prompt]:
    """Return the first held-out prompts of a recipe's task. Raises ValueError if the recipe names no prompts,
    or they are played in environments."""
    data = config.data
    held_out = as_specs(data.eval_prompt_data)
    spec = held_out[0].spec if held_out else next(iter(data.prompt_data), None)
    if spec is None:
        raise ValueError("the recipe names no prompts: --prompt-data or --eval-prompt-data")
    source = open_sources(
        [spec],
        tokenizer,
        data,
        split="eval",
        max_prompt_len=max_context - config.rollout.rollout_max_response_len,
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
    with ExitStack() as stack:
        policy = _Policy(config, hf_dir, prompts, scratch, stack)
        operator = policy.operator
        vocabulary = policy.vocabulary(operator)
        asking = Asking(operator.ibpo_k, config.rollout, vocabulary, policy.max_context, seed, targets)
        with policy.sampler() as sampler:
            return operator_skill(sampler.run(try_corrections(sampler, policy.prompts, asking)))


# ---------------------------------------------------------------------------------------------- the audit


def audit_responses(
    run_dir: Path,
    scratch: Path,
    *,
    policy: Literal["start", "end"],
    prompts: int,
    responses: int,
    rollouts: int,
    seed: int,
) -> tuple[list[AuditedResponse], list[dict[str, Any]], dict[str, Any]]:
    """Sample groups of held-out prompts as the run does, correct the wrong responses, and estimate the value
    at every step boundary of a sample of them.

    Args:
        scratch: directory for the engine's logs.
        policy: the checkpoint that the run started from, or the one that it exported.
        responses: number of wrong responses to audit, drawn among all.
        rollouts: continuations per boundary; even, since halves are compared.

    Returns:
        (measurements, the same responses as text for a reader, counts).

    Raises:
        ValueError: no such run or policy.
        EngineError: the engine did not start or died.
    """
    config, hf_dir = _settings(run_dir, policy)
    with ExitStack() as stack:
        audited_policy = _Policy(config, hf_dir, prompts, scratch, stack)
        operator, tokenizer = _correcting(audited_policy.operator), audited_policy.tokenizer
        groups, phi = _groups(audited_policy, operator, seed)
        wrong = [
            (group, number, index)
            for number, group in enumerate(groups)
            for index, response in enumerate(group.responses)
            if is_wrong(response) and response.num_content_tokens
        ]
        chosen = sorted(random.Random(seed).sample(wrong, min(responses, len(wrong))), key=lambda x: x[1:])
        pieces = [(group.prompt, group.responses[index]) for group, _, index in chosen]
        texts = TokenTexts(tokenizer)
        # the number of tokens before each step, then the total
        boundaries = [
            [0, *(last for _, last in split_spans(texts(response.content_ids)))] for _, response in pieces
        ]
        outcomes = _outcomes(audited_policy, pieces, boundaries, rollouts, seed)
    marks, insertions = audited_policy.thinking(operator), operator.ibpo_mask_insertions
    edits = correction_edits(groups, marks, mark_insertions=insertions)
    audited = [
        AuditedResponse(
            prompt=number,
            boundaries=bounds,
            values=[*outcomes_BR.mean(axis=1).tolist(), 0.0],
            first_half=[*outcomes_BR[:, 0::2].mean(axis=1).tolist(), 0.0],
            second_half=[*outcomes_BR[:, 1::2].mean(axis=1).tolist(), 0.0],
            modified=modified_tokens(group, index, edits[number]),
            phi=phi[number][index],
            sibling=sibling_tokens(group, index, marks, mark_insertions=insertions),
        )
        for (group, number, index), bounds, outcomes_BR in zip(chosen, boundaries, outcomes, strict=True)
    ]
    readable = [
        {
            "prompt": prompt.text,
            "steps": [tokenizer.decode(response.token_ids[a:b]) for a, b in pairwise(bounds)],
        }
        for (prompt, response), bounds in zip(pieces, boundaries, strict=True)
    ]
    counted = {
        "responses_sampled": sum(len(group.responses) for group in groups),
        "wrong": len(wrong),
        "corrections": sum(len(group.corrections) for group in groups),
        "corrections_correct": sum(c.response.correct for group in groups for c in group.corrections),
        "skipped_pairs": sum(group.skipped_pairs for group in groups),
        "rollouts": sum((len(bounds) - 1) * rollouts for bounds in boundaries),
    }
    return audited, readable, counted


def _settings(run_dir: Path, policy: Literal["start", "end"]) -> tuple[Config, Path]:
    """Return the run's configuration and the checkpoint of the policy."""
    path = run_dir / "config.yaml"
    if not path.exists():
        raise ValueError(f"{run_dir} holds no config.yaml: is it the directory of a run?")
    config = parse_config(["--config", str(path)])
    hf_dir = config.model.hf_checkpoint if policy == "start" else run_dir / "hf"
    if hf_dir is None or not (hf_dir / "config.json").exists():
        raise ValueError(
            f"{hf_dir} holds no policy: the run must have finished without --no-save, or audit the policy it "
            "started from with --policy start"
        )
    return config, hf_dir


def _correcting(operator: Operator) -> CompareAndCorrect:
    """Return an operator that corrects all responses, so that the policy of a baseline can be audited too, or
    of a method that corrects only some, such as examples/credit/gated.py."""
    names = [field.name for field in fields(CompareAndCorrect)]
    of_method = isinstance(operator, CompareAndCorrect)
    return CompareAndCorrect(**{name: getattr(operator, name) for name in names} if of_method else {})


def _groups(policy: _Policy, operator: CompareAndCorrect, seed: int) -> tuple[list[Group], list[list[float]]]:
    """Return (groups of the prompts, scored and with corrections; φ of every response)."""
    config, prompts = policy.config, policy.prompts
    requests, size = (
        group_requests(prompts, config.rollout, seed=seed, step=0),
        config.rollout.n_samples_per_prompt,
    )

    def draw(_: int) -> list[tuple[Prompt, Sequence[SampleRequest]]]:
        return [(prompt, requests[i * size : (i + 1) * size]) for i, prompt in enumerate(prompts)]

    context = CreditContext(
        algorithm=config.algorithm,
        rollout=config.rollout,
        vocabulary=policy.vocabulary(operator),
        max_context=policy.max_context,
        seed=seed,
        step=0,
    )
    rules = Rules(len(prompts), max_rounds=1, usable=any_group, preferred=any_group)
    with policy.sampler() as sampler:
        groups = sampler.run(sample_batch(GroupSampler(sampler, operator, rules), draw, context)).groups
    return groups, operator.judge(groups, context).phi


def _outcomes(
    policy: _Policy,
    pieces: Sequence[tuple[Prompt, Sample]],
    boundaries: Sequence[Sequence[int]],
    rollouts: int,
    seed: int,
) -> list[np.ndarray]:
    """Return, for each response, [boundaries - 1, rollouts]: 1 where the continuation ended correct. They are
    sampled as in training."""
    rollout = policy.config.rollout
    requests = [
        (
            prompt,
            SampleRequest(
                np.concatenate([response.prompt_token_ids, response.token_ids[:start]]),
                derive_seed("audit", seed, prompt.index, *response.token_ids.tolist(), start, number),
                rollout.rollout_max_response_len - start,
                rollout.rollout_temperature,
                rollout.rollout_top_p,
                rollout.rollout_top_k,
            ),
        )
        for (prompt, response), bounds in zip(pieces, boundaries, strict=True)
        for start in bounds[:-1]
        for number in range(rollouts)
    ]

    def full_response(prompt: Prompt, continuation: Sample) -> Response:
        prefix_ids = continuation.prompt_token_ids[len(prompt.token_ids) :]
        ids = np.concatenate([prefix_ids, continuation.token_ids])
        return policy.texts.of_ids(prompt, prompt.token_ids, ids)

    with policy.sampler(full_response) as sampler:
        written = sampler.run(sampler.answer_all(requests))
    outcomes = iter(float(continuation.correct) for continuation in written)
    return [
        np.array([[next(outcomes) for _ in range(rollouts)] for _ in bounds[:-1]]) for bounds in boundaries
    ]


def correction_edits(
    groups: Sequence[Group], marks: ThinkingMarks | None, *, mark_insertions: bool
) -> list[list[Flags]]:
    """Return, for each group, the tokens of its target that each correction changes, as in training."""
    edits, _ = find_edits(compared_pairs(groups, marks), mark_insertions=mark_insertions)
    remaining_edits = iter(edits)
    return [list(islice(remaining_edits, len(group.corrections))) for group in groups]


def modified_tokens(group: Group, index: int, edits: Sequence[Flags]) -> list[int] | None:
    """Return 1 for each token of a response that a correction with credit (correct and not a rewrite)
    changes; None if there is no such correction. All 0 if they only insert.

    Args:
        edits: edits of every correction of the group, from `correction_edits`.
    """
    earning = [
        changed
        for correction, changed in zip(group.corrections, edits, strict=True)
        if correction.target == index and counts(correction)
    ]
    if not earning:
        return None
    mask = gradient_mask(earning)[: group.responses[index].num_content_tokens]
    return [int(changed) for changed in mask]


def sibling_tokens(
    group: Group, index: int, marks: ThinkingMarks | None, *, mark_insertions: bool
) -> list[int] | None:
    """Return 1 for each token of a response that differs from the nearest correct response of its group, the
    first of equally near ones; None if none is correct. This mask needs no correction."""
    siblings = [Correction(index, (), response) for response in group.responses if response.correct]
    if not siblings:
        return None
    pairs = compared_pairs([replace(group, corrections=siblings)], marks)
    edits, numbers = find_edits(pairs, mark_insertions=mark_insertions)
    nearest = edits[int(np.argmin(numbers))]
    return [int(changed) for changed in nearest[: group.responses[index].num_content_tokens]]
