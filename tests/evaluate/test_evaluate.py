"""Evaluation against a policy and a verifier whose answers are known, also where it is interrupted."""

import itertools
import json
import re
from collections import Counter
from math import nan

import numpy as np
import pytest

from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.config import EvalSampling
from megatron_ibpo.evaluate import Corrector, KeptError, KeptSamples, complete_samples, eval_sample, evaluate
from megatron_ibpo.evaluate import accuracy as measures
from megatron_ibpo.evaluate.stored_samples import read_results, samples_path
from support.credit_cases import plain
from support.eval_samples import read_samples
from support.samples import sample_of


def eval_sample_of(asked, tokens, logprobs, finish="stop", *, right=1, answer=None, name="t"):
    """A sample of these tokens, whose text is the first one; where that is 9, the verifier fails."""
    request = asked.request
    how = {"finish_reason": finish, "temperature": request.temperature, "versions": ((0, 1),)}
    own = sample_of(request.prompt_token_ids, tokens, logprobs, **how)
    if tokens[0] == 9:
        own.reward_error = "verifier crashed"
    else:
        own.reward, own.correct = float(tokens[0] == right), tokens[0] == right
    return eval_sample(name, asked, own, str(tokens[0]), answer, keep_tokens=True)


def prompts_of(numbers):
    return [Prompt(i, token_ids([i, 7]), 2, str(i), "t", f"question {i}") for i in numbers]


def measured(numbers, plan, *, right=1, samples=1, sampled=(1.0, 1.0, -1), answer=None, corrector=None):
    """(the evaluation of prompts of these numbers, all requests)

    Sample j of prompt i has the tokens, perhaps with a finish reason, that `plan(i, j, request)` says, at
    log-probs of -1/(j+1).
    """
    counts: Counter[int] = Counter()
    requests = []

    def ask(asked):
        made = []
        for one in asked:
            number = int(one.request.prompt_token_ids[0])
            said = plan(number, counts[number], one.request)
            tokens, finish = said if isinstance(said, tuple) else (said, "stop")
            logprobs = [-1 / (counts[number] + 1)] * len(tokens)
            made.append(eval_sample_of(one, tokens, logprobs, finish, right=right, answer=answer))
            requests.append(one.request)
            counts[number] += 1
        return made

    sampling, has_answers = EvalSampling(samples, 5, *sampled), answer is not None
    found = evaluate(prompts_of(numbers), ask, sampling, has_answers=has_answers, corrector=corrector)
    return found[0], requests


def test_verifier_failures_are_counted_apart_from_wrong_answers():
    def plan(number, j, request):
        if request.temperature == 0:
            return [1]
        return [1, 2, 3] if number < 3 else ([0], "length")

    result, _ = measured(range(4), plan)
    assert (result.accuracy, result.greedy_accuracy, result.reward) == (0.75, 1.0, 0.75)
    assert (result.mean_length, result.truncated_share, result.reward_errors) == (2.5, 0.25, 0)
    # Wilson's interval of 3 in 4
    assert (result.accuracy_low, result.accuracy_high) == pytest.approx((0.3006, 0.9544), abs=1e-4)
    assert "accuracy 0.750 [0.301, 0.954] sampled, 1.000 greedy" in str(result)
    assert (result.pass_at, result.majority_accuracy, result.best_of_accuracy) == ({}, None, None)
    result, _ = measured(range(4), lambda number, j, request: [1 if number else 9])
    assert result.reward_errors == 2, "once sampled, once greedy"
    assert result.accuracy == 1.0
    assert "2 reward errors" in str(result)
    with pytest.raises(ValueError, match="verifier crashed"):
        measured(range(2), lambda *_: [9])
    with pytest.raises(ValueError, match="at least one prompt"):
        measured([], lambda *_: [1])


def test_requests_repeat_between_evaluations_and_differ_within_one():
    first, again = (measured(range(3), lambda *_: [1], samples=4, sampled=(0.7, 0.9, 3))[1] for _ in range(2))
    assert plain(first) == plain(again)
    sampled = [request for request in first if request.temperature > 0]
    assert len({request.seed for request in sampled}) == len(sampled) == 12
    assert {(request.temperature, request.top_p, request.top_k) for request in sampled} == {(0.7, 0.9, 3)}
    assert len(first) - len(sampled) == 3, "one greedy response a prompt"
    # the seeds of a prompt do not depend on which other prompts are evaluated with it
    alone = measured([2], lambda *_: [1], samples=4, sampled=(0.7, 1.0, -1))[1]
    of_third = [request.seed for request in sampled if request.prompt_token_ids[0] == 2]
    assert [request.seed for request in alone if request.temperature > 0] == of_third


