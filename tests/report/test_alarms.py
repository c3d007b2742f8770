"""Alarms of a run: each rule on numbers worked out by hand, and silence where all is well."""

import json
from pathlib import Path

import pytest

from megatron_ibpo.config import on_device
from megatron_ibpo.report.alarms import rounding_bound, run_alarms, step_alarms
from megatron_ibpo.report.metrics_log import Columns
from megatron_ibpo.run.settings import parse_config

HEALTHY = Path(__file__).parent / "healthy_run.jsonl"
"""Of examples/run_qwen3_next_ibpo.sh as it stands, 60 steps: the metrics that alarms look at."""


def columns(**metrics):
    """Steps 1, 2, … of these metrics."""
    length = len(next(iter(metrics.values())))
    rows = [{name: values[n] for name, values in metrics.items()} for n in range(length)]
    return Columns({"kind": "step", "step": n + 1, **row} for n, row in enumerate(rows))


def alarms(groups_per_step=None, **metrics):
    return run_alarms(columns(**metrics), groups_per_step=groups_per_step)


def spell(alarm):
    return alarm.name, alarm.since, alarm.until


def test_the_default_run_raises_no_alarm():
    rows = [json.loads(line) for line in HEALTHY.read_text().splitlines()]
    assert len(rows) == 60
    assert run_alarms(Columns(rows), groups_per_step=16) == []


def test_a_run_without_rows_or_with_a_few_raises_none():
    assert run_alarms(Columns(), groups_per_step=16) == []
    assert alarms(entropy=[1.0] * 5 + [0.0] * 4, accuracy=[0.0] * 9, groups_per_step=4) == []


def test_entropy_has_collapsed_once_ten_steps_have_a_tenth_of_the_first_ten():
    # the mean of ten falls from 1 by .1 a step: at step 19 it is .1, no less than a tenth; at step 20 it is 0
    (alarm,) = alarms(entropy=[1.0] * 10 + [0.0] * 12)
    assert spell(alarm) == ("entropy collapse", 20, None)
    assert alarm.metric == "entropy"
    assert "0 nats per token over the last 10 steps, 0% of the 1 of the first 10" in alarm.reason
    assert alarms(entropy=[1.0] * 10 + [0.11] * 40) == []


@pytest.mark.parametrize(
    ("later", "since", "words"),
    [  # (5·100 + 5·300) / 10 = 200, (3·100 + 7·20) / 10 = 44
        (300.0, 15, "300 tokens per response over the last 10 steps, 3 times the 100"),
        (20.0, 17, "20 tokens per response over the last 10 steps, 0.2 times the 100"),
    ],
)
def test_lengths_have_drifted_at_twice_or_half_of_the_first_ten_steps(later, since, words):
    (alarm,) = alarms(response_length=[100.0] * 10 + [later] * 12)
    assert spell(alarm) == ("length drift", since, None)
    assert words in alarm.reason
    assert alarms(response_length=[100.0] * 10 + [199.0] * 30) == []


def test_trainer_and_engine_differ_above_the_bound_and_the_alarm_ends_where_they_agree_again():
    # a mean above .01 needs a sum above .1 in ten steps: one step of .2 is enough while it is among them
    (alarm,) = alarms(logprob_diff_k3=[0.0] * 14 + [0.2] + [0.0] * 15)
    assert spell(alarm) == ("trainer and engine differ", 15, 24)
    assert "0.02 nats per token apart (k3)" in alarm.reason
    assert alarms(logprob_diff_k3=[0.01] * 30) == []


def resolved(*flags, on_gpu=False, has_delta_nets=False):
    return on_device(parse_config(flags), on_gpu=on_gpu, has_delta_nets=has_delta_nets)


SAMPLED_IN_FLOAT32, SAMPLED_IN_BFLOAT16 = (1.1e-5, 1.2e-5, 1.3e-5), (0.042, 0.141, 0.146)
"""Mean |Δ log-prob| of three steps of examples/run_smollm2_ibpo.sh, trained in float32."""
DEFAULT_RUN = (0.001, 0.002, 0.003)
"""The range of examples/run_qwen3_next_ibpo.sh."""


