"""Measurement of a policy's skill at correcting: IBPO's premise, before any training relies on it.

IBPO pays for corrections, so a correction must succeed more often than another try at the same problem. The
policy answers prompts as in training; its wrong responses are corrected in several ways, and answered anew,
and the same verifier scores all samples. Success is compared in groups with and without a correct sibling,
since only the former have a correct reference to show.
"""

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from megatron_ibpo.basics.records import Group, Prompt, Sample, SampleRequest, TokenIds
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.config import RolloutConfig
from megatron_ibpo.credit import Operator, Vocabulary, part_in_prompt
from megatron_ibpo.credit.corrections import CompareAndCorrect
from megatron_ibpo.credit.pairing import draw, is_wrong
from megatron_ibpo.evaluate.accuracy import wilson
from megatron_ibpo.report import jsonable
from megatron_ibpo.sampling import Sampler
from megatron_ibpo.sampling.requests import group_requests

Way = Literal["correct reference", "wrong reference", "no reference", "resample"]
"""Replacement of a wrong response: a correction that is shown correct responses of its group, other wrong
ones, or no other response; or another response to the plain prompt."""
RESAMPLE: Way = "resample"
COMPOSITIONS: dict[str, Callable[["Trial"], bool]] = {
    "all groups": lambda trial: True,
    "groups with a correct response": lambda trial: trial.has_correct_sibling,
    "groups without one": lambda trial: not trial.has_correct_sibling,
}
Z = 1.96
"""Quantile of 95 % intervals."""

Interval = dict[str, float]
"""estimate, low, high"""
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Asking:
    """Settings for asking the policy, as in the training that it is measured for."""

    ibpo_k: int
    """Solutions that a correction is shown."""
    rollout: RolloutConfig
    vocabulary: Vocabulary
    max_context: int
    """Limit of tokens in prompt and response together."""
    seed: int
    """Seed of the run. Seeds derived from it here differ from all others of a run."""
    targets: int
    """Most wrong responses of a group to replace."""
    as_in_training: bool = False
    """Correct only in the way that training does (a correct reference if there is one, otherwise a wrong
    one), instead of in every way that the group allows."""
    prompt_ids: Callable[[Prompt, int], TokenIds] | None = None
    """Prompt of each response, in the form that `group_requests` takes."""


@dataclass(frozen=True)
class Trial:
    """One wrong response, replaced in one way."""

    prompt: int
    """Index of the prompt. Trials of one prompt are not independent."""
    target: int
    way: Way
    has_correct_sibling: bool
    success: bool
    copies_reference: bool
    """True if the replacement equals a reference, token for token."""
    unchanged: bool
    """True if the replacement equals the wrong response, token for token."""
    tokens_read: int
    tokens_written: int


@dataclass(frozen=True)
class Trials:
    """All samples with their scores."""

    groups: list[Group]
    trials: list[Trial]
    too_long: int
    """Corrections not requested, because their prompt leaves no room for a response."""
    reward_errors: int
    """Replacements whose verifier failed. They are not trials."""


def corrects(operator: Operator) -> bool:
    """Return whether the operator corrects wrong responses by compare-and-correct, or is built on it."""
    return isinstance(operator, CompareAndCorrect)


