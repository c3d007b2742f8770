import json
from pathlib import Path

import pytest

from megatron_ibpo.config import on_device
from megatron_ibpo.report import RewardErrorRateError, check_reward_errors, step_alarms
from megatron_ibpo.report.alarms import rounding_bound, run_alarms
from megatron_ibpo.report.metrics_log import Columns
from megatron_ibpo.run.settings import parse_config


def alarms(groups_per_step=20, **metrics):
    """The alarms over steps 1, 2, … of these metrics."""
    rows = [dict(zip(metrics, values, strict=True)) for values in zip(*metrics.values(), strict=True)]
    columns = Columns({"kind": "step", "step": n, **row} for n, row in enumerate(rows, 1))
    return run_alarms(columns, groups_per_step=groups_per_step)


def spell(alarm):
    return alarm.name, alarm.since, alarm.until


def test_the_default_run_raises_no_alarm():
    """Of examples/run_qwen3_next_ibpo.sh as it stands, 60 steps: the metrics that alarms look at."""
    recorded = Path(__file__).parent / "healthy_run.jsonl"
    rows = [json.loads(line) for line in recorded.read_text().splitlines()]
    assert len(rows) == 60
    assert run_alarms(Columns(rows), groups_per_step=16) == []
    assert alarms(groups_per_step=None, degenerate_groups=[18.0] * 11) == []


def test_a_rule_over_ten_steps_names_its_metric_and_numbers():
    for metric, values, expected, words, without in [
        # the mean of ten falls by .1 a step: at step 19 it is .1, no less than a tenth; at step 20 it is 0
        ("entropy", [1.0] * 10 + [0.0] * 12, ("entropy collapse", 20, None),
         "0 nats per token over the last 10 steps, 0% of the 1 of the first 10", [1.0] * 10 + [0.11] * 40),
        # (5·100 + 5·300) / 10 = 200, (3·100 + 7·20) / 10 = 44
        ("response_length", [100.0] * 10 + [300.0] * 12, ("length drift", 15, None),
         "300 tokens per response over the last 10 steps, 3 times the 100", [100.0] * 10 + [199.0] * 30),
        ("response_length", [100.0] * 10 + [20.0] * 12, ("length drift", 17, None), "0.2 times the 100", []),
        # a mean above .01 needs a sum above .1 in ten steps: one step of .2 is enough while it is among them
        ("logprob_diff_k3", [0.0] * 14 + [0.2] + [0.0] * 15, ("trainer and engine differ", 15, 24),
         "0.02 nats per token apart (k3)", [0.01] * 30),
        ("accuracy", [0.99] * 12, ("reward saturates", 10, None), "easy", [0.97] * 12),
        ("accuracy", [0.01] * 12, ("reward saturates", 10, None), "hard", [0.03] * 12),
        # the tenth known value; and too few steps
        ("accuracy", [0.99, None] * 12, ("reward saturates", 19, None), "easy", [0.0] * 9),
        # or nobody looks for it
        ("reference_leakage_rate", [0.0] * 10 + [1.0] * 2 + [0.0] * 3, ("reference leakage", 12, None),
         "20.0% of the corrections", [None] * 12),
        ("degenerate_groups", [18.0] * 11, ("dead groups", 10, None), "90% of the groups", [17.0] * 11),
    ]:  # fmt: skip
        (alarm,) = alarms(**{metric: values})
        assert (spell(alarm), alarm.metric) == (expected, metric)
        assert words in alarm.reason
        assert alarms(**{metric: without}) == []


def resolved(*flags, on_gpu=False, has_delta_nets=False):
    return on_device(parse_config(flags), on_gpu=on_gpu, has_delta_nets=has_delta_nets)


