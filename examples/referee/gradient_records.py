"""What is measured of a frozen policy, once for all methods: samples, and products of their gradients.

A record holds the samples that any of the study's methods asks for, and products of the gradients of their
sequences: with each other (Gram matrix), with the gradient of expected accuracy g*, which comes from other
prompts in blocks, and with the scores of responses to further plain prompts. A score s is the gradient of a
response's log-prob. For a gradient u the mean of (u·s)² over scores is the Fisher norm: twice the KL
divergence on plain prompts that an update by u causes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from frozen_policy import Contender
from sequence_gradients import GradientQuery, SequenceGradients, query_of, score_query
from torch import Tensor

from megatron_ibpo.basics.records import Group, Prompt, Sample, SampleRequest, TrainSequence, token_ids
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.config import RolloutConfig
from megatron_ibpo.credit import Credit, assign_credit
from megatron_ibpo.sampling.requests import group_requests

Array = npt.NDArray[np.float64]
METRICS = ("plain", "adam")
"""Update by the gradient itself, or by the gradient over the root mean square of each weight's gradient."""
BLOCKS = 10
STAR_SIZE, STAR_PROMPTS_AT_ONCE = 16, 16
PROBES = 4
"""Further responses that tell how hard a prompt is, independently of the group that is judged."""


class RequestSampler(Protocol):
    """Samples and scores (`FrozenPolicy.answers`)."""

    def __call__(self, requests: Sequence[tuple[Prompt, SampleRequest]]) -> list[Sample]: ...