async def try_corrections(sampler: Sampler, prompts: Sequence[Prompt], asking: Asking) -> Trials:
    """Answer the prompts as in training, and replace wrong responses. Raises ValueError if a prompt leaves no
    room for a response, and EngineError if an engine died and cannot be replaced."""
    seed, size = derive_seed("operator skill", asking.seed), asking.rollout.n_samples_per_prompt
    requests = group_requests(prompts, asking.rollout, seed=seed, step=0, prompt_ids=asking.prompt_ids)
    prompt_requests = [(prompts[number // size], request) for number, request in enumerate(requests)]
    responses = await sampler.answer_all(prompt_requests)
    groups = [
        Group(prompt, responses[number * size : (number + 1) * size]) for number, prompt in enumerate(prompts)
    ]
    replacements = [
        replacement
        for number, group in enumerate(groups)
        for replacement in _replacements(number, group, requests[number * size : (number + 1) * size], asking)
    ]
    fitting = [replacement for replacement in replacements if replacement.fits(asking)]
    samples = await sampler.answer_all([(groups[r.prompt].prompt, r.request) for r in fitting])
    tried = [(r, sample) for r, sample in zip(fitting, samples, strict=True) if sample.reward is not None]
    return Trials(
        groups,
        [_trial(groups[replacement.prompt], replacement, sample) for replacement, sample in tried],
        too_long=len(replacements) - len(fitting),
        reward_errors=len(fitting) - len(tried),
    )


@dataclass(frozen=True)
class _Replacement:
    prompt: int
    target: int
    way: Way
    references: tuple[int, ...]
    request: SampleRequest

    def fits(self, asking: Asking) -> bool:
        return len(self.request.prompt_token_ids) + self.request.max_tokens <= asking.max_context


def _replacements(
    number: int, group: Group, requests: Sequence[SampleRequest], asking: Asking
) -> Iterable[_Replacement]:
    wrong = [index for index, response in enumerate(group.responses) if is_wrong(response)]
    rng = random.Random(derive_seed("operator skill", asking.seed, "targets", group.prompt.index))
    for target in sorted(rng.sample(wrong, min(asking.targets, len(wrong)))):
        for way, pool in _ways(group, target, asking).items():
            keys = ("operator skill", asking.seed, way, group.prompt.index, target)
            references = draw(pool, asking.ibpo_k - 1, random.Random(derive_seed(*keys, "draw")))
            request = replace(requests[target], seed=derive_seed(*keys))
            if way != RESAMPLE:
                request = _correction(group, (target, *references), request, asking)
            yield _Replacement(number, target, way, references, request)


def _ways(group: Group, target: int, asking: Asking) -> dict[Way, list[int]]:
    """Return every way to replace the response, with the responses that its references are drawn from."""
    compares, as_in_training = asking.ibpo_k > 1, asking.as_in_training
    correct = [i for i, response in enumerate(group.responses) if response.correct]
    wrong = [i for i, response in enumerate(group.responses) if is_wrong(response) and i != target]
    ways: dict[Way, list[int]] = {}
    if compares and correct:
        ways["correct reference"] = correct
    if compares and wrong and not (as_in_training and correct):
        ways["wrong reference"] = wrong
    if not (as_in_training and ways):
        ways["no reference"] = []
    return ways | {RESAMPLE: []}


def _correction(
    group: Group, candidates: Sequence[int], request: SampleRequest, asking: Asking
) -> SampleRequest:
    """Return a correction request for the first candidate, sampled as in training."""
    rollout, vocabulary = asking.rollout, asking.vocabulary
    target, *references = [part_in_prompt(group.responses[i], vocabulary.thinking).ids for i in candidates]
    return replace(
        request,
        prompt_token_ids=vocabulary.correction_prompt(group.prompt, target, references),
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
    )


def _trial(group: Group, replacement: _Replacement, sample: Sample) -> Trial:
    def is_response(index: int) -> bool:
        return np.array_equal(sample.content_ids, group.responses[index].content_ids)

    return Trial(
        replacement.prompt,
        replacement.target,
        replacement.way,
        has_correct_sibling=any(response.correct for response in group.responses),
        success=sample.correct,
        copies_reference=any(is_response(index) for index in replacement.references),
        unchanged=is_response(replacement.target),
        tokens_read=len(sample.prompt_token_ids),
        tokens_written=len(sample.token_ids),
    )


# ------------------------------------------------------------------------------------- results of the trials


def operator_skill(tried: Trials) -> dict[str, Any]:
    """Return the success of each way, by composition of the group, as plain data, with 95 % intervals over
    prompts.

    `above_resample` compares with a resample of the same wrong responses. `copies_reference` is a share of
    the successes, `unchanged` a share of all trials; None if there are none.
    """
    responses = [response for group in tried.groups for response in group.responses]
    correct = [sum(response.correct for response in group.responses) for group in tried.groups]
    wrong = [any(map(is_wrong, group.responses)) for group in tried.groups]
    return {
        "prompts": len(tried.groups),
        "responses": len(responses),
        "accuracy": sum(correct) / len(responses),
        "groups_with_both": sum(n > 0 and has_wrong for n, has_wrong in zip(correct, wrong, strict=True)),
        "groups_all_wrong": sum(n == 0 and has_wrong for n, has_wrong in zip(correct, wrong, strict=True)),
        "corrections_too_long": tried.too_long,
        "reward_errors": tried.reward_errors,
        "ways": {
            name: _by_way([trial for trial in tried.trials if belongs(trial)])
            for name, belongs in COMPOSITIONS.items()
        },
    }


def _by_way(trials: Sequence[Trial]) -> dict[str, Any]:
    resampled = {(t.prompt, t.target): t for t in trials if t.way == RESAMPLE}
    ways = {way: [trial for trial in trials if trial.way == way] for way in get_args(Way)}
    return {way: _of_way(way_trials, resampled) for way, way_trials in ways.items() if way_trials}


def _of_way(trials: Sequence[Trial], resampled: Mapping[tuple[int, int], Trial]) -> dict[str, Any]:
    successes = [trial for trial in trials if trial.success]
    pairs = [(t, resample) for t in trials if (resample := resampled.get((t.prompt, t.target))) is not None]
    above = _mean_of_prompts(
        [a.prompt for a, _ in pairs], [float(a.success) - float(b.success) for a, b in pairs]
    )
    return {
        "trials": len(trials),
        "prompts": len({trial.prompt for trial in trials}),
        "success": success_rate([t.prompt for t in trials], [t.success for t in trials]),
        "above_resample": None if trials[0].way == RESAMPLE else above,
        "copies_reference": float(np.mean([t.copies_reference for t in successes])) if successes else None,
        "unchanged": float(np.mean([t.unchanged for t in trials])),
        "tokens_read": float(np.mean([t.tokens_read for t in trials])),
        "tokens_written": float(np.mean([t.tokens_written for t in trials])),
    }


def success_rate(prompts: Sequence[int], successes: Sequence[bool]) -> Interval:
    """Return the share of successes with Wilson's interval at the effective number of independent trials.

    Trials of a prompt are correlated. The variance between prompts gives the number of independent trials
    with the same variance of the mean, at most the actual number (Kish's effective sample size).
    """
    values = np.asarray(successes, dtype=np.float64)
    rate, number = float(values.mean()), float(len(values))
    clustered, plain = _variance(prompts, values), rate * (1 - rate) / number
    if clustered > plain > 0:
        number *= plain / clustered
    low, high = wilson(rate, number)
    return {"estimate": rate, "low": low, "high": high}


def _mean_of_prompts(prompts: Sequence[int], values: Sequence[float]) -> Interval | None:
    """Return the mean of values with its normal interval over prompts; None for fewer than two prompts."""
    if len(set(prompts)) < 2:
        return None
    array = np.asarray(values, dtype=np.float64)
    mean, half = float(array.mean()), Z * math.sqrt(_variance(prompts, array))
    return {"estimate": mean, "low": mean - half, "high": mean + half}


def _variance(prompts: Sequence[int], values: Array) -> float:
    """Return the variance of the mean of values that are correlated within a prompt (the ratio estimator's,
    linearised); 0 for one prompt, which gives no estimate."""
    _, cluster = np.unique(np.asarray(prompts), return_inverse=True)
    sums = np.bincount(cluster, weights=values - values.mean())
    if len(sums) < 2:
        return 0.0
    return float(len(sums) / (len(sums) - 1) * (sums**2).sum() / len(values) ** 2)


def skill_json(skill: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> str:
    """Return the figures as JSON for a file, with the verdict on IBPO's premise and the settings of the
    measurement."""
    content = {"premise": premise(skill)} | ({"settings": dict(settings)} if settings else {}) | dict(skill)
    plain = jsonable(content, shorten=lambda value: round(value, 5))
    return json.dumps(plain, indent=1, allow_nan=False) + "\n"


def premise(skill: Mapping[str, Any]) -> str:
    """Return the verdict on IBPO's premise in a sentence, for the user at the start of a run."""
    mixed = skill["ways"]["groups with a correct response"]
    way = next((way for way in ("correct reference", "no reference") if way in mixed), None)
    if way is None or mixed[way]["above_resample"] is None:
        return (
            f"too few of {skill['prompts']} prompts have both a correct and a wrong response to say whether "
            "corrections succeed more often than another try"
        )
    of_way, above = mixed[way], mixed[way]["above_resample"]
    comparison = (
        f"corrections succeed {_short(of_way['success']['estimate'])} with "
        f"{'a correct reference' if way == 'correct reference' else way}, a resample succeeds "
        f"{_short(mixed[RESAMPLE]['success']['estimate'])}"
    )
    size = (
        f"difference {above['estimate']:+.2f} [{above['low']:+.2f}, {above['high']:+.2f}], "
        f"{of_way['trials']} wrong responses to {of_way['prompts']} prompts"
    )
    if above["low"] > 0:
        verdict = "IBPO's premise holds for this policy"
    elif above["high"] < CLOSE:
        verdict = "IBPO's premise does not hold for this policy"
    else:
        verdict = "too few responses to say whether IBPO's premise holds for this policy"
    return f"{comparison}: {verdict} ({size})"


CLOSE = 0.1
"""A gain over a resample that is surely below this cannot pay for a correction, which costs as much as two or
three resamples."""


def _short(share: float) -> str:
    return f"{share:.2f}".removeprefix("0")


def skill_table(skill: Mapping[str, Any]) -> str:
    """Return the figures as a table in Markdown."""
    lines = [
        "| groups | way | trials | success [95 %] | above a resample [95 %] "
        "| successes that are the reference | unchanged | tokens read, written |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, ways in skill["ways"].items():
        for way, of_way in ways.items():
            copies = of_way["copies_reference"] if way in ("correct reference", "wrong reference") else None
            cells = (
                name,
                way,
                str(of_way["trials"]),
                _interval(of_way["success"]),
                _interval(of_way["above_resample"], sign="+"),
                _plain(copies),
                _plain(of_way["unchanged"]),
                f"{of_way['tokens_read']:.0f}, {of_way['tokens_written']:.0f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _interval(interval: Mapping[str, float] | None, sign: str = "") -> str:
    if interval is None:
        return "–"
    return "{estimate:{s}.3f} [{low:{s}.3f}, {high:{s}.3f}]".format(s=sign, **interval)


def _plain(share: float | None) -> str:
    return "–" if share is None else f"{share:.3f}"
