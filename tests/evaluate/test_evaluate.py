"""Evaluation against a policy and a verifier whose answers are known."""

import itertools
from collections import Counter

import numpy as np
import pytest

from megatron_ibpo.basics.records import Prompt, Sample, SampleRequest, token_ids
from megatron_ibpo.config import EvalSampling
from megatron_ibpo.evaluate import Corrector, eval_sample, evaluate
from megatron_ibpo.evaluate.pass_at_k import (
    best_of,
    interval,
    interval_over_prompts,
    majority,
    mean_over_prompts,
    pass_at,
)
from megatron_ibpo.rewards import answer_extractor
from support.credit_cases import plain


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(i, token_ids([i, 7]), head_length=2, label=str(i), task="t", text=f"question {i}")
        for i in range(count)
    ]


def made(request, tokens, finish="stop", logprob=0.0, written=None):
    """Return the sample of a policy that says `tokens`; `written` are the flags of those that are its own."""
    mask = np.ones(len(tokens), bool) if written is None else np.array(written)
    return Sample(
        prompt_token_ids=request.prompt_token_ids,
        token_ids=token_ids(tokens),
        logprobs=np.where(mask, np.float32(logprob), np.float32(0)),
        finish_reason=finish,
        temperature=request.temperature,
        versions=((0, 1),),
        loss_mask=mask,
    )


def measured(
    prompts,
    ask,
    *,
    max_tokens=5,
    samples=1,
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    answer=None,
    corrector=None,
):
    """The evaluation of a policy that gives samples for (prompt, request) pairs. A response's text is its
    first token."""

    def kept(asked):
        made = ask([(one.prompt, one.request) for one in asked])
        return [
            eval_sample("t", one, sample, str(sample.token_ids[0]), answer, keep_tokens=True)
            for one, sample in zip(asked, made, strict=True)
        ]

    sampling = EvalSampling(samples, max_tokens, temperature, top_p, top_k)
    evaluation, _ = evaluate(prompts, kept, sampling, has_answers=answer is not None, corrector=corrector)
    return evaluation


def answers(plan):
    """A policy that answers as `plan(prompt number, greedy)` says: tokens, finish reason."""

    def ask(asked: list[tuple[Prompt, SampleRequest]]) -> list[Sample]:
        return [
            one_is_right(made(request, *plan(request.prompt_token_ids[0], request.temperature == 0)))
            for _, request in asked
        ]

    return ask


def one_is_right(response: Sample) -> Sample:
    """Token 1 is a correct answer, token 9 makes the verifier fail."""
    if response.token_ids[0] == 9:
        response.reward_error = "verifier crashed"
    else:
        response.reward = float(response.token_ids[0] == 1)
        response.correct = response.reward == 1.0
    return response


def test_accuracies_lengths_and_truncation_are_counted():
    def plan(number, greedy):
        if greedy:
            return [1], "stop"
        return ([1, 2, 3], "stop") if number < 3 else ([0], "length")

    result = measured(prompts(4), answers(plan))

    assert result.accuracy == 0.75
    assert result.greedy_accuracy == 1.0
    assert result.reward == 0.75
    assert result.mean_length == 2.5
    assert result.truncated_share == 0.25
    assert result.reward_errors == 0
    # Wilson's interval of 3 in 4
    assert (result.accuracy_low, result.accuracy_high) == pytest.approx((0.3006, 0.9544), abs=1e-4)
    assert result.metrics()["accuracy"] == 0.75
    assert "accuracy 0.750 [0.301, 0.954] sampled, 1.000 greedy" in str(result)


def test_a_failed_verifier_is_counted_and_is_no_wrong_answer():
    def plan(number, greedy):
        return ([9], "stop") if number == 0 else ([1], "stop")

    result = measured(prompts(4), answers(plan))
    assert result.reward_errors == 2, "once sampled, once greedy"
    assert result.accuracy == 1.0
    assert "2 reward errors" in str(result)


def test_nothing_scored_is_an_error_with_the_first_cause():
    with pytest.raises(ValueError, match="verifier crashed"):
        measured(prompts(2), answers(lambda number, greedy: ([9], "stop")))


def test_no_prompts_is_an_error():
    with pytest.raises(ValueError, match="at least one prompt"):
        measured([], answers(lambda number, greedy: ([1], "stop")))