@dataclass(frozen=True, eq=False)
class Compass:
    """Directions that the gradients of all prompts are compared with."""

    star: Tensor
    """[blocks, parameters] g* of each block of prompts."""
    scores: Tensor
    """[scores, parameters]"""
    spread: Tensor
    """[parameters] root mean square of the gradients of small steps: Adam's divisor."""
    num_prompts: int
    """First prompts of the task, which it is made from. Prompts that are measured come after them."""

    def content(self) -> dict[str, Any]:
        """Return the fields for a file."""
        return {name: getattr(self, name) for name in ("star", "scores", "spread", "num_prompts")}

    def products(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the products of rows with g* [metrics, rows, blocks] and with the scores [metrics, rows,
        scores]. Under Adam the update is a row over `spread`."""
        updates = [rows, rows / self.spread]
        return (
            torch.stack([update @ self.star.T for update in updates]),
            torch.stack([update @ self.scores.T for update in updates]),
        )


@dataclass(eq=False)
class PromptRecord:
    """Everything measured of one prompt."""

    prompt: Prompt
    samples: dict[tuple[bytes, int], Sample] = field(default_factory=dict)
    """(prompt ids, seed) of a request → its scored sample."""
    rows: dict[str, int] = field(default_factory=dict)
    """Key of a gradient query → its row in the matrices."""
    gram: Array = field(default_factory=lambda: np.zeros((0, 0)))
    star: Array = field(default_factory=lambda: np.zeros((0, 0, 0)))
    """[metrics, rows, blocks]"""
    scores: Array = field(default_factory=lambda: np.zeros((0, 0, 0)))
    """[metrics, rows, scores]"""
    probes: list[bool] = field(default_factory=list)
    """Whether each further response was correct."""

    def sample(self, request: SampleRequest) -> Sample:
        """Return a copy of the sample of a request.

        Raises:
            ValueError: it was not recorded.
        """
        sample = self.samples.get(request_key(request))
        if sample is None:
            raise ValueError(
                f"prompt {self.prompt.index}: a method asks for a sample that was not recorded; record the "
                "study with this method in it"
            )
        return replace(sample)

    def row(self, query: GradientQuery) -> int:
        """Return the row of a gradient.

        Raises:
            ValueError: it was not recorded.
        """
        if query.key not in self.rows:
            raise ValueError(
                f"prompt {self.prompt.index}: a method trains on tokens whose gradient was not "
                "recorded; record the study with this method in it"
            )
        return self.rows[query.key]


def request_key(request: SampleRequest) -> tuple[bytes, int]:
    """Return what tells a request of a prompt from its others."""
    return request.prompt_token_ids.tobytes(), request.seed


def response_requests(contender: Contender, prompt: Prompt) -> list[SampleRequest]:
    """Return the requests of a prompt's group; a smaller group's are the first of a larger one's."""
    return group_requests([prompt], contender.config.rollout, seed=contender.context.seed, step=0)


def follow_up_requests(contender: Contender, record: PromptRecord) -> tuple[Group, list[Any]]:
    """Return (the recorded group, what the method's operator asks for next)."""
    requests = response_requests(contender, record.prompt)
    group = Group(record.prompt, [record.sample(request) for request in requests])
    for index, response in enumerate(group.responses):
        response.index = index
    return group, contender.method.operator.follow_ups(group, contender.context)


def credit_of_records(contender: Contender, records: Sequence[PromptRecord]) -> tuple[list[Group], Credit]:
    """Return the groups of a step of these prompts and the method's credit for them.

    Raises:
        ValueError: the method asks for a sample that was not recorded.
    """
    groups = []
    for record in records:
        group, follow_ups = follow_up_requests(contender, record)
        samples = [record.sample(follow_up.request) for follow_up in follow_ups]
        contender.method.operator.attach(group, follow_ups, samples)
        groups.append(group)
    return groups, assign_credit(groups, contender.context, contender.method)


def record_prompts(
    prompts: Sequence[Prompt],
    contenders: Sequence[Contender],
    sampler: RequestSampler,
    gradients: SequenceGradients,
    compass: Compass,
) -> list[PromptRecord]:
    """Sample and measure all that the methods need of these prompts."""
    records = [PromptRecord(prompt) for prompt in prompts]
    widest = max(contenders, key=lambda contender: contender.size)
    seed = widest.context.seed
    probes = probe_requests(prompts, widest.config.rollout, seed)
    tried = iter(sampler([(prompt, request) for prompt, request in probes]))
    for record in records:
        record.probes = [next(tried).correct for _ in range(PROBES)]
    _answer(records, [response_requests(widest, prompt) for prompt in prompts], sampler)
    for contender in contenders:
        follow_ups = [follow_up_requests(contender, record)[1] for record in records]
        _answer(
            records, [[follow_up.request for follow_up in of_prompt] for of_prompt in follow_ups], sampler
        )
    for record in records:
        sequences = [
            s for contender in contenders for s in credit_of_records(contender, [record])[1].sequences
        ]
        _measure(record, sequences, gradients, compass)
    return records


def probe_requests(
    prompts: Sequence[Prompt], rollout: RolloutConfig, seed: int
) -> list[tuple[Prompt, SampleRequest]]:
    """Return requests that are independent of all others of these prompts."""
    return [
        (prompt, SampleRequest(prompt.token_ids, derive_seed("probe", seed, prompt.index, number), longest))
        for longest in [rollout.rollout_max_response_len]
        for prompt in prompts
        for number in range(PROBES)
    ]


def _answer(
    records: Sequence[PromptRecord], requests: Sequence[Sequence[SampleRequest]], sampler: RequestSampler
) -> None:
    """Add the samples of requests that have none."""
    open_requests = [
        (record, request)
        for record, of_prompt in zip(records, requests, strict=True)
        for request in of_prompt
        if request_key(request) not in record.samples
    ]
    samples = sampler([(record.prompt, request) for record, request in open_requests])
    for (record, request), sample in zip(open_requests, samples, strict=True):
        record.samples[request_key(request)] = sample


def _measure(
    record: PromptRecord,
    sequences: Iterable[TrainSequence],
    gradients: SequenceGradients,
    compass: Compass,
) -> None:
    """Fill in the products of the gradients of these sequences."""
    queries = {query.key: query for query, _ in map(query_of, sequences)}
    rows = gradients.each(list(queries.values()))
    star, scores = compass.products(rows)
    record.rows = {key: row for row, key in enumerate(queries)}
    record.gram = (rows @ rows.T).double().numpy()
    record.star, record.scores = star.double().numpy(), scores.double().numpy()


def make_compass(
    prompt_at: Callable[[int], Prompt],
    sampler: RequestSampler,
    gradients: SequenceGradients,
    *,
    num_star: int,
    num_scores: int,
    longest: int,
) -> Compass:
    """Return g* in blocks, Adam's divisor and scores, from prompts of their own: the first of the task.

    Args:
        prompt_at: prompt at a position.
        num_star: prompts for g* at least, answered `STAR_SIZE` times each; leave-one-out baselines keep it
            unbiased.
        num_scores: plain responses, one to each of as many prompts.
        longest: most tokens of a response.
    """
    star, counts = torch.zeros(BLOCKS, gradients.size), torch.zeros(BLOCKS)
    second, steps = torch.zeros(gradients.size), max(-(-num_star // STAR_PROMPTS_AT_ONCE), BLOCKS)
    first_score = steps * STAR_PROMPTS_AT_ONCE
    for step in range(steps):
        first = step * STAR_PROMPTS_AT_ONCE
        prompts = [prompt_at(first + place) for place in range(STAR_PROMPTS_AT_ONCE)]
        gradient = accuracy_gradient(prompts, sampler, gradients, longest)
        star[step % BLOCKS] += gradient
        counts[step % BLOCKS] += 1
        second += gradient**2
    spread = (second / steps).sqrt()
    score_prompts = [prompt_at(first_score + place) for place in range(num_scores)]
    samples = sampler([_star_request(prompt, 0, longest) for prompt in score_prompts])
    scores = gradients.each([score_query(s.prompt_token_ids, s.token_ids) for s in samples])
    divisor = spread + 0.01 * spread.mean()
    return Compass(star / counts[:, None], scores, divisor, first_score + num_scores)


def accuracy_gradient(
    prompts: Sequence[Prompt], sampler: RequestSampler, gradients: SequenceGradients, longest: int
) -> Tensor:
    """Return an unbiased estimate of the gradient of expected reward, averaged over these prompts."""
    requests = [_star_request(prompt, number, longest) for prompt in prompts for number in range(STAR_SIZE)]
    samples = sampler(requests)
    rewards = np.array([sample.reward for sample in samples]).reshape(len(prompts), STAR_SIZE)
    centred = (rewards - rewards.mean(1, keepdims=True)) / (STAR_SIZE - 1) / len(prompts)
    coefficients: dict[str, float] = {}
    queries: dict[str, GradientQuery] = {}
    for sample, coefficient in zip(samples, centred.ravel(), strict=True):
        query = score_query(sample.prompt_token_ids, sample.token_ids)
        queries[query.key] = query
        coefficients[query.key] = coefficients.get(query.key, 0.0) + coefficient
    needed = [key for key, coefficient in coefficients.items() if coefficient]
    return gradients.sum([queries[key] for key in needed], [coefficients[key] for key in needed])


def _star_request(prompt: Prompt, number: int, longest: int) -> tuple[Prompt, SampleRequest]:
    return prompt, SampleRequest(prompt.token_ids, derive_seed("star", prompt.index, number), longest)


# ------------------------------------------------------------------------------------------------- files


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a file at once, so that a killed program leaves all of it or nothing."""
    partial = path.with_suffix(".partial")
    torch.save(content, partial)
    partial.replace(path)


def load(path: Path) -> Any:
    """Read what `save` wrote: tensors and plain values."""
    return torch.load(path, weights_only=True)


def packed(record: PromptRecord) -> dict[str, Any]:
    """Return a record for a file; matrices in float32."""
    matrices = {name: torch.from_numpy(getattr(record, name)).float() for name in ("gram", "star", "scores")}
    samples = [
        {
            "prompt": torch.from_numpy(sample.prompt_token_ids.astype(np.int32)),
            "seed": seed,
            "ids": torch.from_numpy(sample.token_ids.astype(np.int32)),
            "logprobs": torch.from_numpy(sample.logprobs),
            "stopped": sample.finish_reason == "stop",
            "reward": float(sample.reward),  # type: ignore[arg-type]
            "correct": bool(sample.correct),
        }
        for (_, seed), sample in record.samples.items()
    ]
    return {
        "index": record.prompt.index,
        "samples": samples,
        "rows": record.rows,
        "probes": record.probes,
    } | matrices


def unpacked(content: dict[str, Any], prompt_at: Callable[[int], Prompt]) -> PromptRecord:
    """Return the record that `packed` made."""
    record = PromptRecord(prompt_at(content["index"]), rows=content["rows"], probes=content["probes"])
    for entry in content["samples"]:
        ids, prompt = token_ids(entry["ids"].numpy()), token_ids(entry["prompt"].numpy())
        record.samples[prompt.tobytes(), entry["seed"]] = Sample(
            prompt_token_ids=prompt,
            token_ids=ids,
            logprobs=entry["logprobs"].numpy(),
            finish_reason="stop" if entry["stopped"] else "length",
            temperature=1.0,
            versions=((0, 0),),
            loss_mask=np.ones(len(ids), bool),
            reward=entry["reward"],
            correct=entry["correct"],
        )
    for name in ("gram", "star", "scores"):
        setattr(record, name, content[name].double().numpy())
    return record
