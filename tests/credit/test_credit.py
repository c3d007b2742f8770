"""Credit by hand: Algorithm 1 on small groups, its traps, and what must not matter."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ibpo.basics.records import Group
from megatron_ibpo.config import PRESETS, RolloutConfig
from megatron_ibpo.credit import Judgement, Operator
from megatron_ibpo.credit.compared_parts import compared_pairs
from megatron_ibpo.credit.edits import find_edits, mark_rewrites
from megatron_ibpo.credit.estimators import group_z_score
from megatron_ibpo.credit.pairing import draw_references
from megatron_ibpo.credit.shaping import correction_bonus
from support.credit_cases import (
    EOS,
    GSPO,
    RIGHT,
    Loop,
    algorithm,
    by_kind,
    candidates,
    check_algorithm,
    correction,
    fix_last,
    group,
    ids_of,
    plain,
    prompt,
    response,
    scored,
    some_groups,
)


def marked(groups, threshold):
    """The threshold in force, after corrections were compared with what they correct."""
    pairs = compared_pairs(groups, None)
    _, edits = find_edits(pairs, mark_insertions=False)
    return mark_rewrites(pairs, edits, threshold, None)


# ----------------------------------------------------------------------------------- Algorithm 1 by hand


def test_algorithm_1_by_hand():
    """One prompt, G=4, rewards 1 0 0 0. Corrections: of y1 right and near, of y2 wrong, of y3 right but
    a rewrite. λ=.6, β=.5, so r' = 1, .3, 0, 0."""
    y1, y2, y3 = [10, 11, 12, 14], [10, 11, 15, 15], [20, 21, 22, 23]
    corrected = {14: [10, 11, 12, 13], 15: [10, 11, 15, 16], 23: RIGHT}
    loop = Loop(lambda x: corrected[candidates(x)[0][-1]])
    credit = loop.credit([group(RIGHT, y1, y2, y3)], algorithm())

    # x̃ shows the wrong response first, then the only right one, both without their ends
    assert loop.asked == [(1, 5, 90, *y, 90, *RIGHT, 27) for y in (y1, y2, y3)]
    # mean .325; variance (.455625 + .000625 + 2·.105625) / 4 = .166875
    std = math.sqrt(0.166875)
    expected = [0.675 / std, -0.025 / std, -0.325 / std, -0.325 / std]
    responses = by_kind(credit, "response")
    assert [s.advantage for s in responses] == pytest.approx(expected, abs=1e-7)
    # corrections have the plain rewards 1 0 1: mean 2/3, std √2/3
    corrections = by_kind(credit, "correction")
    assert [s.advantage for s in corrections] == pytest.approx([2**-0.5, -(2**0.5), 2**-0.5], abs=1e-7)
    assert [ids_of(s.prompt_token_ids) for s in corrections] == loop.asked
    assert ids_of(corrections[1].response_token_ids) == (10, 11, 15, 16, EOS)
    assert [(s.prompt_index, s.group, s.index) for s in corrections] == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]
    # the rewards that advantages were made of: shaped ones of responses, plain ones of corrections
    assert [s.reward for s in credit.sequences] == [1, 0.3, 0, 0, 1, 0, 1]
    # every sequence weighs 1/(P·G)
    assert [s.weight for s in credit.sequences] == [0.25] * 7
    assert credit.metrics["correction_success"] == pytest.approx(2 / 3)
    assert credit.metrics["rewrite_rate"] == pytest.approx(1 / 3)
    assert credit.metrics["reference_copy_rate"] == pytest.approx(2 / 3)
    assert credit.metrics["noop_rate"] == 0
    assert credit.metrics["bonus_rate"] == pytest.approx(1 / 3)
    assert credit.metrics["correction_distance"] == pytest.approx((0.25 + 0.25 + 1) / 3)
    # of four tokens y1 and y2 keep three each, y3 none
    assert credit.metrics["unmodified_share"] == pytest.approx((0.75 + 0.75 + 0) / 3)
    assert credit.metrics["tokens_responses"] == 20
    assert credit.metrics["tokens_corrections"] == 15


