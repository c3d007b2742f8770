"""Sampling ahead on a simulated fleet: a step takes at most a tenth more than its bound."""

from dataclasses import replace

import pytest
from simulated_engines import StepTime
from simulated_fleet import Fleet, bound, simulate

from megatron_ibpo.sampling.ahead import Pace

SMALL = Fleet(
    engines=2, training_seconds=0.5, pause_seconds=0.02, step_time=StepTime(0.018, 5e-5), most_running=100,
    groups=8, group_size=8, longest=128, median_length=139,
)  # fmt: skip
"""A batch is 32 sequences for each engine, of about 100 tokens. Sampling takes longer than training."""
SLOW_TRAINING = replace(SMALL, training_seconds=6.0)


@pytest.mark.parametrize(
    ("fleet", "pace"),
    [
        (SMALL, Pace(1)),
        (SMALL, Pace(4)),
        (SMALL, Pace(8)),
        (SMALL, Pace(4, keep_order=True)),
        (SLOW_TRAINING, Pace(1)),
        (SLOW_TRAINING, Pace(8)),
    ],
)
def test_ahead_of_training_a_step_takes_at_most_a_tenth_more_than_its_bound(fleet, pace):
    found = simulate(fleet, pace, steps=8)
    least = bound(fleet, pace.staleness, found.tokens_per_step).seconds
    # a little less is possible where responses that were begun before the first counted step are long
    assert 0.95 < found.seconds_per_step / least < 1.1


def test_on_policy_a_step_is_sampling_and_training_one_after_the_other():
    one, other = (simulate(fleet, Pace(0), steps=4).seconds_per_step for fleet in (SMALL, SLOW_TRAINING))
    assert other - one == pytest.approx(5.5)


def test_the_bound_of_a_step_on_policy_by_hand():
    """10 steps of 2 s, of 1 token that costs .5 s; 3 s of training; 1 s of pause."""
    fleet = replace(
        SMALL, engines=1, longest=10, training_seconds=3.0, pause_seconds=1.0, step_time=StepTime(2.0, 0.5)
    )
    assert bound(fleet, 0, tokens_per_step=10).seconds == 10 * 2 + 10 * 0.5 + 3 + 1
