"""The audit of a run: its policy answers, corrects, and continues from every step of its wrong answers."""

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_ibpo.basics.records import Correction, Flags, Group, Prompt, Sample, SampleRequest
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.config import Config
from megatron_ibpo.credit import CreditContext, ThinkingMarks, Vocabulary, any_group
from megatron_ibpo.credit.corrections import CompareAndCorrect
from megatron_ibpo.credit.edits import find_edits, gradient_mask
from megatron_ibpo.credit.pairing import compared_pairs, is_wrong, split_spans
from megatron_ibpo.credit.shaping import counts
from megatron_ibpo.data import CorrectionTemplate, ResponseText, Tokenizer, TokenTexts, load_tokenizer
from megatron_ibpo.engines import ThreadedEngine
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.rewards import Response, open_verifier
from megatron_ibpo.run.resolve import read_foundation
from megatron_ibpo.run.run_data import thinking_marks
from megatron_ibpo.run.settings import parse_config
from megatron_ibpo.sampling import Sampler, scorer
from megatron_ibpo.sampling.groups import GroupSampler, Rules, sample_batch
from megatron_ibpo.sampling.requests import group_requests
from megatron_ibpo.study.credit_audit import AuditedResponse
from megatron_ibpo.study.single_engine import held_out_prompts, open_engine


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
    config.run.run_dir = scratch
    with ExitStack() as stack:
        tokenizer = load_tokenizer(hf_dir, embedding_rows=read_hf_config(hf_dir).vocab_size)
        asker = _Asker(config, hf_dir, tokenizer, stack)
        groups, phi = asker.groups(prompts, seed)
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
        outcomes = asker.outcomes(pieces, boundaries, rollouts, seed)
    marks, insertions = asker.thinking, asker.operator.ibpo_mask_insertions
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


def prefix_requests(
    prompt: Prompt, response: Sample, boundaries: Sequence[int], rollouts: int, config: Config, seed: int
) -> list[SampleRequest]:
    """Return `rollouts` requests for continuations from each boundary but the last, as in training."""
    rollout = config.rollout
    return [
        SampleRequest(
            np.concatenate([response.prompt_token_ids, response.token_ids[:start]]),
            derive_seed("audit", seed, prompt.index, *response.token_ids.tolist(), start, number),
            rollout.rollout_max_response_len - start,
            rollout.rollout_temperature,
            rollout.rollout_top_p,
            rollout.rollout_top_k,
        )
        for start in boundaries[:-1]
        for number in range(rollouts)
    ]


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
    sibling_group = replace(group, corrections=siblings)
    (edits, numbers) = find_edits(compared_pairs([sibling_group], marks), mark_insertions=mark_insertions)
    nearest = edits[int(np.argmin(numbers))]
    return [int(changed) for changed in nearest[: group.responses[index].num_content_tokens]]


def correction_edits(
    groups: Sequence[Group], marks: ThinkingMarks | None, *, mark_insertions: bool
) -> list[list[Flags]]:
    """Return, for each group, the tokens of its target that each correction changes, as in training."""
    edits, _ = find_edits(compared_pairs(groups, marks), mark_insertions=mark_insertions)
    remaining_edits = iter(edits)
    return [list(islice(remaining_edits, len(group.corrections))) for group in groups]


class _Asker:
    """One engine and one verifier, used as in the training loop."""

    def __init__(self, config: Config, hf_dir: Path, tokenizer: Tokenizer, stack: ExitStack):
        self.config, self.tokenizer, self.texts = config, tokenizer, ResponseText(tokenizer)
        foundation = read_foundation(replace(config, model=replace(config.model, hf_checkpoint=hf_dir)))
        self.max_context = foundation.max_context
        self.verifier = stack.enter_context(open_verifier(config.data))
        self.engine = ThreadedEngine(open_engine(config, foundation, stack))
        method = foundation.method.operator
        # corrects all responses, so that the policy of a baseline can be audited too, or of a method that
        # corrects only some, such as examples/credit/gated.py
        operator_fields = fields(CompareAndCorrect) if isinstance(method, CompareAndCorrect) else ()
        self.operator = CompareAndCorrect(
            **{field.name: getattr(method, field.name) for field in operator_fields}
        )
        self.thinking = thinking_marks(self.operator, tokenizer)

    def groups(self, count: int, seed: int) -> tuple[list[Group], list[list[float]]]:
        """Return (groups of held-out prompts, scored and with corrections; φ of every response)."""
        rollout = self.config.rollout
        prompts = held_out_prompts(self.config, self.tokenizer, self.max_context, count)
        requests = group_requests(prompts, rollout, seed=seed, step=0)
        size = rollout.n_samples_per_prompt

        def draw(_: int) -> list[tuple[Prompt, Sequence[SampleRequest]]]:
            return [(prompt, requests[i * size : (i + 1) * size]) for i, prompt in enumerate(prompts)]

        operator, context = self.operator, self._context(seed)
        rules = Rules(len(prompts), max_rounds=1, usable=any_group, preferred=any_group)
        with self._sampler(self.texts) as sampler:
            groups = sampler.run(sample_batch(GroupSampler(sampler, operator, rules), draw, context)).groups
        return groups, operator.judge(groups, context).phi

    def outcomes(
        self,
        pieces: Sequence[tuple[Prompt, Sample]],
        boundaries: Sequence[Sequence[int]],
        rollouts: int,
        seed: int,
    ) -> list[np.ndarray]:
        """Return, for each response, [boundaries - 1, rollouts]: 1 where the continuation ended correct."""
        requests = [
            (prompt, request)
            for (prompt, response), bounds in zip(pieces, boundaries, strict=True)
            for request in prefix_requests(prompt, response, bounds, rollouts, self.config, seed)
        ]

        def full_response(prompt: Prompt, continuation: Sample) -> Response:
            prefix_ids = continuation.prompt_token_ids[len(prompt.token_ids) :]
            ids = np.concatenate([prefix_ids, continuation.token_ids])
            return self.texts.of_ids(prompt, prompt.token_ids, ids)

        with self._sampler(full_response) as sampler:
            written = sampler.run(sampler.answer_all(requests))
        outcomes = iter(float(continuation.correct) for continuation in written)
        return [
            np.array([[next(outcomes) for _ in range(rollouts)] for _ in bounds[:-1]])
            for bounds in boundaries
        ]

    def _context(self, seed: int) -> CreditContext:
        template = CorrectionTemplate(self.tokenizer, self.operator.ibpo_k)
        return CreditContext(
            algorithm=self.config.algorithm,
            rollout=self.config.rollout,
            vocabulary=Vocabulary(template, TokenTexts(self.tokenizer), self.thinking),
            max_context=self.max_context,
            seed=seed,
            step=0,
        )

    def _sampler(self, text: Callable[[Prompt, Sample], Response]) -> Sampler:
        return Sampler(
            [self.engine],
            scorer(self.verifier, text),
            stall_timeout=self.config.rollout.engine_stall_timeout,
            max_context=self.max_context,
        )


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
