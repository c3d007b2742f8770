"""IBPO works with its carriers: DAPO's sampling and punishment, PPO's advantages, and more diverse
trajectories."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import make_tiny_tokenizer

from megatron_ibpo.basics.records import Group, token_ids
from megatron_ibpo.config import PRESETS, RolloutConfig
from megatron_ibpo.credit import fill_batch, find_operator, is_informative, leaves_gradient
from megatron_ibpo.credit.estimators import group_z_score
from megatron_ibpo.credit.gae import generalised_advantages
from megatron_ibpo.credit.shaping import overlong_penalty
from megatron_ibpo.data import DataError, PromptSuffixes
from megatron_ibpo.data.tokenizer import HuggingFaceTokenizer
from megatron_ibpo.policy.loss_objective import loss_params
from megatron_ibpo.run.checks import check_run
from megatron_ibpo.run.settings import parse_config
from megatron_ibpo.sampling.requests import group_requests
from support.credit_cases import (
    RIGHT,
    Loop,
    algorithm,
    by_kind,
    candidates,
    check_algorithm,
    context,
    correct_groups,
    fix_last,
    group,
    ids_of,
    prompt,
    response,
    some_groups,
)

# ------------------------------------------------------------------------------------- dynamic sampling


def kinds(groups):
    return "".join(
        {0: "0", len(g.responses): "1"}.get(sum(r.correct for r in g.responses), "?") for g in groups
    )


def batches(*plans):
    """Rounds of groups: 0 none correct, 1 all correct, ? some."""
    contents = {"0": ([14], [14]), "1": ([13], [13]), "?": ([14], [13])}
    numbers = iter(range(100))
    return [[group(*contents[kind], index=next(numbers)) for kind in plan] for plan in plans]


def test_informative_are_groups_of_right_and_wrong_responses():
    assert [is_informative(g) for (g,) in batches("0", "1", "?")] == [False, False, True]
    unsure = Group(prompt(), [response([14], None), response([13], 1.0)])
    assert not is_informative(unsure), "a failed verifier is no wrong answer"


def test_other_prompts_are_sampled_until_the_batch_is_full():
    rounds, asked = batches("0?1", "?10", "???"), []

    def draw(number):
        asked.append(number)
        return rounds[number]

    groups, metrics = fill_batch(draw, wanted=3, max_rounds=10)
    assert asked == [0, 1, 2]
    assert kinds(groups) == "???"
    assert [g.prompt.index for g in groups] == [1, 3, 6], "in the order in which they came"
    assert metrics == {
        "sampling_rounds": 3,
        "groups_filled_up": 0,
        "groups_discarded": 6,
        "groups_refused": 0,
        "groups_missing": 0,
        "tokens_discarded": 6 * 4,  # one token and the end, of two responses
    }


def test_a_first_round_that_is_informative_costs_nothing():
    groups, metrics = fill_batch(lambda number: batches("???")[0], wanted=3, max_rounds=10)
    assert kinds(groups) == "???"
    assert (metrics["sampling_rounds"], metrics["groups_discarded"]) == (1, 0)


def test_after_the_last_round_the_batch_is_filled_up_and_counted():
    rounds = batches("01?", "1?0")
    groups, metrics = fill_batch(lambda number: rounds[number], wanted=3, max_rounds=2)
    assert [g.prompt.index for g in groups] == [2, 4, 0]
    assert (metrics["groups_filled_up"], metrics["groups_discarded"]) == (1, 3)


WRONG = ([20, 21], [22, 23], [24, 25])
"""No response is correct."""


@pytest.mark.parametrize(
    ("name", "contents", "right_corrections", "leaves"),
    [
        ("ibpo", WRONG, {20}, True),
        ("ibpo-shaping-only", WRONG, {20}, True),  # a bonus for one of three
        ("ibpo-joint-only", WRONG, {20}, True),  # one right correction of three
        ("ibpo", WRONG, set(), False),
        ("ibpo", WRONG, {20, 22, 24}, False),  # equal bonuses, equal corrections
        ("gspo", WRONG, set(), False),
        ("ibpo", ([13], [10, 13]), set(), False),
        ("gspo", ([13], [14]), set(), True),
        ("ppo", ([13], [14]), set(), True),
        ("ppo", WRONG, set(), False),
    ],
)
def test_a_group_that_none_solves_leaves_a_gradient_where_some_corrections_succeed(
    name, contents, right_corrections, leaves
):
    loop = Loop(lambda x: [10, 13] if candidates(x)[0][0] in right_corrections else [10, 14])
    threshold = {"ibpo_rewrite_threshold": 1.0} if name.startswith("ibpo") else {}
    made, own = group(*contents), context(algorithm(name, **threshold))
    operator = find_operator(own.algorithm)
    correct_groups([made], own, operator, loop.sample, loop.score)
    assert leaves_gradient(made, own, operator) is leaves
    assert is_informative(made) is (contents == ([13], [14]))


def test_dapo_decides_on_responses_and_ibpo_on_credit():
    decides = {name: algorithm(name).dynamic_sampling_by for name in PRESETS}
    assert {name for name, by in decides.items() if by == "credit"} == {
        name for name in PRESETS if algorithm(name).parameters.get("ibpo_corrections")
    }
    recipe = parse_config(["--config", "examples/algorithms/ibpo_on_dapo.yaml"]).algorithm
    assert (recipe.dynamic_sampling, recipe.dynamic_sampling_by) == (True, "credit")
    with pytest.raises(ValueError, match="--dynamic-sampling-by credit judges groups during"):
        check_algorithm(algorithm("ciw", dynamic_sampling_by="credit"))


# ------------------------------------------------------------------------------------ overlong punishment


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (120, -1.0)]
)
def test_the_last_fifth_of_the_length_costs_up_to_one(length, expected):
    assert overlong_penalty(length, 100, 20) == pytest.approx(expected)


def test_no_buffer_no_punishment():
    assert overlong_penalty(100, 100, 0) == 0


def test_long_responses_and_corrections_pay_and_stay_what_they_are():
    """Limit 8, buffer 4 tokens: |y| = 6 costs .5, |y| = 8 costs 1. Rewards 1, 1 - .5, 0 - 1."""
    made = group([13], [10, 11, 12, 12, 13], [10, 11, 12, 12, 12, 12, 14])
    rollout = RolloutConfig(rollout_max_response_len=8)
    settings = algorithm("gspo", overlong_buffer_share=0.5)
    credit = Loop(fix_last).credit([made], settings, rollout=rollout)
    assert [s.advantage for s in credit.sequences] == group_z_score([1.0, 0.5, -1.0])
    assert credit.metrics["accuracy"] == pytest.approx(2 / 3)

    joint = algorithm("ibpo-joint-only", overlong_buffer_share=0.5)
    made = group(RIGHT, [14], [10, 11, 12, 12, 14])
    credit = Loop(fix_last).credit([made], joint, rollout=rollout)
    assert [s.advantage for s in by_kind(credit, "correction")] == group_z_score([1.0, 0.5])


def overlong(*contents, rewards=None, **settings):
    """Rewards that are trained on, by the operator or as given: a limit of 8 tokens, a buffer of 4."""
    made = group(*contents)
    for sample, reward in zip(made.responses, rewards or [], strict=bool(rewards)):
        sample.reward = reward
    config = algorithm(settings.pop("name", "ibpo-shaping-only"), overlong_buffer_share=0.5, **settings)
    rollout = RolloutConfig(rollout_max_response_len=8)
    credit = Loop(fix_last).credit([made], config, rollout=rollout)
    return credit, [s.reward for s in by_kind(credit, "response")]


LONG = [10, 11, 12, 12, 12, 12, 13]
"""A right response of 8 tokens with its end: it would pay 1."""


def test_a_right_response_of_full_length_is_worth_no_less_than_a_corrected_wrong_one():
    """1 - 1 = 0 would lie below the near one's .3, at A = -1 beside +1. It pays .7 instead."""
    credit, rewards = overlong(LONG, [10, 14])
    assert rewards == [0.3, 0.3]
    assert credit.metrics["overlong_penalties_limited"] == 1
    assert [s.advantage for s in credit.sequences] == [0, 0]


