"""IBPO's carriers: DAPO's sampling and punishment, PPO's advantages, and more diverse trajectories."""

import math
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
    check_algorithm,
    context,
    correct_groups,
    fix_last,
    group,
    ids_of,
    in_turn,
    prompt,
    response,
    some_groups,
)


def filled(*plans, wanted=3):
    """(indices of the prompts of the batch, metrics) of rounds of groups: 0 none correct, 1 all, ? some."""
    contents = {"0": ([14], [14]), "1": ([13], [13]), "?": ([14], [13])}
    numbers = iter(range(100))
    rounds = [[group(*contents[kind], index=next(numbers)) for kind in plan] for plan in plans]
    groups, metrics = fill_batch(lambda number: rounds[number], wanted=wanted, max_rounds=len(rounds))
    return [made.prompt.index for made in groups], metrics


def test_other_prompts_are_sampled_until_the_batch_is_full():
    """The batch takes groups of right and wrong responses, in the order in which they came."""
    found, metrics = filled("0?1", "?10", "???", "???")
    assert found == [1, 3, 6]
    assert metrics == {
        "sampling_rounds": 3, "groups_filled_up": 0, "groups_discarded": 6, "groups_refused": 0,
        "groups_missing": 0, "tokens_discarded": 6 * 4,  # one token and the end, of two responses
    }  # fmt: skip
    found, metrics = filled("???", "???")
    assert (found, metrics["sampling_rounds"], metrics["groups_discarded"]) == ([0, 1, 2], 1, 0)
    found, metrics = filled("01?", "1?0")  # the last round is over
    assert (found, metrics["groups_filled_up"], metrics["groups_discarded"]) == ([2, 4, 0], 1, 3)
    unsure = Group(prompt(), [response([14], None), response([13], 1.0)])
    assert not is_informative(unsure), "a failed verifier is no wrong answer"


WRONG = ([20, 21], [22, 23], [24, 25])
"""No response is correct."""


def test_a_group_that_none_solves_leaves_a_gradient_where_some_corrections_succeed():
    for name, contents, right_corrections, leaves in (
        ("ibpo", WRONG, {20}, True),
        ("ibpo-shaping-only", WRONG, {20}, True),  # a bonus for one of three
        ("ibpo-joint-only", WRONG, {20}, True),  # one right correction of three
        ("ibpo", WRONG, {20, 22, 24}, False),  # equal bonuses, equal corrections
        ("gspo", WRONG, set(), False),
        ("ibpo", ([13], [10, 13]), set(), False),
        ("ppo", ([13], [14]), set(), True),
        ("ppo", WRONG, set(), False),
    ):
        answers = [[10, 13] if content[0] in right_corrections else [10, 14] for content in contents]
        lenient = {"ibpo_rewrite_threshold": 1.0} if name.startswith("ibpo") else {}
        loop, made, own = Loop(in_turn(*answers)), group(*contents), context(algorithm(name, **lenient))
        operator = find_operator(own.algorithm)
        correct_groups([made], own, operator, loop.sample, loop.score)
        assert leaves_gradient(made, own, operator) is leaves, (name, contents)
        assert is_informative(made) is (contents == ([13], [14]))


def test_dapo_decides_on_responses_and_ibpo_on_credit():
    for name in PRESETS:
        own = algorithm(name)
        assert (own.dynamic_sampling_by == "credit") is bool(own.parameters.get("ibpo_corrections")), name
    recipe = parse_config(["--config", "examples/algorithms/ibpo_on_dapo.yaml"]).algorithm
    assert (recipe.dynamic_sampling, recipe.dynamic_sampling_by) == (True, "credit")
    with pytest.raises(ValueError, match="--dynamic-sampling-by credit judges groups during"):
        check_algorithm(algorithm("ciw", dynamic_sampling_by="credit"))
    loss = parse_config(["--advantage-estimator", "dapo"]).loss
    assert (loss.loss_variant, loss_params(loss)) == ("dapo", {"eps_low": 0.2, "eps_high": 0.28})
    assert loss.loss_aggregation == "variant", "which is the token mean"


def test_the_last_fifth_of_the_length_costs_up_to_one():
    lengths, costs = (0, 80, 81, 90, 100, 120), (0.0, 0.0, -0.05, -0.5, -1.0, -1.0)
    assert [overlong_penalty(length, 100, 20) for length in lengths] == pytest.approx(costs)
    assert overlong_penalty(100, 100, 0) == 0, "without a buffer it costs nothing"