def test_several_samples_a_prompt_widen_the_interval_by_prompts_not_samples():
    # every prompt is always right or always wrong: 16 samples of it tell no more than one
    def plan(number, greedy):
        return [number % 2], "stop"

    once = measured(prompts(64), answers(plan))
    often = measured(prompts(64), answers(plan), samples=16)
    assert often.accuracy == once.accuracy == 0.5
    assert often.samples_per_prompt == 16
    width = often.accuracy_high - often.accuracy_low
    assert width == pytest.approx(once.accuracy_high - once.accuracy_low, rel=0.15)


def test_requests_are_the_same_at_every_evaluation_and_differ_within_one():
    seen: list[list[SampleRequest]] = []

    def ask(asked):
        seen.append([request for _, request in asked])
        assert all(prompt.token_ids is request.prompt_token_ids for prompt, request in asked)
        return answers(lambda number, greedy: ([1], "stop"))(asked)

    for _ in range(2):
        measured(prompts(3), ask, samples=4, temperature=0.7, top_p=0.9, top_k=3)
    assert plain(seen[0]) == plain(seen[1])
    sampled = [request for request in seen[0] if request.temperature > 0]
    assert len(sampled) == 12
    assert len({request.seed for request in sampled}) == 12
    assert all((request.temperature, request.top_p, request.top_k) == (0.7, 0.9, 3) for request in sampled)
    assert len(seen[0]) - len(sampled) == 3, "one greedy response a prompt"
    # the seeds of a prompt do not depend on which other prompts are evaluated with it
    measured(prompts(3)[2:], ask, samples=4, temperature=0.7)
    assert [r.seed for r in seen[2] if r.temperature > 0] == [
        r.seed for r in sampled if r.prompt_token_ids[0] == 2
    ]


# ------------------------------------------------------------------------------ several samples, correction


@pytest.mark.parametrize(
    ("hits", "n", "k", "expected"),
    [(0, 4, 2, 0.0), (4, 4, 2, 1.0), (1, 4, 1, 0.25), (1, 4, 2, 0.5), (2, 4, 2, 1 - 1 / 6), (1, 4, 4, 1.0)],
)
def test_pass_at_k_is_the_chance_that_one_of_k_drawn_samples_is_right(hits, n, k, expected):
    outcomes = [1.0] * hits + [0.0] * (n - hits)
    assert pass_at(np.array([outcomes]), k).tolist() == pytest.approx([expected])
    drawn = [any(chosen) for chosen in itertools.combinations(outcomes, k)]
    assert expected == pytest.approx(np.mean(drawn))


def test_pass_at_k_counts_scored_samples_only():
    nan = float("nan")
    by_prompt = pass_at(np.array([[1, 0, nan, nan], [0, 0, 0, 0], [1, nan, nan, nan]]), 2)
    assert by_prompt.tolist()[:2] == [1, 0]
    assert np.isnan(by_prompt[2])
    assert mean_over_prompts(by_prompt) == pytest.approx(0.5)
    assert mean_over_prompts(pass_at(np.array([[1, nan]]), 2)) is None


def test_the_most_frequent_answer_counts():
    outcomes = np.array([[0, 0, 1, 0], [1, 0, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1], [1, 1, 0, 0]])
    answers = [
        ["a", "a", "b", "c"],  # wrong twice, right once
        ["a", "b", "a", "b"],  # undecided: half
        [None, "a", "a", None],  # no answer is no vote
        [None] * 4,  # no votes
        ["", "", "", "a"],  # an empty answer is none
        ["a", "a", "b", "b"],  # both twice, one of them right
    ]
    assert majority(outcomes, answers).tolist() == [0, 0.5, 1, 0, 1, 0.5]


def test_an_answer_that_the_verifier_failed_on_is_judged_by_its_other_samples():
    nan = float("nan")
    outcomes = np.array([[nan, 1, 0], [nan, nan, 1]])
    assert majority(outcomes, [["a", "a", "b"], ["a", "a", "b"]]).tolist() == [1, 0]


def test_the_best_of_n_is_chosen_without_the_verifier():
    outcomes = np.array([[1, 0], [0, 1]])
    assert best_of(outcomes, np.array([[-0.1, -0.2], [-0.1, -0.2]])).tolist() == [1, 0]
    assert best_of(outcomes, np.array([[-0.1, -0.2], [-0.3, -0.2]])).tolist() == [1, 1]