def test_a_right_response_of_full_length_is_worth_no_less_than_a_graded_wrong_one():
    credit, rewards = overlong(LONG, [14], [15], rewards=[1.0, 0.4, 0.0], name="gspo")
    assert rewards == [0.4, 0.4, 0.0]
    assert credit.metrics["overlong_penalties_limited"] == 1


def test_a_penalty_that_changes_no_order_is_paid_whole():
    """6 tokens pay .5; two wrong ones are worth 0 and, at full length, -1."""
    credit, rewards = overlong([10, 11, 12, 12, 13], [14], [*LONG[:-1], 14], name="gspo")
    assert rewards == [0.5, 0.0, -1.0]
    assert credit.metrics["overlong_penalties_limited"] == 0


def test_right_responses_alone_pay_whole():
    _, rewards = overlong([13], LONG, name="gspo")
    assert rewards == [1.0, 0.0]


def test_a_right_correction_of_full_length_is_worth_no_less_than_a_wrong_one():
    """With ρ = .5 for a rewrite: 1 - .5 - 1 is less than the other correction's 0."""
    made = group(RIGHT, [20, 14], [21, 15])
    answers = {20: LONG, 21: [22, 16]}
    settings = algorithm("ibpo", overlong_buffer_share=0.5, ibpo_rewrite_penalty=0.5)
    loop = Loop(lambda x: answers[candidates(x)[0][0]])
    credit = loop.credit([made], settings, rollout=RolloutConfig(rollout_max_response_len=8))
    assert [c.beyond_threshold for c in made.corrections] == [True, True]
    assert [s.reward for s in by_kind(credit, "correction")] == [-0.5, -0.5]


