"""Batched verifiers: faster than one message per response to a worker process."""

from collections.abc import Callable, Sequence
from typing import Any


def in_batches(judge: Callable[[str, str, str, dict[str, Any]], Any]) -> Callable[..., list[Any]]:
    """Return a batched verifier (`rewards.Verifier`) that judges each response by itself.

    Args:
        judge: (prompt, response, label, metadata) → value.
    """

    def score(
        prompts: Sequence[str],
        responses: Sequence[str],
        labels: Sequence[str],
        metadata: Sequence[dict[str, Any]],
    ) -> list[Any]:
        return [judge(*asked) for asked in zip(prompts, responses, labels, metadata, strict=True)]

    score.batched = True  # type: ignore[attr-defined]
    return score
