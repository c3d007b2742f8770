"""Compare-and-correct: the paper's operator (ibpo steps 3 to 7)."""

import random
from collections.abc import Sequence
from itertools import islice

from megatron_ibpo.basics.records import Flags, Group, SampleRequest, TokenIds
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.credit.compared_parts import ThinkingMarks, compared_pairs, shown
from megatron_ibpo.credit.correction_advantages import degenerate_correction_groups
from megatron_ibpo.credit.edits import find_edits, gradient_mask, mark_rewrites
from megatron_ibpo.credit.gate import gate_metrics, is_worth_asking, remember
from megatron_ibpo.credit.leakage import mark_leakage
from megatron_ibpo.credit.metrics import correction_metrics
from megatron_ibpo.credit.operator import (
    CreditContext,
    FollowUp,
    Judgement,
    Operator,
    TokenWeights,
    lent,
    signed_masks,
)
from megatron_ibpo.credit.pairing import draw_references, is_wrong
from megatron_ibpo.credit.shaping import correction_bonus, counts


class CompareAndCorrect(Operator):
    """Has every wrong response corrected by the policy itself. φ is what its corrections are worth
    (`correction_bonus`); under --ibpo-variant mask and signed-mask, those that count say which tokens to
    learn from. A mask is the paper's Eq. 17 to the letter, whatever the sign of the advantage; a signed mask
    is turned round where the advantage is above 0.

    Both methods raise ValueError under --ibpo-strip-thinking if the context does not say what marks thinking,
    and under --ibpo-gate if it has no prices.
    """

    def follow_ups(self, group: Group, context: CreditContext) -> list[FollowUp]:
        """--ibpo-corrections requests for every wrong response whose x̃ leaves room for a correction; the
        others are counted in `group.skipped_pairs`. Under --ibpo-gate, only where it may be worth its price.
        """
        asked: list[FollowUp] = []
        group.skipped_pairs = 0
        for target, response in enumerate(group.responses):
            if not is_wrong(response):
                continue
            references = _references(group, target, context)
            prompt_ids = _correction_prompt(group, (target, *references), context)
            if len(prompt_ids) + context.rollout.rollout_max_response_len > context.max_context:
                group.skipped_pairs += 1
                continue
            if context.algorithm.ibpo_gate and not is_worth_asking(group, len(prompt_ids), context):
                continue
            asked += [
                FollowUp(target, references, _request(group, target, number, prompt_ids, context))
                for number in range(context.algorithm.ibpo_corrections)
            ]
        return asked

    def judge(self, groups: Sequence[Group], context: CreditContext) -> Judgement:
        """Fills in what the comparison with their targets says of the corrections."""
        algorithm, marks = context.algorithm, _thinking(context)
        pairs = compared_pairs(groups, marks)
        edits, numbers = find_edits(pairs, mark_insertions=algorithm.ibpo_mask_insertions)
        threshold = mark_rewrites(pairs, numbers, algorithm.ibpo_rewrite_threshold, marks)
        answer_start = context.vocabulary.answer_start
        if answer_start is not None:
            mark_leakage(groups, answer_start, marks)
        metrics = correction_metrics(groups, knows_answers=answer_start is not None)
        metrics["degenerate_correction_groups"] = float(
            sum(degenerate_correction_groups(group, context) for group in groups)
        )
        if threshold is not None:
            # no distance exceeds 1, so at α >= 1 nothing is ever called a rewrite
            metrics |= {"rewrite_threshold": threshold, "rewrite_filter_off": float(threshold >= 1)}
        memory = {}
        if algorithm.ibpo_gate:
            memory = remember(groups, context.memory)
            metrics |= gate_metrics(groups)
        phi = [correction_bonus(group, algorithm) for group in groups]
        if not algorithm.masks_tokens:
            return Judgement(phi, metrics=metrics, memory=memory)
        left = iter(edits)
        masks = [_masks(group, list(islice(left, len(group.corrections)))) for group in groups]
        of_corrected = [mask for of_group in masks for mask in of_group if mask is not None]
        metrics["empty_masks"] = float(sum(not mask.any() for mask in of_corrected))
        raised = signed_masks(masks) if algorithm.ibpo_variant == "signed-mask" else None
        return Judgement(phi, masks, metrics, raised, memory)


def _references(group: Group, target: int, context: CreditContext) -> tuple[int, ...]:
    # a generator for each draw, so that a draw does not depend on what was drawn before it
    rng = random.Random(derive_seed("pair", context.seed, context.step, group.prompt.index, target))
    return draw_references(target, group.responses, context.algorithm.ibpo_k - 1, rng)


def _correction_prompt(group: Group, candidates: Sequence[int], context: CreditContext) -> TokenIds:
    marks = _thinking(context)
    target, *references = [shown(group.responses[i], marks).ids for i in candidates]
    return context.vocabulary.correction_prompt(group.prompt, target, references)


def _request(
    group: Group, target: int, number: int, prompt_ids: TokenIds, context: CreditContext
) -> SampleRequest:
    rollout = context.rollout
    return SampleRequest(
        prompt_ids,
        derive_seed("correction", context.seed, context.step, group.prompt.index, target, number),
        rollout.rollout_max_response_len,
        rollout.rollout_temperature,
        rollout.rollout_top_p,
        rollout.rollout_top_k,
    )


def _thinking(context: CreditContext) -> ThinkingMarks | None:
    if not context.algorithm.ibpo_strip_thinking:
        return None
    return lent(context.vocabulary.thinking, "the marks of thinking")


def _masks(group: Group, edits: Sequence[Flags]) -> list[TokenWeights]:
    """The mask of every response: the union of what its corrections that count change; None without any."""
    of_target: list[list[Flags]] = [[] for _ in group.responses]
    for correction, changed in zip(group.corrections, edits, strict=True):
        if counts(correction):
            of_target[correction.target].append(changed)
    return [gradient_mask(changed) if changed else None for changed in of_target]