def share_covered(intervals, truth):
    return np.mean([low <= truth <= high for low, high in intervals])


@pytest.mark.parametrize("samples", [1, 8])
def test_the_interval_of_accuracy_covers_the_truth_nineteen_times_in_twenty(samples):
    """Problems of very different difficulty: chances of a U-shaped Beta, whose mean is 1/3."""
    rng = np.random.default_rng(0)
    chances_RP = rng.beta(0.25, 0.5, size=(200, 60))
    runs = (rng.random((200, 60, samples)) < chances_RP[..., None]).astype(float)
    assert 0.92 <= share_covered([interval(run) for run in runs], 1 / 3) <= 0.98


def test_the_interval_of_a_measure_covers_the_truth_nineteen_times_in_twenty():
    """pass@2 of 6 samples: its mean is 1 - E[(1-p)²] = 1 - .6·1.6/(1·2) for p of Beta(.4, .6)."""
    rng = np.random.default_rng(1)
    chances_RP = rng.beta(0.4, 0.6, size=(200, 60))
    runs = (rng.random((200, 60, 6)) < chances_RP[..., None]).astype(float)
    intervals = [interval_over_prompts(pass_at(run, 2)) for run in runs]
    assert 0.92 <= share_covered(intervals, 1 - 0.6 * 1.6 / 2) <= 0.98


def test_few_problems_without_a_failure_do_not_look_certain():
    low, high = interval_over_prompts(np.ones(5))
    assert (low, high) == pytest.approx((0.5655, 1.0), abs=1e-4), "Wilson's of 5 in 5"


def sampler(plan, score=one_is_right):
    """A policy whose sample number j of prompt i has the tokens plan(i, j), at log-probs of -1/(j+1)."""
    counts: Counter[int] = Counter()
    requests: list[SampleRequest] = []

    def sample(asked):
        requests.extend(request for _, request in asked)
        responses = []
        for _, request in asked:
            number = int(request.prompt_token_ids[0])
            tokens = plan(number, counts[number], request)
            responses.append(score(made(request, tokens, logprob=-1 / (counts[number] + 1))))
            counts[number] += 1
        return responses

    return sample, requests


def test_several_samples_are_evaluated_in_all_ways_at_once():
    """Four samples of two prompts; token 1 is right. Prompt 0: right once, the last and likeliest; prompt 1:
    right three times, not the last. The answer is the first token."""
    plan = {0: [0, 0, 2, 1], 1: [1, 1, 1, 0]}
    sample, _ = sampler(lambda i, j, request: [plan[i][j] if j < 4 else 1, 7])
    result = measured(prompts(2), sample, samples=4, answer=lambda prompt, text: text)
    assert result.accuracy == 0.5
    assert result.pass_at == {2: pytest.approx((0.5 + 1) / 2), 4: 1.0}
    assert result.majority_accuracy == 0.5
    assert result.best_of_accuracy == 0.5
    metrics = result.metrics()
    assert metrics["pass_at_4"] == 1.0
    assert "pass_at" not in metrics
    assert "corrected_accuracy" not in metrics
    assert "by_prompt" not in metrics
    assert "pass@2 0.750, pass@4 1.000, maj@4 0.500, best-of-4 0.500" in str(result)
    assert result.by_prompt == {
        "accuracy": [0.25, 0.75], "greedy_accuracy": [1, 1], "pass_at_2": [0.5, 1], "pass_at_4": [1, 1],
        "majority_accuracy": [0, 1], "best_of_accuracy": [1, 0],
    }  # fmt: skip


def test_one_sample_is_not_voted_on():
    result = measured(prompts(2), answers(lambda number, greedy: ([1], "stop")))
    assert (result.pass_at, result.majority_accuracy, result.best_of_accuracy) == ({}, None, None)


def corrector(num_candidates=2, max_context=100):
    """x̃ is the prompt's number, 50, and the first tokens of the candidates."""

    def prompt_ids(prompt, candidates):
        assert not any(c.is_scored or c.correct for c in candidates)
        return token_ids([prompt.token_ids[0], 50, *(c.token_ids[0] for c in candidates)])

    return Corrector(prompt_ids, num_candidates, max_context)


