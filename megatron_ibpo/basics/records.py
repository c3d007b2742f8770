"""The typed records that flow between the packages: numpy arrays of tokens, rewards, weights.

Text appears only where a verifier or a user needs it. Records compare by identity: arrays have no one `==`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron_ibpo.basics.sampling_mask import SamplingMask

TokenIds = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
"""Log-probs: engines and trainers compute them in float32."""
Weights = npt.NDArray[np.float64]
"""Credit is computed in float64; packing rounds it once, to float32."""
ExpertIds = npt.NDArray[np.unsignedinteger[Any]]
"""[tokens read, layers, experts per token]: the experts that a mixture's routers chose for each token that
was read (all of prompt and response but the last). In the smallest type that holds their numbers and one more
value, `no_expert`."""


ENVIRONMENT = "environment"
"""Key of a prompt's metadata that names its environment; the others use --environment."""


def token_ids(ids: Any) -> TokenIds:
    """Return `ids` (any sequence of integers) as records hold them; an int32 array is not copied."""
    return np.asarray(ids, dtype=np.int32)


def expert_ids(ids: Any, num_experts: int) -> ExpertIds:
    """Return `ids` (any array of integers) as records hold them; negative ones mean no record. Raises
    ValueError for more experts than two bytes count."""
    if num_experts > np.iinfo(np.uint16).max:
        raise ValueError(f"routers that choose among {num_experts} experts: two bytes count to 65,535")
    dtype = np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.uint16
    ids = np.asarray(ids)
    stored: ExpertIds = np.where(ids < 0, np.iinfo(dtype).max, ids).astype(dtype)
    return stored


def no_expert(ids: ExpertIds) -> int:
    """Return the value that marks a position of `ids` without a record, as for a cached token."""
    return int(np.iinfo(ids.dtype).max)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One task, tokenised. `index` is its position in the source's endless stream."""

    index: int
    token_ids: TokenIds
    """The whole prompt as the policy sees it, generation prompt included."""
    head_length: int
    """Number of `token_ids` before the point where further user content may be inserted (candidate solutions
    of a correction); the rest is the generation prompt."""
    label: str
    """Ground truth, in the verifier's format."""
    task: str
    """Name of the data source or sub-task: verifiers and metrics may group by it."""
    text: str
    """The question as text, for verifiers and reports."""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def environment(self) -> str | None:
        """The environment that the prompt names; None if its responses are of one turn."""
        named = self.metadata.get(ENVIRONMENT)
        return None if named is None else str(named)

    @property
    def head_ids(self) -> TokenIds:
        return self.token_ids[: self.head_length]

    @property
    def tail_ids(self) -> TokenIds:
        return self.token_ids[self.head_length :]


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """One response to be sampled. Every request has its own seed."""

    prompt_token_ids: TokenIds
    seed: int
    max_tokens: int
    temperature: float = 1.0
    """Sampling temperature; 0 means greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """Number of likeliest tokens to sample from; -1: off."""
    num_begun_tokens: int = 0
    """Number of tokens at the end of the prompt that already begin the response: the sample comes back as the
    whole response, and its beginning is not trained on."""
    repeats_prompt: bool = False
    """True if the response is likely to repeat parts of its prompt, as a correction does."""

    @property
    def is_cut(self) -> bool:
        """True if top-k or top-p restrict what is sampled from. They do not restrict greedy samples."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


@dataclass(slots=True, eq=False)
class Sample:
    """One sampled response or correction, with its score once a verifier has given one."""

    prompt_token_ids: TokenIds
    """Prompt that the engine sampled from; with prompt perturbation it differs from the group's prompt."""
    token_ids: TokenIds
    """Everything after the prompt; the end-of-sequence id is the last one when `finish_reason` is "stop"."""
    logprobs: Floats
    """Log-prob of each token under the distribution actually sampled (after temperature, top-p, top-k), from
    the engine; 0 where `loss_mask` is False. Same length as `token_ids`."""
    finish_reason: Literal["stop", "length"]
    temperature: float
    versions: tuple[tuple[int, int], ...]
    """(first token, policy version) of each span of tokens that one version of the weights sampled."""
    loss_mask: Flags
    """False for tokens that the policy did not write (tool output): they are context and not trained on.
    Same length as `token_ids`."""
    routed_experts: ExpertIds | None = None
    """Experts that the engine's routers chose when the log-probs were sampled; None: no record."""
    sampling_mask: SamplingMask | None = None
    """Ids that top-k and top-p left to sample from, for each of `token_ids`. None: nothing was cut off, or
    the engine does not record it."""
    drafts: tuple[int, int] = (0, 0)
    """(tokens that the engine drafted, those that it accepted). Every other token took a step of its own."""
    index: int = 0
    """Its index among the responses, or the corrections, of its group."""
    reward: float | None = None
    """None until scored, and for good if the verifier failed: an error is not a reward of 0."""
    correct: bool = False
    """True if the reward has reached the verifier's threshold."""
    reward_error: str | None = None
    reward_details: dict[str, float] = field(default_factory=dict)
    """Further numbers from the verifier, such as a share of tests passed."""

    @property
    def is_scored(self) -> bool:
        return self.reward is not None or self.reward_error is not None

    @property
    def policy_version(self) -> int:
        """Version of the oldest weights that sampled part of it."""
        return min(version for _, version in self.versions)

    def tokens_by_version(self) -> list[tuple[int, int]]:
        """Return (policy version, number of tokens it sampled) for each span."""
        ends = [*(first for first, _ in self.versions[1:]), len(self.token_ids)]
        return [(version, end - first) for (first, version), end in zip(self.versions, ends, strict=True)]

    @property
    def num_trained_tokens(self) -> int:
        """Number of tokens that the policy wrote: the length for comparisons, penalties and averages."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def num_begun_tokens(self) -> int:
        """Number of tokens at its start that the policy was given: read, not written."""
        written = np.flatnonzero(self.loss_mask)
        return int(written[0]) if len(written) else len(self.token_ids)

    @property
    def num_content_tokens(self) -> int:
        """Number of tokens without the end-of-sequence id."""
        return len(self.token_ids) - (self.finish_reason == "stop")

    @property
    def content_ids(self) -> TokenIds:
        """`token_ids` without the end-of-sequence id."""
        return self.token_ids[: self.num_content_tokens]


@dataclass(slots=True, eq=False)
class Correction:
    """The policy's corrected version of a wrong response, given references (ibpo steps 3-6)."""

    target: int
    """Index in `Group.responses` of the wrong response y_i."""
    references: tuple[int, ...]
    """Indices in `Group.responses` of the K-1 references, in drawn order."""
    response: Sample
    """Its `prompt_token_ids` are x̃."""
    distance: float = 0.0
    """Normalised token edit distance d(y_i, corrected)."""
    reference_distance: float | None = None
    """d(corrected, nearest reference); None if it exceeds `distance`, or if there are no references (K=1)."""
    beyond_threshold: bool = False
    """First half of the rewrite test: True if `distance` exceeds α."""
    rewritten: bool = False
    """True if the rewrite test fired: a full rewrite earns no bonus."""
    reference_leakage: bool = False
    """True if it copies a reference's answer without a derivation of its own
    (`megatron_ibpo.credit.edits`)."""
    unmodified_share: float = 0.0
    """Share of the tokens of y_i that the canonical alignment with the corrected response keeps."""


