"""Accuracy on held-out prompts: sampled (avg@k), greedy, by vote, at best, and after correction."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from megatron_ibpo.evaluate.estimators import best_of, majority, pass_at
from megatron_ibpo.evaluate.inference import Ask, Corrector, corrected_answers
from megatron_ibpo.records import Prompt, Sample, SampleRequest
from megatron_ibpo.seeds import derive_seed
from megatron_ibpo.words import counted

Answer = Callable[[Sample], str | None]
"""The answer that a response comes to; None if it has none."""

_RESAMPLES = 2000


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of one policy."""

    num_prompts: int
    samples_per_prompt: int
    accuracy: float
    """Share of correct responses among those sampled at the rollout temperature: avg@samples_per_prompt."""
    accuracy_low: float
    accuracy_high: float
    """95 % interval of `accuracy` for the population that the prompts were drawn from."""
    greedy_accuracy: float
    reward: float
    """Mean reward of the sampled responses."""
    mean_length: float
    """Tokens that the policy wrote of a response."""
    truncated_share: float
    """Share of sampled responses that ended for length."""
    reward_errors: int
    """Responses (sampled, greedy, corrected) that the verifier failed on: left out of the accuracies, and not
    known to be right in a vote."""
    pass_at: dict[int, float] = field(default_factory=dict)
    """k → pass@k, for powers of two from 2 on and all samples."""
    majority_accuracy: float | None = None
    """maj@samples_per_prompt; None for one sample, or where no answers can be extracted."""
    best_of_accuracy: float | None = None
    """Of the sample that the policy itself finds likeliest (mean log-prob): best-of-n without a verifier.
    With one that knows the answer it is pass@n."""
    corrected_accuracy: float | None = None
    """Of one answer a prompt, by compare-and-correct over some of its samples; None where that is off."""
    corrections_skipped: int = 0
    """Prompts whose samples did not fit a correction prompt: their first candidate stands for them."""

    def metrics(self) -> dict[str, float]:
        """For the metrics log: what is known."""
        known = asdict(self)
        known |= {f"pass_at_{k}": value for k, value in known.pop("pass_at").items()}
        return {name: value for name, value in known.items() if value is not None}

    def __str__(self) -> str:
        errors = f", {counted(self.reward_errors, 'reward error')}" if self.reward_errors else ""
        n = self.samples_per_prompt
        more = [f"pass@{k} {value:.3f}" for k, value in self.pass_at.items()]
        named = {f"maj@{n}": self.majority_accuracy, f"best-of-{n}": self.best_of_accuracy}
        named["corrected"] = self.corrected_accuracy
        more += [f"{name} {value:.3f}" for name, value in named.items() if value is not None]
        return (
            f"accuracy {self.accuracy:.3f} [{self.accuracy_low:.3f}, {self.accuracy_high:.3f}] sampled, "
            f"{self.greedy_accuracy:.3f} greedy, {counted(self.num_prompts, 'prompt')} x {n}, "
            f"{self.mean_length:.1f} tokens per response, {self.truncated_share:.1%} truncated{errors}"
            + "".join(f", {part}" for part in more)
        )


