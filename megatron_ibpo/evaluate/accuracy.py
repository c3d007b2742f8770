"""Accuracy on held-out prompts: sampled (avg@k), greedy, majority vote, best-of-k, and after correction.

Correction at test time is the paper's GSPO+Prompt: every sample is corrected alongside others.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from megatron_ibpo.basics.records import Prompt, Sample, SampleRequest, TokenIds
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.basics.text import counted
from megatron_ibpo.config import EvalSampling
from megatron_ibpo.evaluate.pass_at_k import Outcomes, best_of, interval, majority, mean_over_prompts, pass_at
from megatron_ibpo.evaluate.stored_samples import EvalRequest, EvalSample, Key

Ask = Callable[[Sequence[EvalRequest]], Sequence[EvalSample]]
"""Requests → scored samples, in order. Stored samples are reused without asking an engine again."""


@dataclass(frozen=True)
class Corrector:
    """The way solutions are corrected at test time."""

    prompt_ids: Callable[[Prompt, Sequence[Sample]], TokenIds]
    """(prompt, candidate solutions, the one to be corrected first) → x̃."""
    num_candidates: int
    """K: number of a prompt's samples in a correction prompt."""
    max_context: int
    """Limit of tokens in x̃ and the correction together."""


def correction_requests(
    prompt: Prompt, samples: Sequence[EvalSample], corrector: Corrector, sampling: EvalSampling, seed: int
) -> list[EvalRequest]:
    """Return one correction request per sample of a prompt, except where x̃ leaves no room for the
    correction.

    Args:
        samples: all samples of the prompt, by number; at least num_candidates.
    """
    requests = []
    for number, target in enumerate(samples):
        rng = random.Random(derive_seed("test-time pair", seed, prompt.index, number))
        companions = rng.sample([*samples[:number], *samples[number + 1 :]], corrector.num_candidates - 1)
        x_tilde = corrector.prompt_ids(
            prompt, [sample.as_candidate(prompt) for sample in (target, *companions)]
        )
        if len(x_tilde) + sampling.max_tokens <= corrector.max_context:
            request = SampleRequest(
                x_tilde,
                derive_seed("test-time correction", seed, prompt.index, number),
                sampling.max_tokens,
                sampling.temperature,
                sampling.top_p,
                sampling.top_k,
            )
            requests.append(EvalRequest(("correction", prompt.index, number), prompt, request))
    return requests


@dataclass(frozen=True)
class Evaluation:
    """The measures of one policy on one set."""

    num_prompts: int
    samples_per_prompt: int
    accuracy: float
    """Share of correct responses among the sampled ones: avg@samples_per_prompt."""
    accuracy_low: float
    accuracy_high: float
    """95 % interval of `accuracy` for the population that the prompts were drawn from."""
    greedy_accuracy: float
    reward: float
    """Mean reward of the sampled responses."""
    mean_length: float
    """Mean number of tokens that the policy wrote per response."""
    truncated_share: float
    """Share of sampled responses that reached the length limit."""
    reward_errors: int
    """Responses (sampled, greedy, corrected) whose verifier failed. They are left out of the accuracies, and
    do not count as right in a vote."""
    no_answer_share: float | None = None
    """Share of sampled responses that ended by themselves but have no answer that can be extracted; None if
    no verifier defines answers."""
    pass_at: dict[int, float] = field(default_factory=dict)
    """k → pass@k, for powers of two from 2 on and for all samples."""
    majority_accuracy: float | None = None
    """maj@samples_per_prompt; None for one sample, or if no answers can be extracted."""
    best_of_accuracy: float | None = None
    """Accuracy of the sample that the policy itself finds likeliest (mean log-prob): best-of-n without a
    verifier. With a verifier that knows the answer, best-of-n is pass@n."""
    corrected_accuracy: float | None = None
    """Share of correct corrections among those of all samples; None if compare-and-correct is off."""
    corrections_skipped: int = 0
    """Number of samples whose correction prompt left no room for a correction; the sample itself is used
    instead."""
    by_prompt: dict[str, list[float | None]] = field(default_factory=dict, repr=False)
    """Measure (accuracy, greedy_accuracy, pass_at_K, …) → its value for every prompt, in order; None where
    the verifier failed."""

    def metrics(self) -> dict[str, float]:
        """Return the known measures for the metrics log."""
        measures = asdict(self)
        del measures["by_prompt"]
        measures |= {f"pass_at_{k}": value for k, value in measures.pop("pass_at").items()}
        return {name: value for name, value in measures.items() if value is not None}

    def __str__(self) -> str:
        errors = f", {counted(self.reward_errors, 'reward error')}" if self.reward_errors else ""
        n = self.samples_per_prompt
        parts = [f"pass@{k} {value:.3f}" for k, value in self.pass_at.items()]
        named = {f"maj@{n}": self.majority_accuracy, f"best-of-{n}": self.best_of_accuracy}
        named["corrected"] = self.corrected_accuracy
        parts += [f"{name} {value:.3f}" for name, value in named.items() if value is not None]
        without = f", {self.no_answer_share:.1%} without an answer" if self.no_answer_share else ""
        return (
            f"accuracy {self.accuracy:.3f} [{self.accuracy_low:.3f}, {self.accuracy_high:.3f}] sampled, "
            f"{self.greedy_accuracy:.3f} greedy, {counted(self.num_prompts, 'prompt')} x {n}, "
            f"{self.mean_length:.1f} tokens per response, {self.truncated_share:.1%} truncated"
            + f"{without}{errors}"
            + "".join(f", {part}" for part in parts)
        )


