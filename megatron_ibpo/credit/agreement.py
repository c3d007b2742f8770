"""Agreement: an operator that generates nothing. A wrong response is the nearer to being right the more of
its steps, its answer being the last, correct responses of its group have too."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ibpo.config import AlgorithmConfig
from megatron_ibpo.credit.operator import Judgement, LoopAccess, TokenTexts, TokenWeights, lent
from megatron_ibpo.credit.pairing import is_wrong
from megatron_ibpo.credit.spans import split_spans
from megatron_ibpo.records import Group, Response

__all__ = ["agreement"]

Step = tuple[int, ...]


def agreement(groups: Sequence[Group], algorithm: AlgorithmConfig, loop: LoopAccess) -> Judgement:
    """φ of a wrong response is the share of its steps that some correct response has, token by token,
    wherever in it; 0 if none is correct. Under --ibpo-variant mask the gradient goes through the other steps
    only.

    Raises:
        ValueError: the loop lends no texts of tokens.
    """
    texts = lent(loop.token_texts, "texts of tokens")
    judged = [_judge(group, texts) for group in groups]
    phi = [[share for share, _ in of_group] for of_group in judged]
    of_wrong = [
        share
        for group, shares in zip(groups, phi, strict=True)
        for response, share in zip(group.responses, shares, strict=True)
        if is_wrong(response)
    ]
    metrics = {"agreement": sum(of_wrong) / len(of_wrong)} if of_wrong else {}
    if algorithm.ibpo_variant != "mask":
        return Judgement(phi, metrics=metrics)
    return Judgement(phi, [[weights for _, weights in of_group] for of_group in judged], metrics)


def _judge(group: Group, texts: TokenTexts) -> list[tuple[float, TokenWeights]]:
    """(φ, token weights) of every response."""
    correct = [response for response in group.responses if response.correct]
    known = {step for response in correct for step in _steps(response, texts)}
    ended = any(response.finish_reason == "stop" for response in correct)
    judged: list[tuple[float, TokenWeights]] = []
    for response in group.responses:
        steps = _steps(response, texts) if known and is_wrong(response) else []
        if not steps:
            judged.append((0.0, None))
            continue
        weights = [0.0 if step in known else 1.0 for step in steps for _ in step]
        weights += [0.0 if ended else 1.0] * (response.finish_reason == "stop")
        judged.append((sum(step in known for step in steps) / len(steps), tuple(weights)))
    return judged


def _steps(response: Response, texts: TokenTexts) -> list[Step]:
    ids = response.content_ids
    return [tuple(ids[first:last]) for first, last in split_spans(texts(ids))]