def test_pass_at_k_is_the_chance_of_any_success():
    for hits, n, k in ((0, 4, 2), (4, 4, 2), (1, 4, 1), (1, 4, 2), (2, 4, 2), (1, 4, 4)):
        outcomes = [1.0] * hits + [0.0] * (n - hits)
        drawn = [any(chosen) for chosen in itertools.combinations(outcomes, k)]
        assert measures.pass_at(np.array([outcomes]), k).tolist() == pytest.approx([np.mean(drawn)])
    by_prompt = measures.pass_at(np.array([[1, 0, nan, nan], [0, 0, 0, 0], [1, nan, nan, nan]]), 2)
    assert by_prompt.tolist() == pytest.approx([1, 0, nan], nan_ok=True)
    assert measures.known_mean(by_prompt) == pytest.approx(0.5)
    assert measures.known_mean(measures.pass_at(np.array([[1, nan]]), 2)) is None


def test_majority_takes_the_most_frequent_answer_and_best_the_likeliest():
    for outcomes, answers, expected in [
        ([0, 0, 1, 0], "aabc", 0), ([1, 0, 1, 0], "abab", 0.5), ([1, 1, 0, 0], "aabb", 0.5),
        # no answer, or an empty one, is no vote
        ([0, 1, 1, 1], [None, "a", "a", None], 1), ([0] * 4, [None] * 4, 0), ([0, 0, 1], ["", "", "a"], 1),
        # an answer that the verifier failed on is judged by its other samples
        ([nan, 1, 0], "aab", 1), ([nan, nan, 1], "aab", 0),
    ]:  # fmt: skip
        assert measures.majority(np.array([outcomes]), [list(answers)]).tolist() == [expected]
    outcomes = np.array([[1, 0], [0, 1]])
    assert measures.best_of(outcomes, np.array([[-0.1, -0.2], [-0.1, -0.2]])).tolist() == [1, 0]
    assert measures.best_of(outcomes, np.array([[-0.1, -0.2], [-0.3, -0.2]])).tolist() == [1, 1]


def accuracy_interval(correct_PS):
    return measures.interval_over_prompts(correct_PS.mean(axis=1))


def test_an_interval_covers_the_truth_nineteen_times_in_twenty():
    """Of problems of very different difficulty: chances of a U-shaped Beta."""
    for a, b, samples, measure, truth in [
        (0.25, 0.5, 1, accuracy_interval, 1 / 3), (0.25, 0.5, 8, accuracy_interval, 1 / 3),
        # the mean of pass@2 is 1 - E[(1-p)²]
        (0.4, 0.6, 6, lambda run: measures.interval_over_prompts(measures.pass_at(run, 2)), 1 - 0.96 / 2),
    ]:  # fmt: skip
        rng = np.random.default_rng(0)
        chances_RP = rng.beta(a, b, size=(200, 60))
        runs = (rng.random((200, 60, samples)) < chances_RP[..., None]).astype(float)
        covered = [low <= truth <= high for low, high in map(measure, runs)]
        assert 0.92 <= np.mean(covered) <= 0.98, (a, b, samples, measure, truth)
    few = measures.interval_over_prompts(np.ones(5))
    assert few == pytest.approx((0.5655, 1.0), abs=1e-4), "Wilson's of 5 in 5: no failure is no certainty"


def test_the_interval_of_several_samples_matches_the_normal_one():
    rng = np.random.default_rng(1)
    correct_PS = (rng.random((600, 4)) < rng.beta(2, 2, size=(600, 1))).astype(float)
    low, high = accuracy_interval(correct_PS)
    deviation = correct_PS.mean(axis=1).std() / np.sqrt(len(correct_PS))
    assert high - low == pytest.approx(2 * 1.96 * deviation, rel=0.06), "90 % would be 16 % less"