def test_what_theorem_a2_speaks_of_is_measured_by_hand():
    """r = 1 0 0 0, φ = 0 .5 0 0, r' = 1 .3 0 0."""
    near, far = [10, 11, 12, 14], [10, 11, 15, 15]
    loop = Loop(lambda x: fix_last(x) if candidates(x)[0] == near else far)
    metrics = loop.credit([group(RIGHT, near, far, far)], algorithm()).metrics
    assert metrics["cov_reward_phi"] == pytest.approx(-1 / 4 * 0.5 / 4)
    assert metrics["var_phi"] == pytest.approx(0.25 / 4 - 0.125**2)
    assert metrics["lambda_max"] == pytest.approx(2 * 0.03125 / 0.046875)
    assert metrics["var_advantage_unshaped"] == pytest.approx(0.1875)
    assert metrics["var_advantage"] == pytest.approx(0.166875)
    assert metrics["shaped_reward"] == pytest.approx(0.325)
    assert metrics["noop_rate"] == pytest.approx(2 / 3)


def test_weights_count_every_response_of_the_step():
    groups = [group(RIGHT, [14], index=0), group([14], [15], index=1)]
    credit = Loop(fix_last).credit(groups, algorithm(ibpo_correction_weight=0.5))
    assert {(s.kind, s.weight) for s in credit.sequences} == {("response", 1 / 4), ("correction", 1 / 8)}
    assert Counter((s.group, s.kind) for s in credit.sequences) == {
        (0, "response"): 2,
        (0, "correction"): 1,
        (1, "response"): 2,
        (1, "correction"): 2,
    }


def test_a_sequence_takes_along_how_it_was_sampled():
    (sequence, *_) = Loop(fix_last).credit([group(RIGHT, [14])], algorithm()).sequences
    assert ids_of(sequence.prompt_token_ids) == (1, 5, 27)
    assert ids_of(sequence.response_token_ids) == (*RIGHT, EOS)
    assert ids_of(sequence.rollout_logprobs) == (-0.5,) * 5
    assert ids_of(sequence.loss_mask) == (True,) * 5
    assert sequence.temperature == 1.0
    assert sequence.token_weights is None


# ------------------------------------------------------------------------------------------ advantages


def test_a_group_of_equal_shaped_rewards_is_counted_and_gives_no_gradient():
    """All eight wrong, all eight corrected: r' is .3 everywhere."""
    credit = Loop(fix_last).credit([group(*[[10, 11, 12, 14]] * 8)], algorithm())
    assert [s.advantage for s in credit.sequences] == [0.0] * 16
    assert credit.metrics["shaped_reward"] == pytest.approx(0.3)
    assert credit.metrics["degenerate_groups"] == 1
    assert credit.metrics["degenerate_correction_groups"] == 1
    assert credit.metrics["var_advantage"] == pytest.approx(0, abs=1e-30)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16))
def test_advantages_have_mean_zero_and_keep_the_order(rewards):
    advantages = group_z_score(rewards)
    assert math.fsum(advantages) == pytest.approx(0, abs=1e-5)
    for r, a in zip(rewards, advantages, strict=True):
        for s, b in zip(rewards, advantages, strict=True):
            assert (r > s) <= (a >= b)


@given(st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0]), min_size=2, max_size=12), st.randoms())
def test_advantages_do_not_depend_on_the_order_of_the_group(rewards, rng):
    order = list(range(len(rewards)))
    rng.shuffle(order)
    advantages = group_z_score(rewards)
    assert group_z_score([rewards[i] for i in order]) == [advantages[i] for i in order]


# ---------------------------------------------------------------------------------------- equivalences