@dataclass(slots=True, eq=False)
class Group:
    """All samples of one prompt in one step."""

    prompt: Prompt
    responses: list[Sample]
    corrections: list[Correction] = field(default_factory=list)
    skipped_pairs: int = 0
    """Number of wrong responses whose correction prompt would not have fitted the context."""

    @property
    def samples(self) -> list[Sample]:
        """Responses, then corrections."""
        return [*self.responses, *(correction.response for correction in self.corrections)]

    @property
    def policy_version(self) -> int:
        """Version of the oldest weights that sampled part of it."""
        return min(sample.policy_version for sample in self.samples)


@dataclass(slots=True, eq=False)
class TrainSequence:
    """One sequence for the trainer, which knows nothing else of the algorithm.

    The step's loss is the sum over sequences of `weight` times the variant's loss of the sequence. Tokens
    whose `loss_mask` is False are context: they take no part in ratio, length, loss or metrics.
    """

    prompt_token_ids: TokenIds
    response_token_ids: TokenIds
    loss_mask: Flags
    """Same length as `response_token_ids`."""
    advantage: float
    weight: float
    prompt_index: int
    """`Prompt.index`."""
    group: int
    """Index of its group in the step; a mini-batch takes whole groups."""
    index: int
    """Its index among the responses, or the corrections, of its group."""
    kind: Literal["response", "correction"] = "response"
    off_policy: bool = False
    """True if it was sampled from another prompt than this one. Its rollout log-probs then do not apply, and
    its loss is the shaped surrogate (`megatron_ibpo.loss.segments`) in place of the variant's."""
    temperature: float = 1.0
    reward: float | None = None
    """Shaped reward at the end of the sequence, from which a critic's returns are computed."""
    rollout_logprobs: Floats | None = None
    """The engine's log-probs; needed for importance corrections, --old-logprobs engine and mismatch metrics.
    This and the arrays below have the length of `response_token_ids`."""
    token_weights: Weights | None = None
    """Factor of the gradient of each response token; None means all ones."""
    token_advantages: Weights | None = None
    """Advantage of each response token, in place of `advantage`; for loss variants without a sequence
    term."""
    returns: Weights | None = None
    """Target of the critic at each response token; None without a critic."""
    values: Floats | None = None
    """The critic's prediction at each response token, before the update."""
    routed_experts: ExpertIds | None = None
    """Experts as in `Sample`; the policy's routers choose the same ones again
    (--use-rollout-routing-replay)."""
    sampling_mask: SamplingMask | None = None
    """Ids over which each response token's log-probs are normalised, as the engine's were; None: all."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.response_token_ids)

    @property
    def num_trained_tokens(self) -> int:
        """Number of response tokens that the policy wrote: the length that the loss divides by."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def has_advantage(self) -> bool:
        """True if the variant's loss has a gradient; otherwise only the terms that every sequence pays have
        one."""
        return self.advantage != 0 if self.token_advantages is None else bool(self.token_advantages.any())


def repeated_prefixes(sequences: Sequence[TokenIds]) -> list[int]:
    """Return for each sequence the length of the prefix it shares with the previous one in sorted order: what
    a pass that computes every shared prefix once saves. Of equal sequences one is computed."""
    # in any order of whole tokens, sequences with the longest shared prefix are neighbours
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tobytes())
    repeated = [0] * len(sequences)
    for previous, current in pairwise(order):
        repeated[current] = shared_length(sequences[previous], sequences[current])
    return repeated


def shared_length(first: TokenIds, second: TokenIds) -> int:
    """Return the length of two sequences' common prefix."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if differs.size else length