def test_several_samples_are_evaluated_in_all_ways_at_once():
    """Four samples of two prompts; token 1 is right. Prompt 0: right once, the last and likeliest; prompt 1:
    right three times, not the last. The answer is the first token."""
    plan = {0: [0, 0, 2, 1, 1], 1: [1, 1, 1, 0, 1]}
    result, _ = measured(range(2), lambda i, j, _: [plan[i][j], 7], samples=4, answer=lambda _, text: text)
    assert result.accuracy == 0.5
    assert result.pass_at == {2: pytest.approx((0.5 + 1) / 2), 4: 1.0}
    assert (result.majority_accuracy, result.best_of_accuracy) == (0.5, 0.5)
    metrics = result.metrics()
    assert metrics["pass_at_4"] == 1.0
    assert not {"pass_at", "corrected_accuracy", "by_prompt"} & metrics.keys()
    assert "pass@2 0.750, pass@4 1.000, maj@4 0.500, best-of-4 0.500" in str(result)
    assert result.by_prompt == {
        "accuracy": [0.25, 0.75], "greedy_accuracy": [1, 1], "pass_at_2": [0.5, 1], "pass_at_4": [1, 1],
        "majority_accuracy": [0, 1], "best_of_accuracy": [1, 0],
    }  # fmt: skip


def corrected(count, samples, *, right=1, shows=2, max_context=100, plan=None):
    """(the evaluation, requests for corrections): x̃ is the prompt's number, 50, and the first tokens of the
    candidates. Sample j begins with 10 + j; a correction is 1 where 13 was shown."""

    def prompt_ids(prompt, candidates):
        assert not any(c.is_scored or c.correct for c in candidates)
        return token_ids([prompt.token_ids[0], 50, *(c.token_ids[0] for c in candidates)])

    def ten_and_more(number, j, request):
        if request.prompt_token_ids[1] == 50:
            return [1 if 13 in request.prompt_token_ids[2:] else 0]
        return [10 + j]

    corrector, sampled = Corrector(prompt_ids, shows, max_context), (0.7, 1.0, -1)
    result, requests = measured(
        range(count), plan or ten_and_more, right=right, samples=samples, sampled=sampled, corrector=corrector
    )
    return result, [request for request in requests if request.prompt_token_ids[1] == 50]


def test_every_sample_is_corrected_without_a_look_at_rewards():
    result, asked = corrected(200, 4)
    assert result.accuracy == 0
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


def test_correction_candidates_ignore_scores_and_overlong_prompts_are_skipped():
    def shown(*counts, **how):
        return [request.prompt_token_ids.tolist() for request in corrected(*counts, **how)[1]]

    assert shown(20, 4, right=10, shows=3) == shown(20, 4, right=12, shows=3)
    # K = 1: what is shown is the sample and nothing else
    assert [ids[2:] for ids in shown(3, 2, shows=1)] == [[10], [11]] * 3
    right = {(0, 0), (0, 1), (1, 0)}
    result, _ = corrected(2, 2, max_context=8, plan=lambda number, j, _: [int((number, j) in right)])
    assert (result.corrections_skipped, result.corrected_accuracy) == (4, 0.75)


def test_truncated_and_answerless_responses_are_counted_apart():
    """Token 3 has no answer, 4 an empty one; prompts 0 and 1 are cut off, one of them without an answer."""

    def plan(number, j, request):
        return [{0: 3, 1: 0, 2: 3, 3: 4}.get(number, 1)], "length" if number < 2 else "stop"

    found = {"3": None, "4": ""}
    result, _ = measured(range(8), plan, answer=lambda prompt, text: found.get(text, text))
    assert (result.truncated_share, result.no_answer_share) == (2 / 8, 2 / 8)
    assert "25.0% truncated, 25.0% without an answer" in str(result)
    unknown, _ = measured(range(2), lambda *_: [1], samples=2)
    assert (unknown.no_answer_share, unknown.majority_accuracy) == (None, None)
    assert "no_answer_share" not in unknown.metrics()


SETTINGS = {"policy": "aaaa", "--eval-temperature": 0.6, "--seed": 0}


class SimulatedEngine:
    """Writes what a request's seed says, in an order of its own, and may be killed on the way."""

    def __init__(self, dies_after=None, failing=()):
        self.asked, self.dies_after, self.failing = [], dies_after, set(failing)

    def __call__(self, asked, each):
        for index in np.random.default_rng(0).permutation(len(asked)).tolist():
            if len(self.asked) == self.dies_after:
                raise KeyboardInterrupt
            one = asked[index]
            self.asked.append(one.key)
            first = 9 if one.key in self.failing else 1 + one.request.seed % 3
            tokens, logprobs = [first, int(one.request.prompt_token_ids[-1])], [-0.25, -one.request.seed % 7]
            each(index, eval_sample_of(one, tokens, logprobs, answer=lambda _, text: text, name="sums"))