@pytest.mark.parametrize(
    ("config", "differences", "alarmed"),
    [
        (resolved(), SAMPLED_IN_FLOAT32, False),
        (resolved("--vllm-dtype", "bfloat16"), SAMPLED_IN_BFLOAT16, True),
        (resolved(has_delta_nets=True), DEFAULT_RUN, False),
        # an engine in float32 that differs so much has other weights
        (resolved(), SAMPLED_IN_BFLOAT16, True),
    ],
)
def test_a_run_that_differs_from_its_engine_by_more_than_rounding_is_told_at_once(
    config, differences, alarmed
):
    bound = rounding_bound(config)
    rows = [{"logprob_diff_abs_mean": value, "logprob_diff_bound": bound} for value in differences]
    said = [step_alarms(row, responses=64) for row in rows]
    found = alarms(**{name: [row[name] for row in rows] for name in rows[0]})
    if not alarmed:
        assert said == [[]] * 3
        assert found == []
        return
    (alarm,) = found
    assert spell(alarm) == ("differs beyond rounding", 1, None)
    assert said[-1] == [f"ALARM: {alarm.reason}"]
    assert f"{differences[-1]:.3g} apart per token" in alarm.reason
    assert f"more than the {bound:g} expected of {config.rollout.vllm_dtype}" in alarm.reason
    advice = "--check-weight-update-equal" if bound == 1e-3 else "--vllm-dtype float32"
    assert advice in alarm.reason


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-staleness", "1"),
        ("--rollout-top-p", "0.9"),
        ("--rollout-top-k-cycle", "-1", "20"),
        ("--vllm-arg", "quantization=fp8_per_channel"),
        ("--old-logprobs", "engine", "--num-steps-per-rollout", "2"),
    ],
)
def test_what_differs_for_other_reasons_too_has_no_bound(flags):
    assert rounding_bound(resolved(*flags)) is None


def test_a_run_in_bfloat16_may_differ_by_what_it_rounds():
    assert rounding_bound(resolved("--bf16")) == rounding_bound(resolved(on_gpu=True)) == 0.03


@pytest.mark.parametrize(("accuracy", "word"), [(0.99, "easy"), (0.01, "hard")])
def test_a_reward_saturates_when_nearly_all_responses_are_right_or_wrong(accuracy, word):
    (alarm,) = alarms(accuracy=[accuracy] * 12)
    assert spell(alarm) == ("reward saturates", 10, None)
    assert word in alarm.reason
    assert alarms(accuracy=[0.97] * 12) == alarms(accuracy=[0.03] * 12) == []


def test_leakage_counts_from_one_correction_in_five_and_is_absent_where_nobody_looks_for_it():
    (alarm,) = alarms(reference_leakage_rate=[0.0] * 10 + [1.0] * 2 + [0.0] * 3)  # .2 in ten from step 12 on
    assert spell(alarm) == ("reference leakage", 12, None)
    assert "20.0% of the corrections" in alarm.reason
    assert alarms(reference_leakage_rate=[None] * 12, reward=[0.5] * 12) == []


def test_groups_are_dead_at_nine_in_ten():
    (alarm,) = alarms(groups_per_step=20, degenerate_groups=[18.0] * 11)
    assert spell(alarm) == ("dead groups", 10, None)
    assert "90% of the groups" in alarm.reason
    assert alarms(groups_per_step=20, degenerate_groups=[17.0] * 11) == []
    assert alarms(groups_per_step=None, degenerate_groups=[18.0] * 11) == []


def test_failures_of_the_verifier_and_truncation_are_the_rules_of_the_console():
    # 100 responses: 2,000 tokens, 20 each
    common = {"tokens_responses": [2000.0] * 3, "response_length": [20.0] * 3}
    found = alarms(reward_errors=[0.0, 5.0, 5.0], truncated_responses=[90.0, 89.0, 0.0], **common)
    assert [spell(alarm) for alarm in found] == [("verifier fails", 2, None), ("truncation", 1, 1)]
    for number, alarm in ((2, found[0]), (1, found[1])):
        row = {"reward_errors": [0, 5, 5][number - 1], "truncated_responses": [90, 89, 0][number - 1]}
        (line,) = step_alarms(row, responses=100)
        assert line == f"ALARM: {alarm.reason}"


def test_spells_that_lie_close_together_are_one_and_those_that_go_on_come_first():
    errors = [100.0 if step in (1, 8, 30) else 0.0 for step in range(1, 41)]
    common = {"tokens_responses": [2000.0] * 40, "response_length": [20.0] * 40}
    found = alarms(reward_errors=errors, accuracy=[0.0] * 40, **common)
    assert [spell(alarm) for alarm in found] == [
        ("reward saturates", 10, None),
        ("verifier fails", 30, 30),
        ("verifier fails", 1, 8),
    ]


def test_a_value_that_is_not_finite_leaves_its_step_out():
    (alarm,) = alarms(accuracy=[0.99, None] * 12)
    assert spell(alarm) == ("reward saturates", 19, None)  # the tenth known value