def test_every_sample_is_corrected_without_a_look_at_rewards():
    """Sample j of every prompt begins with 10 + j, all wrong; corrections are right where 13 was shown."""

    def plan(number, j, request):
        if request.prompt_token_ids[1] == 50:
            return [1 if 13 in request.prompt_token_ids[2:] else 0]
        return [10 + j]

    sample, requests = sampler(plan)
    result = measured(prompts(200), sample, samples=4, temperature=0.7, corrector=corrector())
    assert result.accuracy == 0
    asked = [r for r in requests if r.prompt_token_ids[1] == 50]
    assert len(asked) == 4 * 200, "one of every sample"
    shown = Counter(tuple(r.prompt_token_ids[2:].tolist()) for r in asked)
    assert Counter(target for target, _ in shown.elements()) == dict.fromkeys(range(10, 14), 200)
    assert len(shown) == 12, "all ordered pairs of different samples"
    assert all(45 < count < 90 for count in shown.values()), "uniformly"
    right = sum(count for pair, count in shown.items() if 13 in pair)
    assert result.corrected_accuracy == right / 800
    assert (asked[0].temperature, asked[0].max_tokens) == (0.7, 5)
    assert len({r.seed for r in asked}) == 800
    assert result.corrections_skipped == 0


def test_what_is_shown_does_not_depend_on_what_is_right():
    def shown(right):
        def score(response):
            response.reward = float(response.token_ids[0] == right)
            response.correct = response.reward == 1
            return response

        sample, requests = sampler(lambda number, j, request: [10 + j], score)
        measured(prompts(20), sample, samples=4, corrector=corrector(num_candidates=3))
        return [r.prompt_token_ids.tolist() for r in requests if r.prompt_token_ids[1] == 50]

    assert shown(10) == shown(12)


def test_a_sample_alone_is_corrected_by_itself():
    """K = 1: what is shown is the sample and nothing else."""
    sample, requests = sampler(lambda number, j, request: [10 + j])
    measured(prompts(3), sample, samples=2, corrector=corrector(num_candidates=1))
    asked = [r.prompt_token_ids[2:].tolist() for r in requests if r.prompt_token_ids[1] == 50]
    assert asked == [[10], [11]] * 3


def test_a_sample_whose_correction_prompt_does_not_fit_stands_for_it():
    sample, _ = sampler(lambda number, j, request: [1] if (number, j) in {(0, 0), (0, 1), (1, 0)} else [0])
    result = measured(prompts(2), sample, samples=2, corrector=corrector(max_context=8))
    assert result.corrections_skipped == 4
    assert result.corrected_accuracy == 0.75


def test_what_was_cut_off_and_what_has_no_answer_are_counted_apart():
    """Token 3 has no answer, 4 an empty one; prompts 0 and 1 are cut off, one of them without an answer."""
    said = {0: [3], 1: [0], 2: [3], 3: [4]}

    def plan(number, greedy):
        return said.get(number, [1]), "length" if number < 2 else "stop"

    found = {"3": None, "4": ""}
    result = measured(prompts(8), answers(plan), answer=lambda prompt, text: found.get(text, text))
    assert result.truncated_share == 2 / 8
    assert result.no_answer_share == 2 / 8
    assert "25.0% truncated, 25.0% without an answer" in str(result)


def test_without_an_extractor_nothing_is_said_of_answers():
    result = measured(prompts(2), answers(lambda number, greedy: ([1], "stop")), samples=2)
    assert (result.no_answer_share, result.majority_accuracy) == (None, None)
    assert "no_answer_share" not in result.metrics()


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"first \boxed{1}, no: \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
        (r"so \boxed{1} or \boxed{ \frac{1}{2} }.", r"1,\frac{1}{2}"),
        (r"<think>\boxed{1}</think> It is 2.", "2"),
        (r"<think>\boxed{1}", None),
        ("The answer is 42.", "42"),
        ("The answer is $x+1$", "x+1"),
        ("3 + 4 = 7", "7"),
        ("no idea", None),
    ],
)
def test_the_answer_of_a_mathematical_response(response, expected):
    extract = answer_extractor("math")
    assert extract is not None
    assert extract(response) == expected


def test_answers_are_extracted_where_the_verifier_says_how():
    extract = answer_extractor("reasoning_gym")
    assert extract is not None
    assert extract("1+1=2#2") == "2"
    assert answer_extractor("json:loads") is None