written = st.lists(st.integers(10, 14), min_size=1, max_size=7)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(written, st.floats(0, 0.95)), min_size=2, max_size=6),
    st.sampled_from(["gspo", "ibpo-shaping-only", "ibpo-ratio"]),
    st.floats(0.05, 1),
)
def test_no_wrong_response_outranks_a_right_one(drawn, name, share):
    """This holds for all lengths, graded rewards of wrong responses, and choices of what is corrected."""
    made = group(*(content for content, _ in drawn))
    for sample, (_, graded) in zip(made.responses, drawn, strict=True):
        sample.reward = 1.0 if sample.correct else graded
    config = algorithm(name, overlong_buffer_share=share)
    credit = Loop(fix_last).credit([made], config, rollout=RolloutConfig(rollout_max_response_len=8))
    found = by_kind(credit, "response")
    right = [s for s, sample in zip(found, made.responses, strict=True) if sample.correct]
    wrong = [s for s, sample in zip(found, made.responses, strict=True) if not sample.correct]
    if right and wrong:
        assert min(s.reward for s in right) >= max(s.reward for s in wrong)
        assert min(s.advantage for s in right) >= max(s.advantage for s in wrong)


def test_dapo_is_its_four_parts():
    loss = parse_config(["--advantage-estimator", "dapo"]).loss
    assert (loss.loss_variant, loss_params(loss)) == ("dapo", {"eps_low": 0.2, "eps_high": 0.28})
    assert loss.loss_aggregation == "variant", "which is the token mean"
    settings = algorithm("dapo")
    assert (settings.dynamic_sampling, settings.overlong_buffer_share) == (True, 0.2)
    assert algorithm("dapo", dynamic_sampling=False, overlong_buffer_share=0.0) == replace(
        algorithm("gspo"), advantage_estimator="dapo"
    )


# --------------------------------------------------------------------------------------------------- PPO


def test_generalised_advantages_by_hand():
    """V = .2 .4 .6, reward 1, γ = .9, λ = .5: δ = .16, .14, .4; A = .16 + .45(.14 + .45·.4), …"""
    (a,) = generalised_advantages([np.array([0.2, 0.4, 0.6])], [1.0], gamma=0.9, lam=0.5)
    last, middle = 0.4, 0.14 + 0.45 * 0.4
    assert a == pytest.approx([0.16 + 0.45 * middle, middle, last])