def evaluated(directory, engine=None, settings=SETTINGS, *, corrects=True):
    """A whole evaluation in one process: (summary, samples)."""

    def prompt_ids(prompt, shown):
        return token_ids([prompt.index, *(s.token_ids[0] for s in shown), 9])

    def ask(asked):
        return complete_samples(asked, kept.stored("sums"), engine or SimulatedEngine(), kept.add)

    corrector, sampling = Corrector(prompt_ids, 2, 64) if corrects else None, EvalSampling(4, 8, 0.6, 1.0, -1)
    with KeptSamples(directory, "/models/a", {"sums": settings}) as kept:
        return evaluate(prompts_of(range(5)), ask, sampling, has_answers=True, corrector=corrector)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return evaluated(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(("dies_after", "cut"), [(0, 0), (10, 5), (24, 0), (25, 0), (44, 0)])
def test_an_evaluation_that_is_killed_goes_on_where_it_stopped(dies_after, cut, tmp_path, undisturbed):
    """20 samples and 5 greedy ones, then 20 corrections: killed anywhere, nothing is asked twice but what
    a line was not finished for, and what comes out is what would have come out."""
    first, second, third = SimulatedEngine(dies_after), SimulatedEngine(), SimulatedEngine()
    with pytest.raises(KeyboardInterrupt):
        evaluated(tmp_path, first)
    assert read_results(tmp_path)["status"] == "unfinished"
    if cut:
        path = samples_path(tmp_path, "sums")
        path.write_bytes(path.read_bytes()[:-cut])
    assert evaluated(tmp_path, second) == undisturbed
    assert set(first.asked) & set(second.asked) == ({first.asked[-1]} if cut else set())
    assert len({*first.asked, *second.asked}) == 45
    assert {sample.key for sample in read_samples(tmp_path, "sums")} == {s.key for s in undisturbed[1]}
    assert evaluated(tmp_path, third) == undisturbed
    assert third.asked == []


def test_samples_that_the_verifier_failed_on_are_asked_again(tmp_path, undisturbed):
    failing = [("sampled", 2, 1), ("greedy", 4, 0)]
    broken, _ = evaluated(tmp_path, SimulatedEngine(failing=failing), corrects=False)
    assert broken.reward_errors == 2
    second = SimulatedEngine()
    mended, samples = evaluated(tmp_path, second, corrects=False)
    assert sorted(second.asked) == sorted(failing)
    assert mended.reward_errors == 0
    assert samples == undisturbed[1][:25]
    with KeptSamples(tmp_path, "/models/a", {"more": {"--seed": 1}}) as kept:
        assert kept.num_found == 0
    assert list(read_results(tmp_path)["sets"]) == ["sums", "more"], "a set is added beside what is there"
    assert len(read_samples(tmp_path, "sums")) == 25, "one line a sample"


def test_stored_samples_of_other_settings_and_malformed_lines_are_refused(tmp_path):
    evaluated(tmp_path)
    path, results = samples_path(tmp_path, "sums"), tmp_path / "results.json"
    before = path.read_text()
    other = SETTINGS | {"--eval-temperature": 0.7, "policy": "bbbb"}
    differs = "policy was 'aaaa', is 'bbbb'; --eval-temperature was 0.6, is 0.7"
    with pytest.raises(KeptError, match=differs):
        evaluated(tmp_path, settings=other)
    assert path.read_text() == before
    first = json.loads(before.splitlines()[0])
    assert (first["set"], first["prompt"]) == ("sums", f"question {first['prompt_index']}")
    unsettled = json.dumps(first | {"settings": "0" * 16})
    none = "no sample of an evaluation"
    for line, says in [(unsettled, "made by other settings"), *((x, none) for x in ("{}", "[1]", "no JSON"))]:
        path.write_text(f"{before}{line}\n")
        with pytest.raises(KeptError, match=rf"sums\.samples\.jsonl, line 46: {says}"):
            evaluated(tmp_path)
    results.unlink()
    with pytest.raises(KeptError, match="the settings it was made with are not recorded"):
        evaluated(tmp_path)
    for content in ("[]", '{"sets": {"a": {}}}', "x"):
        results.write_text(content)
        with pytest.raises(KeptError, match=re.escape("results.json: ")):
            evaluated(tmp_path)