def evaluate(
    prompts: Sequence[Prompt],
    ask: Ask,
    *,
    samples_per_prompt: int = 1,
    max_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = -1,
    seed: int = 0,
    answer: Answer | None = None,
    corrector: Corrector | None = None,
) -> Evaluation:
    """Have every prompt answered `samples_per_prompt` times and once greedily, and summarise.

    The seed of each sample depends on `seed`, the prompt's index and the sample's number alone, so that
    evaluations of two policies on the same prompts are paired. `ask` is called once, with the
    requests of samples in the order of the prompts and then the greedy ones; corrections take another call.

    Args:
        answer: for maj@k; without it there is none.
        corrector: has some samples of every prompt corrected, without a look at their scores.

    Raises:
        ValueError: no prompts, or no response at all could be scored.
    """
    if not prompts:
        raise ValueError("evaluation needs at least one prompt")
    requests = [
        SampleRequest(
            prompt.token_ids,
            derive_seed("evaluate", seed, prompt.index, number),
            max_tokens,
            temperature,
            top_p,
            top_k,
        )
        for prompt in prompts
        for number in range(samples_per_prompt)
    ]
    requests += [SampleRequest(prompt.token_ids, seed, max_tokens, temperature=0.0) for prompt in prompts]
    owners = [prompt for prompt in prompts for _ in range(samples_per_prompt)] + list(prompts)
    responses = ask(list(zip(owners, requests, strict=True)))
    sampled, greedy = responses[: -len(prompts)], responses[-len(prompts) :]
    by_prompt = [sampled[i : i + samples_per_prompt] for i in range(0, len(sampled), samples_per_prompt)]
    answers: list[tuple[Sample, bool]] = []
    if corrector is not None:
        answers = corrected_answers(prompts, by_prompt, ask, corrector, requests[0], seed)
    corrections = [response for response, made in answers if made]

    correct_PS = _correctness(sampled).reshape(len(prompts), samples_per_prompt)
    greedy_P = _correctness(greedy)
    if np.isnan(correct_PS).all() or np.isnan(greedy_P).all():
        raise ValueError(
            f"evaluation: the verifier failed on every response; the first error: {_error(responses)}"
        )
    low, high = _interval(correct_PS)
    rewards = [response.reward for response in sampled if response.reward is not None]
    return Evaluation(
        num_prompts=len(prompts),
        samples_per_prompt=samples_per_prompt,
        accuracy=float(np.nanmean(correct_PS)),
        accuracy_low=low,
        accuracy_high=high,
        greedy_accuracy=float(np.nanmean(greedy_P)),
        reward=float(np.mean(rewards)),
        mean_length=float(np.mean([response.num_trained_tokens for response in sampled])),
        truncated_share=float(np.mean([response.finish_reason == "length" for response in sampled])),
        reward_errors=sum(r.reward is None for r in [*responses, *corrections]),
        corrected_accuracy=_accuracy([response for response, _ in answers]),
        corrections_skipped=len(answers) - len(corrections),
        **(_of_several(correct_PS, by_prompt, answer) if samples_per_prompt > 1 else {}),
    )


def _of_several(
    correct_PS: np.ndarray, sampled: Sequence[Sequence[Sample]], answer: Answer | None
) -> dict[str, Any]:
    """pass@k, maj@n and best-of-n from the samples of each prompt."""
    n = correct_PS.shape[1]
    ks = sorted({k for k in (2**i for i in range(1, n.bit_length())) if k <= n} | {n})
    passes = {k: pass_at(correct_PS, k) for k in ks}
    likelihoods_PS = np.array([[_mean_logprob(response) for response in own] for own in sampled])
    answers = None if answer is None else [[answer(response) for response in own] for own in sampled]
    return {
        "pass_at": {k: value for k, value in passes.items() if value is not None},
        "majority_accuracy": None if answers is None else majority(correct_PS, answers),
        "best_of_accuracy": best_of(correct_PS, likelihoods_PS),
    }


def _mean_logprob(response: Sample) -> float:
    tokens = response.num_trained_tokens
    return math.fsum(response.logprobs[response.loss_mask].tolist()) / tokens if tokens else -math.inf


def _correctness(responses: Sequence[Sample]) -> np.ndarray:
    """1 correct, 0 wrong, NaN where the verifier failed."""
    return np.array(
        [np.nan if response.reward is None else float(response.correct) for response in responses]
    )


def _accuracy(responses: Sequence[Sample]) -> float | None:
    """None if nothing is known."""
    known = [response.correct for response in responses if response.reward is not None]
    return sum(known) / len(known) if known else None


def _interval(correct_PS: np.ndarray) -> tuple[float, float]:
    """95 % interval of the mean. One sample a prompt: Wilson's. More: samples of a prompt are not
    independent, so prompts are resampled (percentile bootstrap)."""
    if correct_PS.shape[1] == 1:
        known = correct_PS[~np.isnan(correct_PS)]
        return _wilson(float(known.mean()), len(known))
    hits_P = np.nansum(correct_PS, axis=1)
    known_P = (~np.isnan(correct_PS)).sum(axis=1)
    draw = np.random.default_rng(0).integers(len(hits_P), size=(_RESAMPLES, len(hits_P)))
    known = known_P[draw].sum(axis=1)
    means = hits_P[draw].sum(axis=1)[known > 0] / known[known > 0]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's score interval, 95 %, of a share of `count` independent trials."""
    z2 = 1.959964**2
    center = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * (share * (1 - share) + z2 / (4 * count)) / count) / (1 + z2 / count)
    return center - half, center + half


def _error(responses: Sequence[Sample]) -> str | None:
    return next((response.reward_error for response in responses if response.reward_error), None)
