"""Compare-and-correct: the paper's operator (ibpo steps 3 to 7)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice

from megatron_ibpo.config import AlgorithmConfig
from megatron_ibpo.credit.edits import TokenFlags, find_edits, gradient_mask
from megatron_ibpo.credit.operator import Judgement, LoopAccess, TokenWeights, lent
from megatron_ibpo.credit.pairing import draw_references, is_wrong
from megatron_ibpo.credit.rewrite import mark_rewrites
from megatron_ibpo.credit.shaping import correction_bonus, counts
from megatron_ibpo.credit.shown import Shown, shown_pairs, shown_parts
from megatron_ibpo.records import Correction, Group, SampleRequest
from megatron_ibpo.seeds import derive_seed

__all__ = ["compare_and_correct"]


def compare_and_correct(groups: Sequence[Group], algorithm: AlgorithmConfig, loop: LoopAccess) -> Judgement:
    """Have every wrong response corrected by the policy itself. φ is what its corrections are worth
    (`correction_bonus`); under --ibpo-variant mask, those that count say which tokens to learn from. Fills in
    `corrections` and `skipped_pairs` of the groups.

    Raises:
        ValueError: --ibpo-strip-thinking, and the loop does not say what marks thinking.
    """
    marks = lent(loop.thinking, "the marks of thinking") if algorithm.ibpo_strip_thinking else None
    shown = shown_parts(marks)
    _sample_corrections(groups, algorithm, loop, shown)
    pairs = shown_pairs(groups, shown)
    edits, numbers = find_edits(pairs, mark_insertions=algorithm.ibpo_mask_insertions)
    threshold = mark_rewrites(pairs, numbers, algorithm.ibpo_rewrite_threshold, shown)
    phi = [correction_bonus(group, algorithm) for group in groups]
    metrics = {}
    if threshold is not None:
        # no distance exceeds 1, so at α >= 1 nothing is ever called a rewrite
        metrics = {"rewrite_threshold": threshold, "rewrite_filter_off": float(threshold >= 1)}
    if algorithm.ibpo_variant != "mask":
        return Judgement(phi, metrics=metrics)
    left = iter(edits)
    masks = [_masks(group, list(islice(left, len(group.corrections)))) for group in groups]
    of_corrected = [mask for of_group in masks for mask in of_group if mask is not None]
    metrics["empty_masks"] = float(sum(not any(mask) for mask in of_corrected))
    return Judgement(phi, masks, metrics)


def _sample_corrections(
    groups: Sequence[Group], algorithm: AlgorithmConfig, loop: LoopAccess, shown: Shown
) -> None:
    pairs = [(group, *pair) for group in groups for pair in _pairs(group, algorithm.ibpo_k, loop, shown)]
    asked = [(*pair, number) for pair in pairs for number in range(algorithm.ibpo_corrections)]
    requests = [
        _request(group, target, number, prompt_ids, loop) for group, target, _, prompt_ids, number in asked
    ]
    corrected = loop.sample(requests) if requests else []
    for (group, target, references, prompt_ids, _), response in zip(asked, corrected, strict=True):
        group.corrections.append(Correction(target, references, prompt_ids, response))
    if requests:
        loop.score([(group.prompt, c.response) for group in groups for c in group.corrections])


def _pairs(
    group: Group, num_candidates: int, loop: LoopAccess, shown: Shown
) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(target, references, x̃) for every wrong response whose x̃ leaves room for a correction; the others
    are counted in `group.skipped_pairs`."""
    pairs = []
    for target, response in enumerate(group.responses):
        if not is_wrong(response):
            continue
        # a generator for each draw, so that a draw does not depend on what was drawn before it
        rng = random.Random(derive_seed("pair", loop.seed, loop.step, group.prompt.index, target))
        references = draw_references(target, group.responses, num_candidates - 1, rng)
        candidates = [shown(group.prompt.token_ids, group.responses[i]) for i in (target, *references)]
        target_ids, *reference_ids = [part.token_ids() for part in candidates]
        prompt_ids = loop.correction_prompt(group.prompt, target_ids, reference_ids)
        if len(prompt_ids) + loop.rollout.rollout_max_response_len > loop.max_context:
            group.skipped_pairs += 1
        else:
            pairs.append((target, references, prompt_ids))
    return pairs


def _request(
    group: Group, target: int, number: int, prompt_ids: tuple[int, ...], loop: LoopAccess
) -> SampleRequest:
    rollout = loop.rollout
    return SampleRequest(
        prompt_ids,
        derive_seed("correction", loop.seed, loop.step, group.prompt.index, target, number),
        rollout.rollout_max_response_len,
        rollout.rollout_temperature,
        rollout.rollout_top_p,
        rollout.rollout_top_k,
    )


def _masks(group: Group, edits: Sequence[TokenFlags]) -> list[TokenWeights]:
    """The mask of every response: the union of what its corrections that count change; None without any."""
    of_target: list[list[TokenFlags]] = [[] for _ in group.responses]
    for correction, changed in zip(group.corrections, edits, strict=True):
        if counts(correction):
            of_target[correction.target].append(changed)
    return [gradient_mask(changed) if changed else None for changed in of_target]