LONG = [10, 11, 12, 12, 12, 12, 13]
"""A right response of 8 tokens with its end: it would pay 1."""


def overlong(name, *contents, rewards=None, correct=fix_last, share=0.5, **settings):
    """Credit of a group, whose rewards may be given, at a limit of 8 tokens with a buffer of 4."""
    made = group(*contents)
    for sample, reward in zip(made.responses, rewards or [], strict=bool(rewards)):
        sample.reward = reward
    config = algorithm(name, overlong_buffer_share=share, **settings)
    return made, Loop(correct).credit([made], config, rollout=RolloutConfig(rollout_max_response_len=8))


@pytest.mark.parametrize(
    ("name", "contents", "graded", "paid", "limited"),
    [
        # 6 tokens pay .5, 8 tokens pay 1; no order changes
        ("gspo", ([10, 11, 12, 12, 13], [14], [*LONG[:-1], 14]), None, [0.5, 0.0, -1.0], 0),
        ("gspo", ([13], LONG), None, [1.0, 0.0], 0),
        # 1 - 1 = 0 would lie below a wrong one that is graded, or corrected and worth .3
        ("gspo", (LONG, [14], [15]), [1.0, 0.4, 0.0], [0.4, 0.4, 0.0], 1),
        ("ibpo-shaping-only", (LONG, [10, 14]), None, [0.3, 0.3], 1),
    ],
)
def test_a_long_response_pays_as_long_as_it_outranks_the_wrong_ones(name, contents, graded, paid, limited):
    _, credit = overlong(name, *contents, rewards=graded)
    assert [s.reward for s in credit.sequences] == paid
    assert [s.advantage for s in credit.sequences] == group_z_score(paid)
    assert credit.metrics["overlong_penalties_limited"] == limited
    assert credit.metrics["accuracy"] == sum(content[-1] == 13 for content in contents) / len(contents)


def test_long_corrections_pay_too():
    _, credit = overlong("ibpo-joint-only", RIGHT, [14], [10, 11, 12, 12, 14])
    assert [s.advantage for s in by_kind(credit, "correction")] == group_z_score([1.0, 0.5])
    # a right one of full length is worth no less than a wrong one: with ρ = .5 for a rewrite 1 - .5 - 1 is
    # less than the other correction's 0, which pays ρ too
    wrong = ([20, 14], [21, 15])
    made, credit = overlong("ibpo", RIGHT, *wrong, correct=in_turn(LONG, [22, 16]), ibpo_rewrite_penalty=0.5)
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
    graded = [1.0 if content[-1] == 13 else reward for content, reward in drawn]
    made, credit = overlong(name, *(content for content, _ in drawn), rewards=graded, share=share)
    found = list(zip(by_kind(credit, "response"), made.responses, strict=True))
    right = [sequence for sequence, sample in found if sample.correct]
    wrong = [sequence for sequence, sample in found if not sample.correct]
    if right and wrong:
        assert min(s.reward for s in right) >= max(s.reward for s in wrong)
        assert min(s.advantage for s in right) >= max(s.advantage for s in wrong)


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


def judged(groups, name, value, **settings):
    """Credit with a critic whose value depends on the token's place."""

    def critic(sequences):
        return [np.array([value(t) for t in range(len(s.response_token_ids))], np.float32) for s in sequences]

    return Loop(fix_last).credit(groups, algorithm(name, **settings), values=critic)


def test_ppo_gives_every_token_its_own_advantage():
    """Rewards 1 and 0; the critic says .5 everywhere. γ = λ = 1: A = .5 on three tokens, -.5 on two; mean .1,
    variance .25 - .01."""
    credit = judged([group([12, 13], [14])], "ppo", lambda t: 0.5, gae_lambda=1.0)
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
    # a critic that was right all along leaves nothing to learn
    right = judged([group([13], [13])], "ppo", lambda t: 1.0)
    assert [s.has_advantage for s in right.sequences] == [False, False]
    with pytest.raises(ValueError, match="--advantages critic gives every token its own"):
        check_run(parse_config(["--advantage-estimator", "ppo", "--loss-variant", "gspo"]))


