"""Accuracy on held-out prompts: sampled (avg@k), greedy, majority vote, best-of-k, and after correction.

Each measure is first computed for every prompt; the mean over prompts is the measure. Intervals and
comparisons resample prompts, since samples of one prompt are not independent. Correction at test time is the
paper's GSPO+Prompt: every sample is corrected alongside others.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_ibpo.basics.records import Prompt, Sample, SampleRequest, TokenIds
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.basics.text import counted
from megatron_ibpo.config import EvalSampling
from megatron_ibpo.evaluate.stored_samples import EvalRequest, EvalSample, Key

Outcomes = npt.NDArray[np.float64]
"""1 for correct, 0 for wrong, NaN where the verifier failed: [P, S] for all samples, or [P] for a measure by
prompt."""
_RESAMPLES = 2000
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
            own_seed = derive_seed("test-time correction", seed, prompt.index, number)
            key: Key = ("correction", prompt.index, number)
            requests.append(EvalRequest(key, prompt, _request(x_tilde, own_seed, sampling)))
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
    """Number of samples whose correction prompt left no room for a correction; the sample itself counts."""
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
        EvalRequest(
            ("sampled", prompt.index, number),
            prompt,
            _request(prompt.token_ids, derive_seed("evaluate", seed, prompt.index, number), sampling),
        )
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
        per_prompt = [samples[i * sampling.samples : (i + 1) * sampling.samples] for i in range(len(prompts))]
        corrections = [
            correction
            for prompt, of_prompt in zip(prompts, per_prompt, strict=True)
            for correction in correction_requests(prompt, of_prompt, corrector, sampling, seed)
        ]
        samples += ask(corrections) if corrections else []
    order = [prompt.index for prompt in prompts]
    return summarised(samples, order, has_answers=has_answers, corrects=corrector is not None), samples


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
    samples_by_key = {sample.key: sample for sample in samples}
    number = sum(sample.kind == "sampled" for sample in samples) // len(order)
    sampled = [[samples_by_key["sampled", index, n] for n in range(number)] for index in order]
    greedy = [samples_by_key["greedy", index, 0] for index in order]
    correct_PS, greedy_P = _correctness(sampled), _correctness([greedy])[0]
    if np.isnan(correct_PS).all() or np.isnan(greedy_P).all():
        first = next((sample.error for sample in samples if sample.error), None)
        raise ValueError(f"evaluation: the verifier failed on every response; the first error: {first}")
    responses = [response for of_prompt in sampled for response in of_prompt]
    lack_answers = [response.finish_reason == "stop" and not response.answer for response in responses]
    measures = {"accuracy": _means(correct_PS), "greedy_accuracy": greedy_P}
    low, high = interval_over_prompts(measures["accuracy"])
    if number > 1:
        measures |= _of_several(correct_PS, sampled, has_answers)
    corrections_PS: Outcomes | None = None
    if corrects:
        # a sample without a correction stands for itself
        corrected = [
            [samples_by_key.get(("correction", s.prompt_index, s.number), s) for s in of_prompt]
            for of_prompt in sampled
        ]
        corrections_PS = _correctness(corrected)
        measures["corrected_accuracy"] = _means(corrections_PS)
    means = {name: known_mean(values_P) for name, values_P in measures.items()}
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
        no_answer_share=float(np.mean(lack_answers)) if has_answers else None,
        pass_at={
            int(name.removeprefix("pass_at_")): value
            for name, value in means.items()
            if name.startswith("pass_at_") and value is not None
        },
        majority_accuracy=means.get("majority_accuracy"),
        best_of_accuracy=means.get("best_of_accuracy"),
        corrected_accuracy=None if corrections_PS is None else known_mean(corrections_PS),
        corrections_skipped=len(responses) - sum(s.kind == "correction" for s in samples) if corrects else 0,
        by_prompt={
            name: [None if math.isnan(value) else value for value in values_P.tolist()]
            for name, values_P in measures.items()
        },
    )


def _request(ids: TokenIds, seed: int, sampling: EvalSampling) -> SampleRequest:
    return SampleRequest(ids, seed, sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k)


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
    likelihoods_PS = np.array(
        [
            [-math.inf if s.mean_logprob is None else s.mean_logprob for s in of_prompt]
            for of_prompt in sampled
        ]
    )
    return measures | {"best_of_accuracy": best_of(correct_PS, likelihoods_PS)}


def _correctness(rows: Sequence[Sequence[EvalSample]]) -> Outcomes:
    """Return 1 for correct, 0 for wrong, NaN where the verifier failed."""
    return np.array(
        [[np.nan if s.reward is None else float(s.correct) for s in of_prompt] for of_prompt in rows]
    )


def _means(outcomes_PS: Outcomes) -> Outcomes:
    """Return the mean of the known outcomes for each prompt; NaN if none is known."""
    known_P = (~np.isnan(outcomes_PS)).sum(axis=1)
    return np.where(known_P > 0, np.nansum(outcomes_PS, axis=1) / np.maximum(known_P, 1), np.nan)


def unknown_as_nan(values: Sequence[float | None]) -> Outcomes:
    """Return values of `Evaluation.by_prompt` in the form that the estimators take."""
    return np.array([math.nan if value is None else value for value in values])


def pass_at(correct_PS: Outcomes, k: int) -> Outcomes:
    """Return the probability that at least one of k samples is correct. For each prompt it is the unbiased
    estimate 1 - C(n-c, k) / C(n, k) from its n scored samples, c of them correct (arXiv 2107.03374, eq. 1).

    NaN for prompts with fewer than k scored samples.
    """
    known_P = (~np.isnan(correct_PS)).sum(axis=1)
    hits_P = np.nansum(correct_PS, axis=1)
    chances = [
        1 - math.comb(int(n - c), k) / math.comb(int(n), k) if n >= k else math.nan
        for n, c in zip(known_P, hits_P, strict=True)
    ]
    return np.array(chances)


def majority(correct_PS: Outcomes, answers: Sequence[Sequence[str | None]]) -> Outcomes:
    """Return maj@n (arXiv 2203.11171): whether a prompt's most frequent answer is correct, or the mean over
    equally frequent answers. None and "" count as no answer and have no vote; a prompt without any vote
    counts as wrong."""
    return np.array([_voted(*pair) for pair in zip(correct_PS, answers, strict=True)])


def _voted(correct_S: Outcomes, answers: Sequence[str | None]) -> float:
    outcomes: dict[str, list[float]] = defaultdict(list)
    for outcome, answer in zip(correct_S, answers, strict=True):
        if answer:
            outcomes[answer].append(outcome)
    largest = max(map(len, outcomes.values()), default=0)
    winners = [np.array(votes) for votes in outcomes.values() if len(votes) == largest]
    # an answer whose verifier failed every time does not count as right
    scores = [float(np.nanmean(votes)) if not np.isnan(votes).all() else 0.0 for votes in winners]
    return float(np.mean(scores)) if scores else 0.0


def best_of(correct_PS: Outcomes, scores_PS: npt.NDArray[np.float64]) -> Outcomes:
    """Return whether a prompt's sample with the highest score is correct; not if its verifier failed."""
    best_P = scores_PS.argmax(axis=1)
    return np.nan_to_num(np.take_along_axis(correct_PS, best_P[:, None], axis=1))[:, 0]


def known_mean(values: Outcomes) -> float | None:
    """Return the mean of the values that are known; None if none is."""
    scored = values[~np.isnan(values)]
    return float(scored.mean()) if scored.size else None


def interval_over_prompts(values_P: Outcomes) -> tuple[float, float]:
    """Return the 95 % interval of a measure's mean over prompts. If all values are 0 or 1, as of one sample
    per prompt, it is Wilson's, so that a few prompts without a failure do not look certain. Otherwise prompts
    are resampled (percentile bootstrap), because samples of a prompt are not independent."""
    scored = values_P[~np.isnan(values_P)]
    if np.isin(scored, (0.0, 1.0)).all():
        return wilson(float(scored.mean()), len(scored))
    draw = np.random.default_rng(0).integers(len(scored), size=(_RESAMPLES, len(scored)))
    means = scored[draw].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return Wilson's score interval, 95 %, of a share of `count` independent trials."""
    z2 = 1.959964**2
    center = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * (share * (1 - share) + z2 / (4 * count)) / count) / (1 + z2 / count)
    return max(0.0, center - half), min(1.0, center + half)