def test_a_run_that_differs_from_its_engine_beyond_rounding_is_told_at_once():
    # mean |Δ log-prob| of three steps of examples/run_smollm2_ibpo.sh, trained in float32
    in_float32, in_bfloat16 = (1.1e-5, 1.2e-5, 1.3e-5), (0.042, 0.141, 0.146)
    for config, differences, advice in (
        (resolved(), in_float32, None),
        (resolved("--vllm-dtype", "bfloat16"), in_bfloat16, "--vllm-dtype float32"),
        (resolved(has_delta_nets=True), (0.001, 0.002, 0.003), None),  # as examples/run_qwen3_next_ibpo.sh
        (resolved(), in_bfloat16, "--check-weight-update-equal"),  # such an engine has other weights
    ):
        bound = rounding_bound(config)
        measured = [{"logprob_diff_abs_mean": one, "logprob_diff_bound": bound} for one in differences]
        said = [step_alarms(row, responses=64) for row in measured]
        found = alarms(logprob_diff_abs_mean=differences, logprob_diff_bound=[bound] * 3)
        if advice is None:
            assert (said, found) == ([[]] * 3, [])
            continue
        (alarm,) = found
        assert spell(alarm) == ("differs beyond rounding", 1, None)
        assert said[-1] == [f"ALARM: {alarm.reason}"]
        assert f"{differences[-1]:.3g} apart per token" in alarm.reason
        assert f"more than the {bound:g} expected of {config.rollout.vllm_dtype}" in alarm.reason
        assert advice in alarm.reason
    assert rounding_bound(resolved("--bf16")) == rounding_bound(resolved(on_gpu=True)) == 0.03
    # what differs for other reasons has no bound
    for flags in (
        "--max-staleness 1", "--rollout-top-p 0.9", "--rollout-top-k-cycle -1 20",
        "--vllm-arg quantization=fp8_per_channel", "--old-logprobs engine --num-steps-per-rollout 2",
    ):  # fmt: skip
        assert rounding_bound(resolved(*flags.split())) is None


def test_the_console_tells_failures_and_truncation_and_spells_that_lie_close_together_are_one():
    """Those that go on come first."""
    # 100 responses: 2,000 tokens, 20 each
    common = {"tokens_responses": [2000.0] * 3, "response_length": [20.0] * 3}
    found = alarms(reward_errors=[0.0, 5.0, 5.0], truncated_responses=[90.0, 89.0, 0.0], **common)
    assert [spell(alarm) for alarm in found] == [("verifier fails", 2, None), ("truncation", 1, 1)]
    rows = [{"reward_errors": 5, "truncated_responses": 89}, {"reward_errors": 0, "truncated_responses": 90}]
    for row, alarm in zip(rows, found, strict=True):
        assert step_alarms(row, responses=100) == [f"ALARM: {alarm.reason}"]
    errors = [100.0 if step in (1, 8, 30) else 0.0 for step in range(1, 41)]
    common = {"tokens_responses": [2000.0] * 40, "response_length": [20.0] * 40}
    found = alarms(reward_errors=errors, accuracy=[0.0] * 40, **common)
    assert [spell(alarm) for alarm in found] == [
        ("reward saturates", 10, None), ("verifier fails", 30, 30), ("verifier fails", 1, 8),
    ]  # fmt: skip


def test_a_verifier_that_fails_is_told_with_its_first_error_and_stops_the_run_where_it_fails_too_often():
    assert step_alarms({"reward_errors": 1, "truncated_responses": 0}, responses=128) == []
    broken = {"reward_errors": 16.0, "truncated_responses": 16.0}
    verifier, length = step_alarms(broken, responses=16, first_reward_error="NameError: x")
    assert verifier == "ALARM: the verifier failed on 16 of 16 responses; the first error: NameError: x"
    assert "16 of 16 responses were cut off" in length
    assert "--rollout-max-response-len" in length
    check_reward_errors(8, 16, 0.5)
    check_reward_errors(0, 0, 0.0)
    with pytest.raises(RewardErrorRateError, match=r"9 of 16 .* --max-reward-error-rate 0\.5 .*: KeyError"):
        check_reward_errors(9, 16, 0.5, first_reward_error="KeyError: 'a'")