def test_no_shaping_and_no_joint_training_is_gspo_bit_for_bit():
    off = Loop(fix_last).credit(some_groups(), algorithm(ibpo_lambda=0.0, ibpo_joint=False))
    gspo = Loop(fix_last).credit(some_groups(), algorithm(**GSPO))
    assert plain(off.sequences) == plain(gspo.sequences)
    assert off.metrics["corrections"] > 0
    assert "corrections" not in gspo.metrics


def test_a_group_without_a_wrong_response_asks_for_nothing_and_gives_no_gradient():
    loop = Loop(fix_last)
    credit = loop.credit([group(RIGHT, [13], [12, 13])], algorithm())
    assert loop.requests == []
    assert [s.advantage for s in credit.sequences] == [0.0] * 3
    assert credit.metrics["groups_all_correct"] == 1
    assert "correction_success" not in credit.metrics


@pytest.mark.parametrize("threshold", [0.6, "adaptive"])
def test_the_order_of_the_groups_does_not_matter(threshold):
    config = algorithm(ibpo_corrections=2, ibpo_k=3, ibpo_rewrite_threshold=threshold)
    straight = Loop(fix_last).credit(some_groups(), config)
    shuffled = list(enumerate(some_groups()))
    random.Random(1).shuffle(shuffled)
    other = Loop(fix_last).credit([g for _, g in shuffled], config)
    for place, (original, _) in enumerate(shuffled):
        ours = [plain(s) | {"group": 0} for s in straight.sequences if s.group == original]
        theirs = [plain(s) | {"group": 0} for s in other.sequences if s.group == place]
        assert ours == theirs
    assert straight.metrics == other.metrics


def test_the_draws_depend_on_seed_and_step():
    def prompts(seed, step):
        loop = Loop(fix_last)
        loop.credit(some_groups(), algorithm(), seed=seed, step=step)
        return loop.asked, [r.seed for r in loop.requests]

    assert prompts(0, 0) == prompts(0, 0)
    for seed, step in ((1, 0), (0, 1)):
        shown, seeds = prompts(seed, step)
        assert shown != prompts(0, 0)[0]
        assert not set(seeds) & set(prompts(0, 0)[1])


def test_corrections_are_sampled_like_responses():
    loop = Loop(fix_last)
    rollout = RolloutConfig(
        rollout_max_response_len=7, rollout_temperature=0.7, rollout_top_p=0.8, rollout_top_k=20
    )
    loop.credit([group(RIGHT, [14])], algorithm(), rollout=rollout)
    (request,) = loop.requests
    assert (request.max_tokens, request.temperature, request.top_p, request.top_k) == (7, 0.7, 0.8, 20)


# --------------------------------------------------------------------------------------------- pairing


