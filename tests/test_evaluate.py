"""Evaluation against a policy and a verifier whose answers are known."""

from __future__ import annotations

import pytest

from megatron_ibpo.evaluate import evaluate
from megatron_ibpo.records import Prompt, Response, SampleRequest


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(index=i, token_ids=(i, 7), head_length=2, label=str(i), task="t", text=f"question {i}")
        for i in range(count)
    ]


def answers(plan):
    """A policy that answers as `plan(prompt number, greedy)` says: tokens, finish reason."""

    def sample(requests: list[SampleRequest]) -> list[Response]:
        responses = []
        for request in requests:
            tokens, finish = plan(request.prompt_token_ids[0], request.temperature == 0)
            responses.append(
                Response(tokens, [0.0] * len(tokens), finish, request.temperature, policy_version=1)
            )
        return responses

    return sample


def one_is_right(pairs: list[tuple[Prompt, Response]]) -> None:
    """Token 1 is a correct answer, token 9 makes the verifier fail."""
    for _, response in pairs:
        if response.token_ids[0] == 9:
            response.reward_error = "verifier crashed"
            continue
        response.reward = float(response.token_ids[0] == 1)
        response.correct = response.reward == 1.0


def test_accuracies_lengths_and_truncation_are_counted():
    def plan(number, greedy):
        if greedy:
            return [1], "stop"
        return ([1, 2, 3], "stop") if number < 3 else ([0], "length")

    result = evaluate(prompts(4), answers(plan), one_is_right, max_tokens=5)

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

    result = evaluate(prompts(4), answers(plan), one_is_right, max_tokens=5)
    assert result.reward_errors == 2, "once sampled, once greedy"
    assert result.accuracy == 1.0
    assert "2 reward errors" in str(result)


def test_nothing_scored_is_an_error_with_the_first_cause():
    with pytest.raises(ValueError, match="verifier crashed"):
        evaluate(prompts(2), answers(lambda number, greedy: ([9], "stop")), one_is_right, max_tokens=5)


def test_no_prompts_is_an_error():
    with pytest.raises(ValueError, match="at least one prompt"):
        evaluate([], answers(lambda number, greedy: ([1], "stop")), one_is_right, max_tokens=5)


def test_several_samples_a_prompt_widen_the_interval_by_prompts_not_samples():
    # every prompt is always right or always wrong: 16 samples of it tell no more than one
    def plan(number, greedy):
        return [number % 2], "stop"

    once = evaluate(prompts(64), answers(plan), one_is_right, max_tokens=5)
    often = evaluate(prompts(64), answers(plan), one_is_right, max_tokens=5, samples_per_prompt=16)
    assert often.accuracy == once.accuracy == 0.5
    assert often.samples_per_prompt == 16
    width = often.accuracy_high - often.accuracy_low
    assert width == pytest.approx(once.accuracy_high - once.accuracy_low, rel=0.15)


def test_requests_are_the_same_at_every_evaluation_and_differ_within_one():
    seen: list[list[SampleRequest]] = []

    def sample(requests):
        seen.append(requests)
        return answers(lambda number, greedy: ([1], "stop"))(requests)

    for _ in range(2):
        evaluate(
            prompts(3),
            sample,
            one_is_right,
            max_tokens=5,
            samples_per_prompt=4,
            temperature=0.7,
            top_p=0.9,
            top_k=3,
        )
    assert seen[0] == seen[1]
    sampled = [request for request in seen[0] if request.temperature > 0]
    assert len(sampled) == 12
    assert len({request.seed for request in sampled}) == 12
    assert all((request.temperature, request.top_p, request.top_k) == (0.7, 0.9, 3) for request in sampled)
    assert len(seen[0]) - len(sampled) == 3, "one greedy response a prompt"
    # the seeds of a prompt do not depend on which other prompts are evaluated with it
    evaluate(prompts(3)[2:], sample, one_is_right, max_tokens=5, samples_per_prompt=4, temperature=0.7)
    assert [r.seed for r in seen[2] if r.temperature > 0] == [
        r.seed for r in sampled if r.prompt_token_ids[0] == 2
    ]