def test_ppo_shapes_and_trains_on_corrections_as_well():
    """Returns at λ = 1 are the rewards: 1, .3 for the wrong response with a right correction, and 1 for that,
    whose value the critic was asked too."""
    by_critic, made = {"advantages": "critic", "gae_lambda": 1.0}, [group(RIGHT, [10, 11, 12, 14])]
    credit = judged(made, "ibpo", lambda t: 0.1 * t, **by_critic).sequences
    masked = judged(made, "ibpo-mask", lambda t: 0.1 * t, **by_critic).sequences
    assert [s.returns[0] for s in credit] == pytest.approx([1.0, 0.3, 1.0])
    flat = np.concatenate([s.token_advantages for s in credit])
    assert (flat.mean(), flat.std()) == pytest.approx((0, 1), abs=1e-7)
    assert ids_of(masked[1].token_weights) == (0, 0, 0, 1, 0)
    assert ids_of(masked[1].token_advantages) == ids_of(credit[1].token_advantages)


@pytest.mark.parametrize("name", ["gspo", "grpo", "dapo", "ppo"])
def test_ibpo_works_on_every_carrier(name):
    """The carrier's settings with IBPO's own on top: the responses are shaped, the corrections trained on."""
    ibpo = {k: v for k, v in PRESETS["ibpo"].items() if k.startswith("ibpo_")}
    check_algorithm(algorithm(name, **ibpo))
    credit = judged(some_groups(), name, lambda t: 0.5, **ibpo)
    assert credit.metrics["bonus_rate"] > 0
    assert by_kind(credit, "correction")


def requests_of(*prompts, prompt_ids=None, **settings):
    rollout = RolloutConfig(n_samples_per_prompt=4, **settings)
    return group_requests(prompts, rollout, seed=0, step=0, prompt_ids=prompt_ids)


def test_sampling_parameters_go_through_their_cycles_in_every_group():
    cycles = {"rollout_temperature_cycle": (0.7, 1.0, 1.2), "rollout_top_p_cycle": (0.9, 1.0)}
    requests = requests_of(prompt(0), prompt(1), **cycles, rollout_top_k=5)
    assert [r.temperature for r in requests] == [0.7, 1.0, 1.2, 0.7] * 2
    assert [r.top_p for r in requests] == [0.9, 1.0, 0.9, 1.0] * 2
    assert {r.top_k for r in requests} == {5}
    plain = requests_of(prompt(0), prompt(1))
    assert [r.seed for r in plain] == [r.seed for r in requests]
    assert {r.temperature for r in plain} == {1.0}


def test_questions_are_asked_in_several_ways():
    tokenizer = HuggingFaceTokenizer(make_tiny_tokenizer())
    suffixes = PromptSuffixes(tokenizer, ["", "+0", "-0"])
    asked = prompt()
    requests = requests_of(asked, prompt_ids=suffixes)
    plus, minus = tokenizer.encode("+0"), tokenizer.encode("-0")
    head, whole, tail = asked.head_ids, asked.token_ids, asked.tail_ids
    ways = [ids_of(whole), (*head, *plus, *tail), (*head, *minus, *tail), ids_of(whole)]
    assert [ids_of(r.prompt_token_ids) for r in requests] == ways
    assert {r.prompt_token_ids.dtype for r in requests} == {np.dtype(np.int32)}
    assert suffixes.longest == 2
    with pytest.raises(DataError, match="--rollout-prompt-suffixes"):
        PromptSuffixes(tokenizer, ["Denke Schritt für Schritt."])


def test_a_response_is_trained_on_with_the_prompt_and_temperature_it_was_sampled_at():
    made, loop = group(RIGHT, [14]), Loop(fix_last)
    made.responses[1].prompt_token_ids = token_ids([1, 5, 6, 27])
    made.responses[1].temperature = 0.7
    responses = by_kind(loop.credit([made], algorithm("ibpo")), "response")
    assert [ids_of(s.prompt_token_ids) for s in responses] == [(1, 5, 27), (1, 5, 6, 27)]
    assert [s.temperature for s in responses] == [1.0, 0.7]
    assert loop.asked == [(1, 5, 90, 14, 90, *RIGHT, 27)], "corrections see the question"
    assert loop.requests[0].temperature == 1.0