@given(
    st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=9), min_size=1, max_size=5),
    st.floats(0, 1),
    st.floats(0, 1),
    st.randoms(),
)
def test_generalised_advantages_are_discounted_sums_of_errors(values, gamma, lam, rng):
    rewards = [rng.uniform(-1, 1) for _ in values]
    found = generalised_advantages(values, rewards, gamma=gamma, lam=lam)
    for v, r, own in zip(values, rewards, found, strict=True):
        errors = [gamma * after - now for now, after in pairwise(v)] + [r - v[-1]]
        for t in range(len(v)):
            expected = math.fsum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(v)))
            assert own[t] == pytest.approx(expected, abs=1e-12)


def test_at_lambda_1_the_return_is_the_reward():
    (a,) = generalised_advantages([np.array([0.3, -0.1])], [1.0], gamma=1.0, lam=1.0)
    assert (a + np.array([0.3, -0.1])).tolist() == pytest.approx([1.0, 1.0])


def critic(value):
    """Values by kind and length of the sequence."""
    return lambda sequences: [
        np.array([value(s, t) for t in range(len(s.response_token_ids))], np.float32) for s in sequences
    ]


def test_ppo_gives_every_token_its_own_advantage():
    """Rewards 1 and 0; the critic says .5 everywhere. γ = λ = 1: A = .5 on three tokens, -.5 on two; mean .1,
    variance .25 - .01."""
    credit = Loop(fix_last).credit(
        [group([12, 13], [14])], algorithm("ppo", gae_lambda=1.0), values=critic(lambda s, t: 0.5)
    )
    std = math.sqrt(0.24)
    right, wrong = credit.sequences
    assert right.token_advantages == pytest.approx([0.4 / std] * 3)
    assert wrong.token_advantages == pytest.approx([-0.6 / std] * 2)
    assert right.returns == pytest.approx([1.0] * 3)
    assert wrong.returns == pytest.approx([0.0] * 2)
    assert ids_of(right.values) == (0.5,) * 3
    assert right.advantage == pytest.approx(0.4 / std)
    assert right.has_advantage
    assert credit.metrics["value_mean"] == 0.5


def test_ppo_shapes_and_trains_on_corrections_as_well():
    """Returns at λ = 1 are the rewards: 1, .3 for the wrong response with a right correction, and 1 for that,
    whose value the critic was asked too."""
    config = algorithm("ibpo", advantages="critic", gae_lambda=1.0)
    credit = Loop(fix_last).credit(
        [group(RIGHT, [10, 11, 12, 14])], config, values=critic(lambda s, t: 0.1 * t)
    )
    assert [s.returns[0] for s in credit.sequences] == pytest.approx([1.0, 0.3, 1.0])
    flat = np.concatenate([s.token_advantages for s in credit.sequences])
    assert (flat.mean(), flat.std()) == pytest.approx((0, 1), abs=1e-7)
    masked = Loop(fix_last).credit(
        [group(RIGHT, [10, 11, 12, 14])],
        algorithm("ibpo", advantages="critic", gae_lambda=1.0, ibpo_variant="mask"),
        values=critic(lambda s, t: 0.1 * t),
    )
    assert ids_of(masked.sequences[1].token_weights) == (0, 0, 0, 1, 0)
    assert ids_of(masked.sequences[1].token_advantages) == ids_of(credit.sequences[1].token_advantages)


def test_a_critic_that_was_right_all_along_leaves_nothing_to_learn():
    credit = Loop(fix_last).credit([group([13], [13])], algorithm("ppo"), values=critic(lambda s, t: 1.0))
    assert [s.has_advantage for s in credit.sequences] == [False, False]


def test_ppo_needs_a_critic_and_a_loss_of_tokens():
    with pytest.raises(ValueError, match="needs a critic"):
        Loop(fix_last).credit([group([13], [14])], algorithm("ppo"))
    with pytest.raises(ValueError, match="--advantages critic gives every token its own"):
        check_run(parse_config(["--advantage-estimator", "ppo", "--loss-variant", "gspo"]))


