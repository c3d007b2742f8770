"""One stored sample of an evaluation: a line of JSON that can be read, resumed from and shown."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import numpy as np

from megatron_ibpo.basics.records import Prompt, Sample, SampleRequest, token_ids
from megatron_ibpo.rewards import Response

Kind = Literal["sampled", "greedy", "correction"]
Key = tuple[Kind, int, int]
"""(kind, index of the prompt, number of the sample): identifies a sample within a set."""

_LONGEST_LABEL = 2000
"""Characters. The tests of a code problem may take megabytes, and every sample stores its label."""


@dataclass(frozen=True)
class EvalSample:
    """One sample of the policy, with the verifier's judgement."""

    set: str
    """Name of the set of prompts."""
    id: str
    """Identity of the problem: the data's own id if it has one, otherwise its position."""
    prompt_index: int
    kind: Kind
    """Kind of sample. A correction has the number of the sample that it corrects."""
    number: int
    prompt: str
    """The question."""
    label: str
    """Label that the verifier compares with; truncated if long."""
    text: str
    """The response."""
    answer: str | None
    """Answer that the verifier's module extracts from the response. Without one, None, the sample has no
    vote."""
    reward: float | None
    """None where the verifier failed."""
    correct: bool
    error: str | None
    """Error of the verifier, if it failed."""
    finish_reason: Literal["stop", "length"]
    num_tokens: int
    """Number of tokens that the policy wrote."""
    details: dict[str, float]
    """Further numbers from the verifier."""
    mean_logprob: float | None
    """Mean over those tokens; None without any."""
    token_ids: list[int] | None = field(default=None, repr=False)
    """Token ids; stored only if the sample may be corrected."""

    @property
    def key(self) -> Key:
        return self.kind, self.prompt_index, self.number

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "EvalSample":
        """Restore a sample from `as_json`. Raises TypeError or KeyError for other rows."""
        return cls(**{name.name: row[name.name] for name in fields(cls)})

    def as_candidate(self, prompt: Prompt) -> Sample:
        """Return the sample as input for a correction prompt, without its score."""
        assert self.token_ids is not None  # stored if corrections are requested
        ids = token_ids(self.token_ids)
        return Sample(
            prompt_token_ids=prompt.token_ids,
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            finish_reason=self.finish_reason,
            temperature=1.0,
            versions=((0, 0),),
            loss_mask=np.ones(len(ids), bool),
        )


@dataclass(frozen=True)
class EvalRequest:
    """A sample to be generated."""

    key: Key
    prompt: Prompt
    request: SampleRequest


def problem_id(prompt: Prompt) -> str:
    """Return the data's own id of a problem, otherwise its position in the source."""
    return str(prompt.metadata.get("id", prompt.index))


def eval_sample(
    name: str,
    request: EvalRequest,
    sample: Sample,
    response: str | Response,
    answer: Callable[[Prompt, str | Response], str | None] | None,
    *,
    keep_tokens: bool,
) -> EvalSample:
    """Return a scored sample in its stored form.

    Args:
        name: the set.
        answer: extracts the answer of a response to a prompt; None if no verifier of the set defines that.
    """
    prompt, (kind, index, number) = request.prompt, request.key
    tokens = sample.num_trained_tokens
    logprob = math.fsum(sample.logprobs[sample.loss_mask].tolist()) / tokens if tokens else None
    return EvalSample(
        set=name,
        id=problem_id(prompt),
        prompt_index=index,
        kind=kind,
        number=number,
        prompt=prompt.text,
        label=_short(prompt.label),
        text=response.text if isinstance(response, Response) else response,
        answer=(answer(prompt, response) or None) if answer is not None else None,
        reward=sample.reward,
        correct=sample.correct,
        error=sample.reward_error,
        finish_reason=sample.finish_reason,
        num_tokens=tokens,
        details=dict(sample.reward_details),
        mean_logprob=logprob,
        token_ids=sample.token_ids.tolist() if keep_tokens else None,
    )


def _short(label: str) -> str:
    if len(label) <= _LONGEST_LABEL:
        return label
    return f"{label[:_LONGEST_LABEL]}… ({len(label):,} characters in all)"