def evaluate(
    prompts: Sequence[Prompt],
    ask: Ask,
    sampling: EvalSampling,
    *,
    seed: int = 0,
    has_answers: bool = False,
    corrector: Corrector | None = None,
) -> tuple[Evaluation, list[EvalSample]]:
    """Answer every prompt `sampling.samples` times and once greedily, and return (the summary, every sample).

    The seed of each sample depends only on `seed`, the prompt's index and the sample's number, so that
    evaluations of two policies on the same prompts are paired. `ask` is called once, with the samples in the
    order of the prompts and then the greedy ones; corrections take another call.

    Args:
        has_answers: the samples from `ask` have answers, for maj@k.
        corrector: corrects every sample, without looking at the scores; None: no corrections.

    Raises:
        ValueError: no prompts, or no response at all could be scored.
    """
    if not prompts:
        raise ValueError("evaluation needs at least one prompt")
    sampled_requests = [
        EvalRequest(("sampled", prompt.index, number), prompt, _request(prompt, sampling, number, seed))
        for prompt in prompts
        for number in range(sampling.samples)
    ]
    greedy_requests = [
        EvalRequest(
            ("greedy", prompt.index, 0),
            prompt,
            SampleRequest(prompt.token_ids, seed, sampling.max_tokens, temperature=0.0),
        )
        for prompt in prompts
    ]
    samples = list(ask([*sampled_requests, *greedy_requests]))
    if corrector is not None:
        samples_by_key = by_key(samples)
        of_prompts = {
            prompt.index: [
                samples_by_key["sampled", prompt.index, number] for number in range(sampling.samples)
            ]
            for prompt in prompts
        }
        corrections = [
            correction
            for prompt in prompts
            for correction in correction_requests(prompt, of_prompts[prompt.index], corrector, sampling, seed)
        ]
        samples += ask(corrections) if corrections else []
    order = [prompt.index for prompt in prompts]
    return summarised(samples, order, has_answers=has_answers, corrects=corrector is not None), samples


def by_key(samples: Sequence[EvalSample]) -> dict[Key, EvalSample]:
    return {sample.key: sample for sample in samples}