@pytest.mark.parametrize("name", ["gspo", "grpo", "dapo", "ppo"])
def test_ibpo_works_on_every_carrier(name):
    """The carrier's settings with IBPO's own on top: the responses are shaped, the corrections trained on."""
    ibpo = {k: v for k, v in PRESETS["ibpo"].items() if k.startswith("ibpo_")}
    settings = algorithm(name, **ibpo)
    check_algorithm(settings)
    credit = Loop(fix_last).credit(some_groups(), settings, values=critic(lambda s, t: 0.5))
    assert credit.metrics["bonus_rate"] > 0
    assert by_kind(credit, "correction")


# --------------------------------------------------------------------------------- trajectory diversity


def test_sampling_parameters_go_through_their_cycles_in_every_group():
    rollout = RolloutConfig(
        n_samples_per_prompt=4,
        rollout_temperature_cycle=(0.7, 1.0, 1.2),
        rollout_top_p_cycle=(0.9, 1.0),
        rollout_top_k=5,
    )
    requests = group_requests([prompt(0), prompt(1)], rollout, seed=0, step=0)
    assert [r.temperature for r in requests] == [0.7, 1.0, 1.2, 0.7] * 2
    assert [r.top_p for r in requests] == [0.9, 1.0, 0.9, 1.0] * 2
    assert {r.top_k for r in requests} == {5}
    plain = group_requests([prompt(0), prompt(1)], RolloutConfig(n_samples_per_prompt=4), seed=0, step=0)
    assert [r.seed for r in plain] == [r.seed for r in requests]
    assert {r.temperature for r in plain} == {1.0}


def test_questions_are_asked_in_several_ways():
    tokenizer = HuggingFaceTokenizer(make_tiny_tokenizer())
    suffixes = PromptSuffixes(tokenizer, ["", "+0", "-0"])
    asked = prompt()
    requests = group_requests(
        [asked], RolloutConfig(n_samples_per_prompt=4), seed=0, step=0, prompt_ids=suffixes
    )
    plus, minus = tokenizer.encode("+0"), tokenizer.encode("-0")
    head, tail = asked.head_ids, asked.tail_ids
    assert [ids_of(r.prompt_token_ids) for r in requests] == [
        ids_of(asked.token_ids), (*head, *plus, *tail), (*head, *minus, *tail), ids_of(asked.token_ids),
    ]  # fmt: skip
    assert {r.prompt_token_ids.dtype for r in requests} == {np.dtype(np.int32)}
    assert suffixes.longest == 2
    with pytest.raises(DataError, match="--rollout-prompt-suffixes"):
        PromptSuffixes(tokenizer, ["Denke Schritt für Schritt."])


def test_a_response_is_trained_on_with_the_prompt_and_temperature_it_was_sampled_at():
    made = group(RIGHT, [14])
    made.responses[1].prompt_token_ids = token_ids([1, 5, 6, 27])
    made.responses[1].temperature = 0.7
    loop = Loop(fix_last)
    credit = loop.credit([made], algorithm("ibpo"))
    assert [ids_of(s.prompt_token_ids) for s in by_kind(credit, "response")] == [(1, 5, 27), (1, 5, 6, 27)]
    assert [s.temperature for s in by_kind(credit, "response")] == [1.0, 0.7]
    assert loop.asked == [(1, 5, 90, 14, 90, *RIGHT, 27)], "corrections see the question"
    assert loop.requests[0].temperature == 1.0


def test_cycles_are_flags_and_recipe_keys(tmp_path):
    flags = parse_config(["--rollout-temperature-cycle", "0.8", "1.2", "--rollout-prompt-suffixes", "", "x"])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("rollout-temperature-cycle: [0.8, 1.2]\nrollout-prompt-suffixes: ['', x]\n")
    assert parse_config(["--config", str(recipe)]).rollout == flags.rollout
    assert flags.rollout.rollout_temperature_cycle == (0.8, 1.2)
