"""Compare-and-correct: the paper's operator (ibpo steps 3 to 7)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Literal

from megatron_ibpo.basics.records import Correction, Flags, Group, SampleRequest
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.config import NOT_NEGATIVE, UNIT, Config, at_least, or_word, within
from megatron_ibpo.credit.edits import find_edits, gradient_mask, mark_rewrites, note_reference_leakage
from megatron_ibpo.credit.explanation import Line, number
from megatron_ibpo.credit.metrics import correction_metrics
from megatron_ibpo.credit.operator import (
    CreditContext,
    FollowUp,
    Judgement,
    Operator,
    TokenWeights,
    bonus_problems,
    require_tool,
    signed_masks,
)
from megatron_ibpo.credit.pairing import (
    ThinkingMarks,
    compared_pairs,
    draw_references,
    is_wrong,
    part_in_prompt,
)
from megatron_ibpo.credit.shaping import correction_bonus, counts, degenerate_correction_groups


@dataclass(frozen=True)
class CompareAndCorrect(Operator):
    """Compare-and-correct: the policy itself corrects every wrong response. φ is the value of its corrections
    (`correction_bonus`). Under --ibpo-variant mask and signed-mask, the corrections that count also choose
    the tokens to learn from. A mask is the paper's Eq. 17 to the letter, whatever the sign of the advantage;
    a signed mask is inverted where the advantage is above 0.

    `follow_ups` and `judge` raise ValueError under --ibpo-strip-thinking if the context has no marks of
    thinking.
    """

    ibpo_variant: Literal["base", "ratio", "mask", "signed-mask"] = "base"
    """Credit for a successful correction. "base": Δ = β. "ratio": Δ = the share of tokens that it keeps.
    "mask": Δ = β, and a gradient only through the tokens that it changes, as in the paper. Where most of a
    group is wrong, the bonus can lift a response above its group's mean, and "mask" then makes exactly its
    wrong tokens likelier. "signed-mask": such a response learns instead from the tokens that the correction
    keeps."""
    ibpo_mask_insertions: bool = False
    """Count a token as changed in a mask if the correction inserts something after it. Off: a response whose
    correction only inserts is then left without gradient, and counted."""
    ibpo_lambda: Annotated[float, NOT_NEGATIVE] = 0.6
    """λ: the shaped reward is r + λΔ. 0.6 is the best of the paper's sensitivity study."""
    ibpo_beta: Annotated[float, UNIT] = 0.5
    """β: Δ of a successful correction that is not a rewrite."""
    ibpo_k: Annotated[int, within(1, 1024, "the wrong response itself is one")] = 2
    """K: solutions compared in one correction prompt, the wrong one included."""
    ibpo_corrections: Annotated[int, within(1, 1024, "for none, --ibpo-operator none")] = 1
    """M: corrections sampled per wrong response."""
    ibpo_rewrite_threshold: Annotated[float | Literal["adaptive"], or_word("adaptive", at_least(0))] = 0.6
    """α: normalised edit distance above which a correction may count as a rewrite; "adaptive": mean + 2
    population standard deviations over the step's corrections."""
    ibpo_joint: bool = True
    """Train on the corrections as samples of their own."""
    ibpo_joint_on: Literal["all", "successful"] = "all"
    """Corrections that --ibpo-joint trains on. "all": failed ones too, with the advantage of a failure.
    "successful": only those that are right and no rewrite; the others still count in the mean and spread that
    their advantages are relative to. The paper's Algorithm 1 says "corrected cases" and may mean either."""
    ibpo_plain_prompt: Literal["none", "successful", "one"] = "none"
    """Train on corrections as off-policy samples of the prompt itself, in place of --ibpo-joint, with their
    rewards compared with those of the prompt's responses. "successful": those that are right and no rewrite.
    "one": one per group, a right one if there is one (Critique-GRPO). "none" in the paper."""
    ibpo_correction_weight: Annotated[float, NOT_NEGATIVE] = 1.0
    """Weight of a correction relative to a response in the joint loss."""
    ibpo_correction_group: Literal["prompt", "pair"] = "prompt"
    """Comparison group of a correction's advantage: all corrections made for its prompt, or those of its own
    pair (which needs several, --ibpo-corrections)."""
    ibpo_rewrite_penalty: Annotated[float, NOT_NEGATIVE] = 0.0
    """ρ: deducted from a correction's own reward in the joint loss if its distance from the response exceeds
    α. Off in the paper's base variant."""
    ibpo_strip_thinking: bool = False
    """Leave <think>…</think> out of the solutions that a correction prompt shows. Off, as in the paper."""

    @property
    def masks_tokens(self) -> bool:
        return self.ibpo_variant in ("mask", "signed-mask")

    def problems(self, config: Config) -> list[str]:
        largest, factor = self.ibpo_beta, f"--ibpo-beta {self.ibpo_beta}"
        if self.ibpo_variant == "ratio":
            largest, factor = 1.0, "a share of up to 1"
        plain_prompt = self.ibpo_plain_prompt != "none"
        plain = f"--ibpo-plain-prompt {self.ibpo_plain_prompt}"
        rules = {
            f"{plain}: a correction is trained on once, under its own prompt or the plain one; add "
            "--no-ibpo-joint": plain_prompt and self.ibpo_joint,
            f"{plain}: the engine's log-probs of a correction are those of its own long prompt; use "
            "--old-logprobs recompute": plain_prompt and config.loss.old_logprobs == "engine",
            "--ibpo-mask-insertions marks tokens in the mask: it needs --ibpo-variant mask or signed-mask": (
                self.ibpo_mask_insertions and not self.masks_tokens
            ),
            "--ibpo-correction-group pair compares the corrections of a pair: it needs --ibpo-corrections of "
            "at least 2": self.ibpo_correction_group == "pair" and self.ibpo_corrections < 2,
            f"--ibpo-joint-on {self.ibpo_joint_on} chooses among the corrections of the joint loss: it needs "
            "--ibpo-joint": self.ibpo_joint_on != "all" and not self.ibpo_joint,
            "--ibpo-rewrite-penalty acts on the rewards of corrections in the joint loss: it needs "
            "--ibpo-joint": self.ibpo_rewrite_penalty > 0 and not self.ibpo_joint,
        }
        problems = bonus_problems(self.ibpo_lambda, largest, factor, config.data.reward_threshold)
        return [*problems, *(problem for problem, broken in rules.items() if broken)]

    def follow_ups(self, group: Group, context: CreditContext) -> list[FollowUp]:
        """Return --ibpo-corrections requests for every wrong response whose x̃ leaves room for a correction;
        the others are counted in `group.skipped_pairs`."""
        follow_ups, rollout, marks = list[FollowUp](), context.rollout, self._thinking(context)
        group.skipped_pairs = 0
        for target, response in enumerate(group.responses):
            if not is_wrong(response):
                continue
            # one generator per draw, so that a draw does not depend on earlier ones
            rng = random.Random(derive_seed("pair", context.seed, context.step, group.prompt.index, target))
            references = draw_references(target, group.responses, self.ibpo_k - 1, rng)
            parts = [part_in_prompt(group.responses[i], marks).ids for i in (target, *references)]
            prompt_ids = context.vocabulary.correction_prompt(group.prompt, parts[0], parts[1:])
            if len(prompt_ids) + rollout.rollout_max_response_len > context.max_context:
                group.skipped_pairs += 1
                continue
            for index in range(self.ibpo_corrections):
                request = SampleRequest(
                    prompt_ids,
                    derive_seed("correction", context.seed, context.step, group.prompt.index, target, index),
                    rollout.rollout_max_response_len,
                    rollout.rollout_temperature,
                    rollout.rollout_top_p,
                    rollout.rollout_top_k,
                    repeats_prompt=True,
                )
                follow_ups.append(FollowUp(target, references, request))
        return follow_ups

    def judge(self, groups: Sequence[Group], context: CreditContext) -> Judgement:
        """Judge the step, and fill in the fields of the corrections that come from comparing them with their
        targets."""
        marks = self._thinking(context)
        pairs = compared_pairs(groups, marks)
        edits, numbers = find_edits(pairs, mark_insertions=self.ibpo_mask_insertions)
        threshold = mark_rewrites(pairs, numbers, self.ibpo_rewrite_threshold, marks)
        answer_start = context.vocabulary.answer_start
        if answer_start is not None:
            note_reference_leakage(groups, answer_start, marks)
        metrics = correction_metrics(groups, knows_answers=answer_start is not None)
        metrics["degenerate_correction_groups"] = float(
            sum(degenerate_correction_groups(group, self, context) for group in groups)
        )
        if threshold is not None:
            # no distance exceeds 1, so with α >= 1 nothing is ever a rewrite
            metrics |= {"rewrite_threshold": threshold, "rewrite_filter_off": float(threshold >= 1)}
        phi = [
            correction_bonus(group, None if self.ibpo_variant == "ratio" else self.ibpo_beta)
            for group in groups
        ]
        explanations = [
            self._explained(group, bonuses, threshold) for group, bonuses in zip(groups, phi, strict=True)
        ]
        if not self.masks_tokens:
            return Judgement(phi, metrics=metrics, explanations=explanations)
        remaining_edits = iter(edits)
        masks = [_masks(group, list(islice(remaining_edits, len(group.corrections)))) for group in groups]
        of_corrected = [mask for of_group in masks for mask in of_group if mask is not None]
        metrics["empty_masks"] = float(sum(not mask.any() for mask in of_corrected))
        raised = signed_masks(masks) if self.ibpo_variant == "signed-mask" else None
        return Judgement(phi, masks, metrics, raised, explanations=explanations)

    def _explained(self, group: Group, phi: Sequence[float], threshold: float | None) -> list[list[Line]]:
        """Return how Δ of every wrong response came about: rewrite tests and the worth of corrections."""
        lines: list[list[Line]] = [[] for _ in group.responses]
        for number_of, correction in enumerate(group.corrections, start=1):
            lines[correction.target].append(_rewrite_line(number_of, correction, threshold))
        for target, response in enumerate(group.responses):
            if is_wrong(response):
                corrections = [c for c in group.corrections if c.target == target]
                lines[target].append(self._bonus_line(corrections, phi[target]))
                if self.masks_tokens and any(map(counts, corrections)):
                    signed = "; where the advantage is above 0, on those that it keeps"
                    note = f"0 elsewhere{signed if self.ibpo_variant == 'signed-mask' else ''}"
                    changed = "1 on the tokens that its correction changes"
                    lines[target].append(Line("token mask", changed, note=note))
        return lines

    def _bonus_line(self, corrections: Sequence[Correction], delta: float) -> Line:
        scored = [c for c in corrections if c.response.reward is not None]
        value = None if self.ibpo_variant == "ratio" else self.ibpo_beta
        worth = "share of its tokens that are kept" if value is None else f"β = {number(value)}"
        if not scored:
            note = "the verifier failed on its correction" if corrections else "it was not corrected"
        elif not any(map(counts, scored)):
            note = "it has no right correction that is no rewrite"
        else:
            note = f"{worth}, for a right correction that is no rewrite"
        worths = [
            number(c.unmodified_share if value is None else value) if counts(c) else "0" for c in scored
        ]
        mean = f"({' + '.join(worths)}) / {len(worths)}" if len(worths) > 1 else ""
        return Line("φ = Δ", delta, mean, note)

    def _thinking(self, context: CreditContext) -> ThinkingMarks | None:
        if not self.ibpo_strip_thinking:
            return None
        return require_tool(context.vocabulary.thinking, "the marks of thinking")


def _rewrite_line(number_of: int, correction: Correction, threshold: float | None) -> Line:
    """Return the rewrite test of a correction: its distances and the threshold."""
    distance, nearest = number(correction.distance), correction.reference_distance
    relation = "above" if correction.beyond_threshold else "not above"
    note = f"distance {distance} from the response is {relation} α"
    note += "" if threshold is None else f" = {number(threshold)}"
    if correction.beyond_threshold and correction.references:
        near = "that" if nearest is None else f"{number(nearest)}, that"
        note += f" and {'' if correction.rewritten else 'not '}above {near} from the nearest reference"
    verdict = "rewrite" if correction.rewritten else "no rewrite"
    return Line(f"rewrite test of correction {number_of}", verdict, note=note)


def _masks(group: Group, edits: Sequence[Flags]) -> list[TokenWeights]:
    """Return every response's mask: the union of what its counting corrections change; None without any."""
    of_target: list[list[Flags]] = [[] for _ in group.responses]
    for correction, changed in zip(group.corrections, edits, strict=True):
        if counts(correction):
            of_target[correction.target].append(changed)
    return [gradient_mask(changed) if changed else None for changed in of_target]