def summarised(
    samples: Sequence[EvalSample], order: Sequence[int], *, has_answers: bool, corrects: bool
) -> Evaluation:
    """Return the measures of one set from its samples.

    Args:
        order: indices of the prompts. All have the same number of samples, numbered from 0.
        has_answers, corrects: as in `evaluate`.

    Raises:
        ValueError: no response at all could be scored.
    """
    samples_by_key = by_key(samples)
    number = sum(sample.kind == "sampled" for sample in samples) // len(order)
    sampled = [[samples_by_key["sampled", index, n] for n in range(number)] for index in order]
    greedy = [samples_by_key["greedy", index, 0] for index in order]
    correct_PS, greedy_P = _correctness(sampled), _correctness([greedy])[0]
    if np.isnan(correct_PS).all() or np.isnan(greedy_P).all():
        first = next((sample.error for sample in samples if sample.error), None)
        raise ValueError(f"evaluation: the verifier failed on every response; the first error: {first}")
    responses = [response for of_prompt in sampled for response in of_prompt]
    low, high = interval(correct_PS)
    measures = {"accuracy": _means(correct_PS), "greedy_accuracy": greedy_P}
    if number > 1:
        measures |= _of_several(correct_PS, sampled, has_answers)
    corrections_PS: Outcomes | None = None
    if corrects:
        corrections_PS = _correctness([_corrected(of_prompt, samples_by_key) for of_prompt in sampled])
        measures["corrected_accuracy"] = _means(corrections_PS)
    means = {name: mean_over_prompts(values_P) for name, values_P in measures.items()}
    return Evaluation(
        num_prompts=len(order),
        samples_per_prompt=number,
        accuracy=float(np.nanmean(correct_PS)),
        accuracy_low=low,
        accuracy_high=high,
        greedy_accuracy=float(np.nanmean(greedy_P)),
        reward=float(np.mean([sample.reward for sample in responses if sample.reward is not None])),
        mean_length=float(np.mean([sample.num_tokens for sample in responses])),
        truncated_share=float(np.mean([sample.finish_reason == "length" for sample in responses])),
        reward_errors=sum(sample.reward is None for sample in samples),
        no_answer_share=float(np.mean([_lacks_answer(sample) for sample in responses]))
        if has_answers
        else None,
        pass_at={
            int(name.removeprefix("pass_at_")): value
            for name, value in means.items()
            if name.startswith("pass_at_") and value is not None
        },
        majority_accuracy=means.get("majority_accuracy"),
        best_of_accuracy=means.get("best_of_accuracy"),
        corrected_accuracy=None if corrections_PS is None else _known_mean(corrections_PS),
        corrections_skipped=len(responses) - sum(s.kind == "correction" for s in samples) if corrects else 0,
        by_prompt={name: _listed(values_P) for name, values_P in measures.items()},
    )


def _request(prompt: Prompt, sampling: EvalSampling, number: int, seed: int) -> SampleRequest:
    return SampleRequest(
        prompt.token_ids,
        derive_seed("evaluate", seed, prompt.index, number),
        sampling.max_tokens,
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
    )


def _of_several(
    correct_PS: Outcomes, sampled: Sequence[Sequence[EvalSample]], has_answers: bool
) -> dict[str, Outcomes]:
    """Return pass@k, maj@n and best-of-n from the samples of each prompt."""
    n = correct_PS.shape[1]
    ks = sorted({k for k in (2**i for i in range(1, n.bit_length())) if k <= n} | {n})
    measures = {f"pass_at_{k}": pass_at(correct_PS, k) for k in ks}
    if has_answers:
        answers = [[sample.answer for sample in of_prompt] for of_prompt in sampled]
        measures["majority_accuracy"] = majority(correct_PS, answers)
    likelihoods_PS = np.array([[_likelihood(sample) for sample in of_prompt] for of_prompt in sampled])
    return measures | {"best_of_accuracy": best_of(correct_PS, likelihoods_PS)}


def _corrected(of_prompt: Sequence[EvalSample], samples_by_key: Mapping[Key, EvalSample]) -> list[EvalSample]:
    """Return the correction of every sample, or the sample itself if it has none."""
    return [samples_by_key.get(("correction", s.prompt_index, s.number), s) for s in of_prompt]


def _likelihood(sample: EvalSample) -> float:
    return -math.inf if sample.mean_logprob is None else sample.mean_logprob


def _lacks_answer(sample: EvalSample) -> bool:
    return sample.finish_reason == "stop" and not sample.answer


def _correctness(rows: Sequence[Sequence[EvalSample]]) -> Outcomes:
    """Return 1 for correct, 0 for wrong, NaN where the verifier failed."""
    return np.array(
        [[np.nan if s.reward is None else float(s.correct) for s in of_prompt] for of_prompt in rows]
    )


def _means(outcomes_PS: Outcomes) -> Outcomes:
    """Return the mean of the known outcomes for each prompt; NaN if none is known."""
    known_P = (~np.isnan(outcomes_PS)).sum(axis=1)
    return np.where(known_P > 0, np.nansum(outcomes_PS, axis=1) / np.maximum(known_P, 1), np.nan)


def _known_mean(outcomes_PS: Outcomes) -> float | None:
    return None if np.isnan(outcomes_PS).all() else float(np.nanmean(outcomes_PS))


def _listed(values_P: Outcomes) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values_P.tolist()]


def unknown_as_nan(values: Sequence[float | None]) -> Outcomes:
    """Return values of `Evaluation.by_prompt` in the form that the estimators take."""
    return np.array([math.nan if value is None else value for value in values])
