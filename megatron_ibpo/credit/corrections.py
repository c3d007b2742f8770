"""Compare-and-correct: the paper's operator (ibpo steps 3 to 7)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from megatron_ibpo.config import AlgorithmConfig
from megatron_ibpo.credit.operator import Judgement, LoopAccess
from megatron_ibpo.credit.pairing import draw_references, is_wrong
from megatron_ibpo.credit.rewrite import mark_rewrites
from megatron_ibpo.credit.shaping import correction_bonus
from megatron_ibpo.records import Correction, Group, SampleRequest
from megatron_ibpo.seeds import derive_seed

__all__ = ["compare_and_correct"]


def compare_and_correct(groups: Sequence[Group], algorithm: AlgorithmConfig, loop: LoopAccess) -> Judgement:
    """Have every wrong response corrected by the policy itself; φ is β where the correction is right and no
    rewrite. Fills in `corrections` and `skipped_pairs` of the groups.
    """
    pairs = [(group, *pair) for group in groups for pair in _pairs(group, algorithm.ibpo_k, loop)]
    asked = [(*pair, number) for pair in pairs for number in range(algorithm.ibpo_corrections)]
    requests = [
        _request(group, target, number, prompt_ids, loop) for group, target, _, prompt_ids, number in asked
    ]
    corrected = loop.sample(requests) if requests else []
    for (group, target, references, prompt_ids, _), response in zip(asked, corrected, strict=True):
        group.corrections.append(Correction(target, references, prompt_ids, response))
    if requests:
        loop.score([(group.prompt, c.response) for group in groups for c in group.corrections])
    threshold = mark_rewrites(groups, algorithm.ibpo_rewrite_threshold)
    phi = [correction_bonus(group, algorithm.ibpo_beta) for group in groups]
    if threshold is None:
        return Judgement(phi)
    # no distance exceeds 1, so at α >= 1 nothing is ever called a rewrite
    return Judgement(phi, {"rewrite_threshold": threshold, "rewrite_filter_off": float(threshold >= 1)})


def _pairs(
    group: Group, num_candidates: int, loop: LoopAccess
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
        shown = [group.responses[i].content_ids for i in references]
        prompt_ids = loop.correction_prompt(group.prompt, response.content_ids, shown)
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
