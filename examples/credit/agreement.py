"""Agreement: a method that generates nothing.

--ibpo-operator examples/credit/agreement.py:Agreement. A wrong response is the nearer to being right, the
more of its steps also occur in correct responses of its group; its answer is the last step. It shows a method
with parameters, a bonus and token masks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from megatron_ibpo.basics.records import Group, Sample
from megatron_ibpo.config import NOT_NEGATIVE
from megatron_ibpo.credit import CreditContext, Judgement, Operator
from megatron_ibpo.credit.explanation import Line
from megatron_ibpo.credit.operator import TokenTexts, TokenWeights, require_tool, signed_masks
from megatron_ibpo.credit.pairing import is_wrong, written_spans


@dataclass(frozen=True)
class Agreement(Operator):
    """Agreement with correct responses. φ of a wrong response is the share of its steps that occur, token by
    token and anywhere, in some correct response; 0 if none is correct. Under --ibpo-variant mask the gradient
    passes through the other steps only. Under signed-mask it passes through the shared steps if the advantage
    is above 0, otherwise through the others."""

    ibpo_joint = False

    ibpo_lambda: Annotated[float, NOT_NEGATIVE] = 0.6
    """λ: shaped reward is r + λφ."""
    ibpo_variant: Literal["base", "mask", "signed-mask"] = "base"
    """Tokens of a wrong response that have a gradient: all ("base"); those of the steps that no correct
    response has ("mask"); or, if its advantage is above 0, those of the others ("signed-mask")."""

    @property
    def masks_tokens(self) -> bool:
        return self.ibpo_variant != "base"

    def judge(self, groups: Sequence[Group], context: CreditContext) -> Judgement:
        """
        Raises:
            ValueError: the context has no texts of tokens.
        """
        texts = require_tool(context.vocabulary.token_texts, "texts of tokens")
        judgements = [_judge(group, texts) for group in groups]
        phi = [[share for share, _ in of_group] for of_group in judgements]
        of_wrong = [
            share
            for group, shares in zip(groups, phi, strict=True)
            for response, share in zip(group.responses, shares, strict=True)
            if is_wrong(response)
        ]
        metrics = {"agreement": sum(of_wrong) / len(of_wrong)} if of_wrong else {}
        words = [[_explained(share) for share in of_group] for of_group in phi]
        if not self.masks_tokens:
            return Judgement(phi, metrics=metrics, explanations=words)
        masks = [[weights for _, weights in of_group] for of_group in judgements]
        signed = self.ibpo_variant == "signed-mask"
        raised = signed_masks(masks) if signed else None
        return Judgement(phi, masks, metrics, raised, explanations=words)


def _explained(share: float) -> list[Line]:
    """Return how φ came about, for readers of the run."""
    return [Line("φ", share, note="share of its steps that a right response has too")] if share else []


def _judge(group: Group, texts: TokenTexts) -> list[tuple[float, TokenWeights]]:
    """Return (φ, token weights) of every response."""
    correct = [response for response in group.responses if response.correct]
    correct_steps = {_step(response, span) for response in correct for span in written_spans(response, texts)}
    is_ended_by_correct = any(response.finish_reason == "stop" for response in correct)
    judgements: list[tuple[float, TokenWeights]] = []
    for response in group.responses:
        spans = written_spans(response, texts) if correct_steps and is_wrong(response) else []
        if not spans:
            judgements.append((0.0, None))
            continue
        agreed = [span for span in spans if _step(response, span) in correct_steps]
        weights = np.ones(len(response.token_ids))
        for first, last in agreed:
            weights[first:last] = 0.0
        if response.finish_reason == "stop" and is_ended_by_correct:
            weights[-1] = 0.0
        judgements.append((len(agreed) / len(spans), weights))
    return judgements


def _step(response: Sample, span: tuple[int, int]) -> bytes:
    """Return the tokens of a span in a form that a set can hold."""
    first, last = span
    return response.token_ids[first:last].tobytes()