@given(
    st.lists(st.sampled_from(["right", "wrong", "error"]), max_size=8),
    st.integers(0, 8),
    st.integers(0, 6),
    st.integers(0, 2**32),
)
def test_references_are_others_and_right_where_any_is(others, place, count, seed):
    kinds = [*others[:place], "wrong", *others[place:]]
    target = min(place, len(others))
    reward = {"right": 1.0, "wrong": 0.0, "error": None}
    responses = [response([10 + i], reward[kind]) for i, kind in enumerate(kinds)]
    drawn = draw_references(target, responses, count, random.Random(seed))
    right = [i for i, kind in enumerate(kinds) if kind == "right"]
    wrong = [i for i, kind in enumerate(kinds) if kind == "wrong" and i != target]
    pool = right or wrong
    assert set(drawn) <= set(pool)
    assert len(drawn) == (count if pool else 0)
    times = Counter(drawn)
    if len(pool) >= count:
        assert len(times) == count
    else:
        assert all(times[i] in (count // max(1, len(pool)), -(-count // max(1, len(pool)))) for i in pool)


def test_references_are_drawn_uniformly():
    responses = scored([14], [13], [14], [13], [13])
    drawn = Counter(draw_references(0, responses, 1, random.Random(i))[0] for i in range(3000))
    assert set(drawn) == {1, 3, 4}
    assert all(900 < count < 1100 for count in drawn.values())


def test_a_lone_response_is_corrected_without_a_reference():
    loop = Loop(fix_last)
    (only,) = [group([10, 14])]
    loop.credit([only], algorithm())
    assert loop.asked == [(1, 5, 90, 10, 14, 27)]
    assert only.corrections[0].references == ()
    assert only.corrections[0].reference_distance is None


def test_k_says_how_many_candidates_are_shown():
    for k in (1, 2, 3, 4):
        loop = Loop(fix_last)
        loop.credit([group([10, 14], [13], [12, 13])], algorithm(ibpo_k=k))
        assert len(candidates(loop.asked[0])) == k


def test_a_pair_that_does_not_fit_the_context_is_skipped_and_counted():
    """x̃ has 3 + 1 + |y| + 1 + 4 tokens, and 8 are kept for the correction: 17 + |y| must be within 20."""
    groups = [group(RIGHT, [10, 11, 14], [10, 11, 12, 14])]
    loop = Loop(fix_last)
    credit = loop.credit(groups, algorithm(), max_context=20)
    assert [c.target for c in groups[0].corrections] == [1]
    assert groups[0].skipped_pairs == 1
    assert credit.metrics["skipped_pairs"] == 1
    assert len(loop.requests) == 1


# ---------------------------------------------------------------------------------------- rewrite test


def corrected_group(y, y_hat, *references):
    made = group(y, *references)
    made.corrections = [correction(0, response(y_hat, 1.0), tuple(range(1, 1 + len(references))))]
    return made


@pytest.mark.parametrize(
    ("y", "y_hat", "references", "threshold", "rewritten"),
    [
        # d(y, ŷ) = 3/5 does not exceed α = .6
        ([1, 2, 3, 4, 5], [1, 2, 8, 8, 8], [[9] * 5], 0.6, False),
        # 4/5 does, but ŷ is just as far from the reference
        ([1, 2, 3, 4, 5], [1, 8, 8, 8, 8], [[9, 9, 9, 9, 8]], 0.6, False),
        # 4/5, and 3/5 from the reference
        ([1, 2, 3, 4, 5], [1, 8, 8, 8, 8], [[9, 9, 9, 8, 8]], 0.6, True),
        # the nearest of two references counts
        ([1, 2, 3, 4, 5], [1, 8, 8, 8, 8], [[9] * 5, [9, 9, 9, 8, 8]], 0.6, True),
        # without a reference α alone decides
        ([1, 2, 3, 4, 5], [1, 8, 8, 8, 8], [], 0.6, True),
        # a distance never exceeds 1
        ([1, 2, 3, 4, 5], [8, 8, 8, 8, 8], [[8] * 5], 1.0, False),
    ],
)
def test_what_counts_as_a_rewrite(y, y_hat, references, threshold, rewritten):
    made = corrected_group(y, y_hat, *references)
    assert marked([made], threshold) == threshold
    assert made.corrections[0].rewritten is rewritten


def test_a_filter_that_cannot_fire_is_shown():
    metrics = Loop(fix_last).credit([group([14])], algorithm(ibpo_rewrite_threshold=1.0)).metrics
    assert (metrics["rewrite_threshold"], metrics["rewrite_filter_off"]) == (1.0, 1.0)


def test_the_adaptive_threshold_is_mean_and_two_population_deviations_over_the_step():
    """d = 0 five times and 1 once: mean 1/6, std √5/6, α = 1/6 + √5/3 = .912."""
    groups = [corrected_group([7, 7], [7, 7], [9, 9]) for _ in range(5)]
    groups.append(corrected_group([7, 7], [9, 9], [9, 9]))
    assert marked(groups, "adaptive") == pytest.approx(1 / 6 + 5**0.5 / 3)
    assert [g.corrections[0].rewritten for g in groups] == [False] * 5 + [True]


def test_ends_of_sequence_are_no_edits():
    cut_off = Group(prompt(), [response([7, 8], 0.0, finish_reason="length")])
    cut_off.corrections = [correction(0, response([7, 8], 1.0))]
    marked([cut_off], 0.6)
    assert cut_off.corrections[0].distance == 0


@pytest.mark.parametrize(
    ("y", "y_hat", "distance", "share"),
    [
        ([], [], 0.0, 0.0),
        ([1], [], 1.0, 0.0),
        ([1, 2, 3], [1, 3], 1 / 3, 2 / 3),
        ([1, 2], [2, 1], 1.0, 0.5),  # two replaced, or one left out and one put in: the latter keeps more
    ],
)
def test_what_the_edit_distance_tells_of_a_correction(y, y_hat, distance, share):
    made = Group(prompt(), [response(y, 0.0), response(y, 0.0)])
    made.corrections = [correction(0, response(y_hat, 1.0), (1,))]
    marked([made], 0.6)
    (found,) = made.corrections
    assert (found.distance, found.reference_distance) == (distance, distance)
    assert found.unmodified_share == share


# --------------------------------------------------------------------------------------------- shaping


def test_with_several_corrections_the_bonus_is_their_mean():
    made = group([14])
    outcomes = [(1.0, False), (1.0, True), (0.0, False), (None, False)]
    for reward, rewritten in outcomes:
        made.corrections.append(correction(0, response([13], reward), rewritten=rewritten))
    # right, rewritten, wrong; the fourth was not scored and does not count
    assert correction_bonus(made, 0.6) == [pytest.approx(0.2)]


def test_a_bonus_never_makes_a_wrong_response_worth_a_right_one():
    """Graded rewards: .8 + .3 would pass the threshold of 1, .2 + .3 does not."""
    graded = Group(prompt(), [response([10, 14], 0.8), response([11, 14], 0.2), response([13], 1.0)])
    credit = Loop(fix_last).credit([graded], algorithm())
    assert credit.metrics["bonuses_withheld"] == 1
    assert credit.metrics["shaped_reward"] == pytest.approx((0.8 + 0.5 + 1) / 3)


class Says(Operator):
    """An operator that generates nothing and says what it is told to say, or does."""

    def __init__(self, phi, ibpo_lambda=0.6):
        self.phi, self.ibpo_lambda = phi, ibpo_lambda

    def judge(self, groups, context):
        return Judgement(self.phi(groups) if callable(self.phi) else self.phi)


@pytest.mark.parametrize("phi", [[0.0, 1.5], [0.5, 0.0], [0.0, -0.1], [0.0, math.nan]])
def test_an_operator_must_keep_to_its_range(phi):
    with pytest.raises(ValueError, match="φ lies in"):
        Loop(fix_last).credit([group([13], [14])], algorithm(), operator=Says([phi]))


def test_another_operator_needs_nothing_but_the_groups():
    """Share of tokens that a wrong response has in common with the right ones of its group."""

    def common(groups):
        phi = []
        for g in groups:
            right = {token for r in g.responses if r.correct for token in r.content_ids.tolist()}
            shares = [len(right & set(r.content_ids.tolist())) / len(r.content_ids) for r in g.responses]
            phi.append([0.0 if r.correct else s for r, s in zip(g.responses, shares, strict=True)])
        return phi

    loop = Loop(fix_last)
    credit = loop.credit(
        [group(RIGHT, [10, 11, 12, 14], [14, 14])], algorithm(), operator=Says(common, ibpo_lambda=0.4)
    )
    assert loop.requests == []
    assert [s.advantage for s in credit.sequences] == group_z_score([1.0, 0.4 * 0.75, 0.0])


# -------------------------------------------------------------------------------------- verifier errors


def test_responses_the_verifier_failed_on_leave_the_group():
    """Rewards 1 0 - : mean and std are over the two that are known; the third is no reference either."""
    failed = Group(prompt(), [*scored([13], [14]), response([15], None)])
    loop = Loop(fix_last)
    credit = loop.credit([failed], algorithm(ibpo_lambda=0.0))
    responses = by_kind(credit, "response")
    assert [ids_of(s.response_token_ids) for s in responses] == [(13, EOS), (14, EOS)]
    assert [s.index for s in responses] == [0, 1]
    assert [s.advantage for s in responses] == pytest.approx([1.0, -1.0], abs=1e-7)
    assert [s.weight for s in responses] == [1 / 3] * 2
    assert candidates(loop.asked[0]) == [[14], [13]]
    assert len(loop.requests) == 1
    assert credit.metrics["reward_errors"] == 1
    assert credit.metrics["reward"] == 0.5


def test_what_a_verifier_says_besides_is_averaged_over_the_responses_that_have_it():
    answers = [response([13], 1.0), response([14], 0.0), response([14], 0.0)]
    details = [{"tests_passed": 1.0}, {"tests_passed": 0.5}, {"response_error": 1.0}]
    for answer, said in zip(answers, details, strict=True):
        answer.reward_details = said
    credit = Loop(fix_last).credit([Group(prompt(), answers)], algorithm())
    assert credit.metrics["reward/tests_passed"] == 0.75
    assert credit.metrics["response_errors"] == 1
    assert "reward/response_error" not in credit.metrics


def test_corrections_the_verifier_failed_on_earn_nothing_and_are_not_trained_on():
    loop = Loop(fix_last, rewards=lambda answer: None)
    credit = loop.credit([group([13], [14])], algorithm())
    assert by_kind(credit, "correction") == []
    assert credit.metrics["correction_reward_errors"] == 1
    assert credit.metrics["bonus_rate"] == 0
    assert "correction_success" not in credit.metrics


def test_a_step_in_which_everything_failed_trains_on_nothing():
    credit = Loop(fix_last).credit([Group(prompt(), [response([13], None)] * 2)], algorithm())
    assert credit.sequences == []
    assert credit.metrics["reward_errors"] == 2
    assert "reward" not in credit.metrics


# ------------------------------------------------------------------------------------- the check at start


@pytest.mark.parametrize(
    ("settings", "threshold", "says"),
    [
        ({"ibpo_lambda": 2.0, "ibpo_beta": 0.5}, 1.0, "λΔ must stay below 1"),
        ({"ibpo_lambda": 0.6, "ibpo_beta": 0.5}, 0.3, "--reward-threshold 0.3"),
        ({"ibpo_lambda": -0.1}, 1.0, "--ibpo-lambda: must be .*, is -0.1"),
        ({"ibpo_lambda": math.nan}, 1.0, "--ibpo-lambda: must be .*, is nan"),
        ({"ibpo_beta": 1.1}, 1.0, "--ibpo-beta: must be .*, is 1.1"),
        ({"ibpo_k": 0}, 1.0, "--ibpo-k: must be .*, is 0"),
        ({"ibpo_corrections": -1}, 1.0, "--ibpo-corrections: must be .*, is -1"),
        ({"ibpo_rewrite_threshold": -0.1}, 1.0, "--ibpo-rewrite-threshold: must be .*, is -0.1"),
        ({"ibpo_correction_weight": -1.0}, 1.0, "--ibpo-correction-weight: must be .*, is -1"),
        ({"advantage_estimator": "gsop"}, 1.0, "did you mean 'gspo'"),
    ],
)
def test_settings_that_break_the_algorithm_are_refused(settings, threshold, says):
    with pytest.raises(ValueError, match=says):
        check_algorithm(algorithm(**settings), threshold)


def test_all_problems_are_named_at_once():
    with pytest.raises(ValueError, match=r"(?s)--ibpo-k: .*is 0.*--ibpo-corrections: .*is -1"):
        check_algorithm(algorithm(ibpo_k=0, ibpo_corrections=-1))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_passes_the_check(preset):
    check_algorithm(algorithm(preset))
