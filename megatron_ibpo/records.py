"""The typed records that flow between the rooms. Plain data: token ids, rewards, weights.

Token ids travel from end to end; text appears only where a verifier or a reader needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "Correction",
    "Group",
    "Prompt",
    "Response",
    "SampleRequest",
    "TrainSequence",
]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task, tokenised. `index` is its position in the source's endless stream."""

    index: int
    token_ids: tuple[int, ...]
    """The whole prompt as the policy sees it, generation prompt included."""
    head_length: int
    """How many of `token_ids` come before the place where further user content may be inserted
    (candidate solutions of a correction); the rest is the generation prompt."""
    label: str
    """Ground truth, as the verifier wants it."""
    task: str
    """Name of the data source or sub-task: verifiers and metrics may group by it."""
    text: str
    """The question as text, for verifiers and reports."""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def head_ids(self) -> tuple[int, ...]:
        return self.token_ids[: self.head_length]

    @property
    def tail_ids(self) -> tuple[int, ...]:
        return self.token_ids[self.head_length :]


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One response to be sampled. Every request has its own seed."""

    prompt_token_ids: tuple[int, ...]
    seed: int
    max_tokens: int
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: off."""


@dataclass(slots=True)
class Response:
    """What the engine sampled, and later what the verifier said of it."""

    token_ids: Sequence[int]
    """Sampled ids, a tuple from an engine; the end-of-sequence id is the last one when `finish_reason` is
    "stop"."""
    logprobs: Sequence[float]
    """Per-token log-probs of the distribution actually sampled (after temperature, top-p, top-k), from
    the engine. Same length as `token_ids`."""
    finish_reason: Literal["stop", "length"]
    temperature: float
    policy_version: int
    """Version of the weights that sampled it."""
    reward: float | None = None
    """None until scored, and for good when the verifier failed: an error is not a reward of 0."""
    correct: bool = False
    """reward has reached the verifier's threshold."""
    reward_error: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    """What it was sampled from, where that is not the group's prompt as it stands (prompt perturbation)."""

    @property
    def num_content_tokens(self) -> int:
        """Tokens without the end-of-sequence id."""
        return len(self.token_ids) - (self.finish_reason == "stop")

    @property
    def content_ids(self) -> Sequence[int]:
        """`token_ids` without the end-of-sequence id."""
        return self.token_ids[: self.num_content_tokens]


@dataclass(slots=True)
class Correction:
    """The policy's corrected version of a wrong response, given references (ibpo steps 3-6)."""

    target: int
    """Index in `Group.responses` of the wrong response y_i."""
    references: tuple[int, ...]
    """Indices in `Group.responses` of the K-1 references, in drawn order."""
    prompt_token_ids: tuple[int, ...]
    response: Response
    distance: float = 0.0
    """Normalised token edit distance d(y_i, corrected)."""
    reference_distance: float | None = None
    """d(corrected, nearest reference); None when it is farther than `distance`, or there is none (K=1)."""
    beyond_threshold: bool = False
    """The first half of the rewrite test: `distance` exceeds α."""
    rewritten: bool = False
    """The rewrite test fired: a full rewrite earns no bonus."""
    unmodified_share: float = 0.0
    """Of the tokens of y_i, those that the canonical alignment with the corrected response keeps."""


@dataclass(slots=True)
class Group:
    """All that was sampled for one prompt in one step."""

    prompt: Prompt
    responses: list[Response]
    corrections: list[Correction] = field(default_factory=list)
    skipped_pairs: int = 0
    """Wrong responses whose correction prompt would not have fitted the context."""


@dataclass(slots=True)
class TrainSequence:
    """One sequence for the trainer, which knows no more of the algorithm than this.

    The step's loss is the sum over sequences of `weight` times the variant's loss of the sequence.
    """

    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    advantage: float
    weight: float
    group: int
    """Which prompt of the step it belongs to; a mini-batch takes whole groups."""
    kind: Literal["response", "correction"] = "response"
    temperature: float = 1.0
    rollout_logprobs: tuple[float, ...] | None = None
    """From the engine; needed for truncated importance weighting and the mismatch metrics."""
    token_weights: tuple[float, ...] | None = None
    """Scale the gradient of each response token; None means all ones."""
    token_advantages: tuple[float, ...] | None = None
    """In the place of `advantage`, one for each response token; for loss variants that have no term of whole
    sequences."""
    returns: tuple[float, ...] | None = None
    """What a critic should have predicted before each response token; None where there is no critic."""
    values: tuple[float, ...] | None = None
    """What it did predict, before the update."""
    old_logprobs: tuple[float, ...] | None = None
    """Filled by the trainer before the update; None means that the update's own forward gives them."""
    new_logprobs: tuple[float, ...] | None = None
    """After the update; with --save-debug-rollout-data only, for the record."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.response_token_ids)

    @property
    def has_advantage(self) -> bool:
        """Something to learn from: without it there is no gradient."""
        return self.advantage != 0 if self.token_advantages is None else any(self.token_advantages)
