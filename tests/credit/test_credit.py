"""Algorithm 1 by hand, its traps, what must not matter, one's own operators and estimators, and carriers."""

import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizer import make_tiny_tokenizer

from megatron_ibpo.basics.records import Correction, Group, Prompt, token_ids
from megatron_ibpo.basics.sampling_mask import sampling_mask
from megatron_ibpo.config import PRESETS, Config, RolloutConfig
from megatron_ibpo.config.algorithm import AlgorithmConfig
from megatron_ibpo.credit import (
    Judgement,
    Operator,
    assign_credit,
    fill_batch,
    find_estimator,
    find_operator,
    is_informative,
    leaves_gradient,
)
from megatron_ibpo.credit.estimators import group_z_score, maxrl, needs_critic
from megatron_ibpo.credit.metrics import response_metrics, sampled_metrics
from megatron_ibpo.credit.pairing import draw_references
from megatron_ibpo.credit.registries import ESTIMATORS
from megatron_ibpo.credit.train_sequences import plain_prompt_sequences, train_sequences
from megatron_ibpo.credit.value_credit import Critic
from megatron_ibpo.data import DataError, PromptSuffixes
from megatron_ibpo.data.tokenizer import HuggingFaceTokenizer
from megatron_ibpo.run.settings import check_loss_of_run, check_run, parse_config
from megatron_ibpo.sampling.requests import group_requests
from support.samples import sample_of

from support.credit_cases import (  # isort: skip
    EOS, RIGHT, TURN_GROUPS, Loop, algorithm, by_kind, candidates, check_algorithm, context, correct_groups,
    correction, fix_last, group, ids_of, in_turn, plain, prompt, response, scored, some_groups,
)  # fmt: skip


def test_algorithm_1_by_hand():
    """One prompt, G=4, rewards 1 0 0 0. Corrections: of y1 right and near, of y2 wrong, of y3 right but
    a rewrite. λ=.6, β=.5, so φ = 0 .5 0 0 and r' = 1 .3 0 0."""
    y1, y2, y3 = [10, 11, 12, 14], [10, 11, 15, 15], [20, 21, 22, 23]
    corrected = {14: [10, 11, 12, 13], 15: [10, 11, 15, 16], 23: RIGHT}
    loop = Loop(lambda x: corrected[candidates(x)[0][-1]])
    credit = loop.credit([group(RIGHT, y1, y2, y3)], algorithm())

    # x̃ shows the wrong response first, then the only right one, both without their ends
    assert loop.asked == [(1, 5, 90, *y, 90, *RIGHT, 27) for y in (y1, y2, y3)]
    # mean .325; variance (.455625 + .000625 + 2·.105625) / 4 = .166875
    std = math.sqrt(0.166875)
    responses, corrections = by_kind(credit, "response"), by_kind(credit, "correction")
    assert [s.advantage * std for s in responses] == pytest.approx([0.675, -0.025, -0.325, -0.325], abs=4e-8)
    # corrections have the plain rewards 1 0 1: mean 2/3, std √2/3
    assert [s.advantage for s in corrections] == pytest.approx([2**-0.5, -(2**0.5), 2**-0.5], abs=1e-7)
    assert [ids_of(s.prompt_token_ids) for s in corrections] == loop.asked
    assert ids_of(corrections[1].response_token_ids) == (10, 11, 15, 16, EOS)
    assert [(s.prompt_index, s.group, s.index) for s in corrections] == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]
    # the rewards that advantages were made of: shaped ones of responses, plain ones of corrections
    assert [s.reward for s in credit.sequences] == [1, 0.3, 0, 0, 1, 0, 1]
    assert [s.weight for s in credit.sequences] == [0.25] * 7, "every sequence weighs 1/(P·G)"

    first = responses[0]  # takes along how it was sampled
    assert ids_of(first.prompt_token_ids) == (1, 5, 27)
    assert ids_of(first.response_token_ids) == (*RIGHT, EOS)
    assert ids_of(first.rollout_logprobs) == (-0.5,) * 5
    assert ids_of(first.loss_mask) == (True,) * 5
    assert (first.temperature, first.token_weights) == (1.0, None)

    expected = {
        "correction_success": 2 / 3, "rewrite_rate": 1 / 3, "reference_copy_rate": 2 / 3, "noop_rate": 0,
        "bonus_rate": 1 / 3, "correction_distance": (0.25 + 0.25 + 1) / 3,
        "unmodified_share": (0.75 + 0.75 + 0) / 3,  # of four tokens y1 and y2 keep three each, y3 none
        "tokens_responses": 20, "tokens_corrections": 15,
        # what theorem A.2 speaks of
        "cov_reward_phi": -1 / 4 * 0.5 / 4, "var_phi": 0.25 / 4 - 0.125**2, "shaped_reward": 0.325,
        "lambda_max": 2 * 0.03125 / 0.046875, "var_advantage_unshaped": 0.1875, "var_advantage": 0.166875,
    }  # fmt: skip
    assert {name: credit.metrics[name] for name in expected} == pytest.approx(expected)


def test_weights_count_every_response_of_the_step():
    groups = [group(RIGHT, [14], index=0), group([14], [15], index=1)]
    credit = Loop(fix_last).credit(groups, algorithm(ibpo_correction_weight=0.5))
    assert Counter((s.group, s.kind, s.weight) for s in credit.sequences) == {
        (0, "response", 1 / 4): 2, (0, "correction", 1 / 8): 1,
        (1, "response", 1 / 4): 2, (1, "correction", 1 / 8): 2,
    }  # fmt: skip


def test_training_only_on_successful_corrections_keeps_their_advantages():
    """Corrections get 1 0 0: the right one has (1 - 1/3) / (√2/3) = √2, whether the others are trained on or
    not, and the reader is told why they are not."""

    def credited(which):
        wrong = [20, 16], [21, 16], [22, 16]
        return Loop(in_turn([20, 13], [21], [22])).credit(
            [group(RIGHT, *wrong)], algorithm(ibpo_joint_on=which)
        )

    everything, successful = credited("all"), credited("successful")
    assert [s.advantage for s in by_kind(everything, "correction")] == pytest.approx(
        [2**0.5, *2 * [-(0.5**0.5)]]
    )
    assert plain(by_kind(successful, "correction")) == plain(by_kind(everything, "correction"))[:1]
    assert plain(by_kind(successful, "response")) == plain(by_kind(everything, "response"))
    assert str(successful.explanations[0]).count("only corrections that are right and no rewrite are") == 2


def test_switching_one_part_off_leaves_the_rest_bit_for_bit():
    """Without shaping and joint training IBPO is GSPO, and either alone changes nothing of the other."""

    def credited(name="ibpo", **switches):
        return Loop(fix_last).credit(some_groups(), algorithm(name, **switches))

    ibpo, gspo, off = credited(), credited("gspo"), credited(ibpo_lambda=0.0, ibpo_joint=False)
    shaping, joint = credited("ibpo-shaping-only"), credited("ibpo-joint-only")
    assert plain(off.sequences) == plain(gspo.sequences)
    assert plain(shaping.sequences) == plain(by_kind(ibpo, "response"))
    assert plain(by_kind(joint, "response")) == plain(gspo.sequences)
    assert plain(by_kind(joint, "correction")) == plain(by_kind(ibpo, "correction"))
    assert min(off.metrics["corrections"], shaping.metrics["corrections"]) > 0
    assert "corrections" not in gspo.metrics
    # as the gradient meter does: corrections hang on the groups and play no part
    groups = some_groups()
    Loop(fix_last).credit(groups, algorithm())
    assert any(made.corrections for made in groups)
    again = assign_credit(groups, context(algorithm("gspo")))
    assert (plain(again.sequences), again.metrics) == (plain(gspo.sequences), gspo.metrics)


def test_a_group_without_wrong_responses_gives_no_request_or_gradient():
    loop, made = Loop(fix_last), group(RIGHT, [13], [12, 13])
    made.corrections = [correction(0, response([13], 1.0))]  # of a recording; it gives way
    credit = loop.credit([made], algorithm())
    assert loop.requests == made.corrections == []
    assert [s.advantage for s in credit.sequences] == [0.0] * 3
    assert [credit.metrics[name] for name in ("groups_all_correct", "degenerate_groups")] == [1, 1]
    assert (credit.metrics["corrections"], "correction_success" in credit.metrics) == (0, False)


WITHOUT_MODELS = [(name, {}) for name in PRESETS if name not in ("ppo", "ciw", "ciw-inverted")]
MORE = {"ibpo_corrections": 2, "ibpo_k": 3, "ibpo_rewrite_threshold": "adaptive"}


@pytest.mark.parametrize(("name", "more"), [*WITHOUT_MODELS, ("ibpo", MORE)])
@given(seed=st.integers(0, 2**16), order=st.randoms(use_true_random=False))
@settings(max_examples=5, deadline=None)
def test_who_arrives_first_changes_no_credit(name, more, seed, order):
    """Groups are followed up and judged in any order, and their corrections come back in any."""
    config = context(algorithm(name, **more))
    operator = find_operator(config.algorithm)
    at_once = Loop(fix_last).credit(some_groups(seed), config.algorithm)

    arriving, loop = list(enumerate(some_groups(seed))), Loop(fix_last)
    order.shuffle(arriving)
    for _, made in arriving:
        asked = operator.follow_ups(made, config)
        places = list(range(len(asked)))
        order.shuffle(places)
        answers = dict(zip(places, loop.sample([asked[i].request for i in places]), strict=True))
        samples = [answers[i] for i in range(len(asked))]
        loop.score([(made.prompt, sample) for sample in samples])
        operator.attach(made, asked, samples)
    streamed = assign_credit([made for _, made in arriving], config)
    for place, (original, _) in enumerate(arriving):
        expected = [plain(s) | {"group": place} for s in at_once.sequences if s.group == original]
        assert [plain(s) for s in streamed.sequences if s.group == place] == expected
    assert streamed.metrics == pytest.approx(at_once.metrics, rel=1e-14)  # sums in another order
    in_order = assign_credit([made for _, made in sorted(arriving, key=lambda own: own[0])], config)
    assert in_order.metrics == at_once.metrics


def test_correction_requests_depend_on_seed_step_and_group_alone():
    def asked(groups, **draws):
        loop = Loop(fix_last)
        loop.credit(groups, algorithm(ibpo_corrections=3, ibpo_k=3), **draws)
        return loop.asked, [request.seed for request in loop.requests]

    prompts, seeds = asked(some_groups())
    apart = [asked([made]) for made in some_groups()]
    assert prompts == [one for own, _ in apart for one in own]
    assert seeds == [one for _, own in apart for one in own]
    assert len(set(seeds)) == len(seeds) > 30
    for draws in ({"seed": 1}, {"step": 1}):
        others, other_seeds = asked(some_groups(), **draws)
        assert others != prompts, draws
        assert not set(other_seeds) & set(seeds), draws


def test_corrections_stand_in_the_order_in_which_they_were_asked():
    made = group(RIGHT, [10, 14], [11, 14])
    Loop(in_turn([20], [21], [22], [23])).credit([made], algorithm(ibpo_corrections=2))
    found = [(c.target, c.response.token_ids[0], c.response.index) for c in made.corrections]
    assert found == [(1, 20, 0), (1, 21, 1), (2, 22, 2), (2, 23, 3)]


kinds = st.lists(st.sampled_from(["right", "wrong", "error"]), max_size=8)


@given(kinds, kinds, st.integers(0, 6), st.integers(0, 2**32))
def test_references_are_others_and_right_where_any_is(before, after, count, seed):
    reward = {"right": 1.0, "wrong": 0.0, "error": None}
    target, drawn_from = len(before), [*before, "wrong", *after]
    responses = [response([10 + i], reward[kind]) for i, kind in enumerate(drawn_from)]
    drawn = draw_references(target, responses, count, random.Random(seed))
    right = [i for i, kind in enumerate(drawn_from) if kind == "right"]
    pool = right or [i for i, kind in enumerate(drawn_from) if kind == "wrong" and i != target]
    assert set(drawn) <= set(pool)
    assert len(drawn) == (count if pool else 0)
    times = [drawn.count(i) for i in pool]
    assert max(times, default=0) - min(times, default=0) <= 1


def test_references_are_drawn_uniformly():
    responses = scored([14], [13], [14], [13], [13])
    drawn = Counter(draw_references(0, responses, 1, random.Random(i))[0] for i in range(3000))
    assert set(drawn) == {1, 3, 4}
    assert all(900 < count < 1100 for count in drawn.values())


def test_responses_that_were_cut_off_are_counted():
    made = group(RIGHT, [10, 11, 14], [10, 11, 12, 14])
    for response_ in made.responses[:2]:
        response_.finish_reason = "length"
    assert response_metrics([made, group(RIGHT)])["truncated_responses"] == 2


def test_a_pair_beyond_the_context_is_skipped_and_counted_once():
    """x̃ has 3 + 1 + |y| + 1 + 4 tokens, and 8 are kept for the correction: 17 + |y| must be within 20."""
    made, loop = group(RIGHT, [10, 11, 14], [10, 11, 12, 14]), Loop(fix_last)
    credit = loop.credit([made], algorithm(), max_context=20)
    assert [c.target for c in made.corrections] == [1]
    assert len(loop.requests) == made.skipped_pairs == credit.metrics["skipped_pairs"] == 1
    again = context(algorithm(), max_context=20)
    find_operator(again.algorithm).follow_ups(made, again)
    assert made.skipped_pairs == 1


def test_a_lone_response_is_corrected_without_a_reference():
    """A distance never exceeds 1, and one alone is its own adaptive threshold."""
    for threshold in (1.0, "adaptive"):
        config = algorithm(ibpo_rewrite_threshold=threshold)
        metrics = Loop(lambda x: [13, 13]).credit([group([14])], config).metrics
        assert metrics["rewrite_threshold"] == pytest.approx(1.0), threshold
        assert (metrics["rewrite_rate"], metrics["rewrite_filter_off"]) == (0, 1), threshold
    loop, only = Loop(lambda x: candidates(x)[0]), group([14])
    metrics = loop.credit([only], algorithm()).metrics
    assert (metrics["noop_rate"], metrics["rewrite_filter_off"]) == (1, 0)
    assert loop.asked == [(1, 5, 90, 14, 27)]
    assert (only.corrections[0].references, only.corrections[0].reference_distance) == ((), None)


def test_a_bonus_never_lifts_wrong_responses_to_right_ones():
    """Graded rewards: .8 + .3 would pass the threshold of 1, .2 + .3 does not."""
    graded = Group(prompt(), [response([10, 14], 0.8), response([11, 14], 0.2), response([13], 1.0)])
    credit = Loop(fix_last).credit([graded], algorithm())
    assert credit.metrics["bonuses_withheld"] == 1
    assert credit.metrics["shaped_reward"] == pytest.approx((0.8 + 0.5 + 1) / 3)


class Halves(Operator):
    def judge(self, groups, context):
        return Judgement([[0.0, 0.5]])


def test_invalid_operators_and_phi_out_of_range_are_refused(monkeypatch):
    """tests/house/test_extending.py has operators and estimators of one's own that work."""
    for name in ("Operator", "EOS"):  # without a judge, and a number
        with pytest.raises(ValueError, match=f"--ibpo-operator {__name__}:{name}: must be a subclass of .*"):
            find_operator(algorithm(ibpo_operator=f"{__name__}:{name}"))
    own = algorithm(ibpo_operator=f"{__name__}:Halves")
    assert [s.reward for s in Loop(fix_last).credit([group([13], [14])], own).sequences] == [1.0, 0.3]
    for phi in ([0.0, 1.5], [0.5, 0.0], [0.0, -0.1], [0.0, math.nan]):
        monkeypatch.setattr(Halves, "judge", lambda *_, phi=phi: Judgement([phi]))
        with pytest.raises(ValueError, match="φ lies in"):
            Loop(fix_last).credit([group([13], [14])], own)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("group", [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),  # mean 1/4, population variance 3/16
        ("group-bessel", [1.5, -0.5, -0.5, -0.5]),  # the variance is 3/16 · 4/3
        ("group-mean", [0.75, -0.25, -0.25, -0.25]),
        ("maxrl", [3.0, -1.0, -1.0, -1.0]),
        ("leave-one-out", [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_estimators_by_hand(name, expected):
    estimator = find_estimator(algorithm(advantages=name))
    assert estimator([1.0, 0.0, 0.0, 0.0]) == pytest.approx(expected, abs=1e-7)
    if name == "maxrl":
        assert maxrl([1.0, 1.0, 1.0, 0.0]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1])
        credit = Loop(fix_last).credit([group(RIGHT, [14])], algorithm("gspo", advantages=name))
        assert [s.advantage for s in credit.sequences] == [1.0, -1.0]


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "critic"])
@given(st.sampled_from([0.0, 0.1, 0.3, 1.0]), st.integers(1, 12))
@example(0.1, 3)  # whose sum over 3 is not .1
@example(0.3, 8)  # in float32 their std is about 3e-8, and advantages are of order 1
def test_equal_rewards_have_no_advantage(name, reward, count):
    assert find_estimator(algorithm(advantages=name))([reward] * count) == [0.0] * count


class WithoutValues:
    needs_critic = True


class ByBatch:
    def of_batch(self, batch):
        raise NotImplementedError


def test_invalid_estimators_and_advantages_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"--advantages maxrl takes the log of .*, and a reward is -1"):
        maxrl([1.0, -1.0])
    with pytest.raises(ValueError, match=r"needs_critic = True and a method of_values.*only one of them"):
        find_estimator(algorithm(advantages=f"{__name__}:WithoutValues"))
    with pytest.raises(ValueError, match=r"--advantages .*is of type int, but must be callable"):
        find_estimator(algorithm(advantages=f"{__name__}:EOS"))
    groups, own = [group(RIGHT, [14]) for _ in range(2)], algorithm("gspo", advantages=f"{__name__}:ByBatch")
    for answer, says in (
        ([[0.0, 0.0]], "advantages for 1 comparisons instead of 2"),
        ([[0.0], [0.0, 0.0]], "one finite number per reward"),
        ([[math.nan, 0.0]] * 2, "one finite number per reward"),
    ):
        monkeypatch.setattr(ByBatch, "of_batch", lambda *_, found=answer: found)
        with pytest.raises(ValueError, match=says):
            Loop(fix_last).credit(groups, own)


def test_turns_are_compared_with_those_from_the_same_state():
    """Episodes of rewards 1 0 1 are .71 -1.41 .71. First turns return .5 0 1, since two have a turn after
    them: 0 -1.22 1.22. The second turns of the first two read the same: 1 -1. A failed one is in none."""
    turns = [True, False, True]
    episodes = [
        response([10, 50, 13], 1.0, written=turns),
        response([10, 50, 14], 0.0, written=turns),
        response([10, 50, 15], None, written=turns),
        response([13], 1.0),
    ]
    own = algorithm("grpo", advantages=TURN_GROUPS, turn_discount=0.5)
    sequences = Loop(fix_last).credit([Group(prompt(), episodes)], own).sequences
    half, most = 0.5**0.5, 1.5**0.5
    expected = [
        [half, 0, half + 1, half + 1],
        [-2 * half - most, 0, -2 * half - 1, -2 * half - 1],
        [half + most, half + most],
    ]
    assert [s.index for s in sequences] == [0, 1, 3]
    for sequence, tokens in zip(sequences, expected, strict=True):
        assert sequence.token_advantages.tolist() == pytest.approx(tokens, abs=1e-7)
        assert sequence.advantage == pytest.approx(sum(tokens) / sequence.num_trained_tokens, abs=1e-7)
    alone = algorithm("grpo", advantages=TURN_GROUPS, turn_weight=0.0)
    sequences = Loop(fix_last).credit([Group(prompt(), episodes)], alone).sequences
    assert [s.advantage for s in sequences] == pytest.approx([half, -2 * half, half], abs=1e-7)


class PerToken:
    gives_token_advantages = True

    def of_batch(self, batch):
        return [[np.ones(5) for _ in own.rewards] for own in batch]


def test_advantages_of_tokens_are_refused_where_they_cannot_work(monkeypatch):
    config = Config(algorithm=algorithm("grpo", advantages=TURN_GROUPS))
    config.loss.loss_variant = "grpo"
    check_loss_of_run(config)
    config.loss.loss_variant = "gspo"
    with pytest.raises(ValueError, match="this --loss-variant takes one advantage per sequence"):
        check_loss_of_run(config)
    with pytest.raises(ValueError, match="--token-credit wrong-weight goes by one advantage per response"):
        check_algorithm(algorithm("grpo", advantages=TURN_GROUPS, token_credit="wrong-weight"))
    groups, own = [group(RIGHT, [14])], algorithm("grpo", advantages=f"{__name__}:PerToken")
    with pytest.raises(
        ValueError, match=r"shapes \[\(5,\), \(5,\)\] for responses of \[\(5,\), \(2,\)\] tokens"
    ):
        Loop(fix_last).credit(groups, own)
    monkeypatch.setattr(PerToken, "gives_token_advantages", False)
    with pytest.raises(ValueError, match="must declare gives_token_advantages = True"):
        Loop(fix_last).credit(groups, own)


def test_responses_the_verifier_failed_on_leave_the_group():
    """Rewards 1 0 - : mean and std are over the two that are known; the third is no reference either. What
    the verifier says besides is averaged over the responses that have it."""
    failed, loop = Group(prompt(), [*scored([13], [14]), response([15], None)]), Loop(fix_last)
    details = [{"tests_passed": 1.0}, {"tests_passed": 0.5}, {"response_error": 1.0}]
    for answer, said in zip(failed.responses, details, strict=True):
        answer.reward_details = said
    credit = loop.credit([failed], algorithm(ibpo_lambda=0.0))
    responses = by_kind(credit, "response")
    assert [ids_of(s.response_token_ids) for s in responses] == [(13, EOS), (14, EOS)]
    assert [(s.index, s.weight) for s in responses] == [(0, 1 / 3), (1, 1 / 3)]
    assert [s.advantage for s in responses] == pytest.approx([1.0, -1.0], abs=1e-7)
    assert [candidates(asked) for asked in loop.asked] == [[[14], [13]]]
    assert (credit.metrics["reward_errors"], credit.metrics["reward"]) == (1, 0.5)
    assert (credit.metrics["reward/tests_passed"], credit.metrics["response_errors"]) == (0.75, 1)
    nothing = Loop(fix_last).credit([Group(prompt(), [response([13], None)] * 2)], algorithm())
    assert (nothing.sequences, nothing.metrics["reward_errors"]) == ([], 2)
    assert "reward" not in nothing.metrics
    # corrections that it failed on earn nothing and are not trained on
    credit = Loop(fix_last, rewards=lambda answer: None).credit([group([13], [14])], algorithm())
    assert by_kind(credit, "correction") == []
    assert (credit.metrics["correction_reward_errors"], credit.metrics["bonus_rate"]) == (1, 0)
    assert "correction_success" not in credit.metrics


def with_tool(content, reward, finish_reason="stop"):
    """Tokens from 50 on are what a tool says: context that the policy did not write."""
    return response(content, reward, finish_reason, written=[token < 50 for token in content])


def test_tool_output_takes_no_part_in_lengths():
    """Of 2 + 5 tokens and the end the policy wrote three; limit 8, buffer 4: 3 tokens cost nothing."""
    long = [10, 50, 50, 50, 50, 50, 13]
    config = algorithm("gspo", overlong_buffer_share=0.5)
    silent = with_tool([50, 51], 0.0, "length")  # nothing of it is trained on
    made = Group(prompt(), [with_tool(long, 1.0), *scored([14]), silent])
    credit = Loop(fix_last).credit([made], config)
    assert [(s.index, s.reward) for s in credit.sequences] == [(0, 1.0), (1, 0.0)]
    assert credit.metrics["tokens_responses"] == 3 + 2
    assert credit.metrics["response_length"] == pytest.approx((3 + 2 + 0) / 3)
    first, _ = credit.sequences
    assert (first.num_trained_tokens, first.num_tokens) == (3, 3 + 8)
    all_written = Loop(fix_last).credit([group(long, [14])], config)
    assert all_written.sequences[0].reward == 0.0


def test_corrections_are_compared_by_the_tokens_that_the_policy_wrote():
    """y = 10 [50 51] 11 14, ŷ = 10 [60] 11 13: of three written tokens one is changed, d = 1/3, and the mask
    stands on the whole response. The correction prompt shows all of it."""
    wrong = with_tool([10, 50, 51, 11, 14], 0.0)
    made = Group(prompt(), [*scored(RIGHT), wrong])
    config = context(algorithm(ibpo_variant="mask"))
    operator = find_operator(config.algorithm)
    (asked,) = operator.follow_ups(made, config)
    assert asked.request.prompt_token_ids[3:8].tolist() == [10, 50, 51, 11, 14]
    operator.attach(made, [asked], [with_tool([10, 60, 11, 13], 1.0)])
    credit = assign_credit([made], config)
    (found,) = made.corrections
    assert (found.distance, found.unmodified_share) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert not found.rewritten
    weights = by_kind(credit, "response")[1].token_weights
    assert weights[wrong.loss_mask].tolist() == [0.0, 0.0, 1.0, 0.0]


def test_a_critic_is_asked_of_written_tokens_alone():
    """V = .2 [9] .4 .8, reward 1, γ = .9, λ = .5: δ = .9·.4 - .2 = .16, .9·.8 - .4 = .32 and .2; the tool's
    plays no part. One token more has δ = .5 alone."""
    with_context, short = with_tool([10, 50, 11, 13], 1.0, "length"), response([14], 0.0, "length")
    config = algorithm("ppo", gae_gamma=0.9, gae_lambda=0.5)
    critic = [np.array([0.2, 9.0, 0.4, 0.8], np.float32), np.array([-0.5], np.float32)]
    made = [Group(prompt(), [with_context, short])]
    credit = Loop(fix_last).credit(made, config, values=lambda sequences: critic)
    advantages = np.array([0.16 + 0.45 * (0.32 + 0.45 * 0.2), 0.32 + 0.45 * 0.2, 0.2, 0.5])
    first, second = credit.sequences
    assert first.returns == pytest.approx([advantages[0] + 0.2, 0.0, advantages[1] + 0.4, 1.0])
    scaled = (advantages - advantages.mean()) / advantages.std()
    assert first.token_advantages == pytest.approx([scaled[0], 0.0, *scaled[1:3]], abs=1e-6)
    assert second.token_advantages == pytest.approx(scaled[3:], abs=1e-6)
    assert first.advantage == pytest.approx(scaled[:3].mean(), abs=1e-6)
    assert credit.metrics["value_mean"] == pytest.approx((0.2 + 0.4 + 0.8 - 0.5) / 4)


def filled(*plans, wanted=3, **filters):
    """(indices of the prompts of the batch, metrics) of rounds of groups: 0 none correct, 1 all, ? some."""
    contents = {"0": ([14], [14]), "1": ([13], [13]), "?": ([14], [13])}
    numbers = iter(range(100))
    rounds = [[group(*contents[kind], index=next(numbers)) for kind in plan] for plan in plans]
    groups, metrics = fill_batch(lambda number: rounds[number], wanted, len(rounds), **filters)
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


def test_the_sampled_reward_covers_dropped_groups():
    failed = Group(prompt(), [response([13], None)])
    groups = [group([13], [13], [13]), group([14]), failed]
    assert sampled_metrics(groups) == {"responses_sampled": 5, "reward_sampled": 3 / 4}
    assert sampled_metrics([failed]) == {"responses_sampled": 1}


def test_groups_that_a_filter_refuses_are_never_in_the_batch():
    """It takes even prompts, and two of these are all wrong."""
    plans, even = ("0??",) * 3, {"usable": lambda made: made.prompt.index % 2 == 0}
    assert filled(*plans, **even)[0] == [2, 4, 8]
    found, metrics = filled(*plans, wanted=6, **even)
    assert sorted(found) == [0, 2, 4, 6, 8]
    assert (metrics["groups_missing"], metrics["groups_filled_up"]) == (1, 2)
    with pytest.raises(ValueError, match="--group-filter refused all 9 groups of 3 rounds"):
        filled(*plans, usable=lambda made: False)


def test_an_unsolved_group_has_a_gradient_if_some_corrections_succeed():
    wrong = ([20, 21], [22, 23], [24, 25])
    for name, contents, right_corrections, leaves in (
        ("ibpo", wrong, {20}, True),
        ("ibpo-shaping-only", wrong, {20}, True),  # a bonus for one of three
        ("ibpo-joint-only", wrong, {20}, True),  # one right correction of three
        ("ibpo", wrong, {20, 22, 24}, False),  # equal bonuses, equal corrections
        ("gspo", wrong, set(), False),
        ("ibpo", ([13], [10, 13]), set(), False),
        ("ppo", ([13], [14]), set(), True),
        ("ppo", wrong, set(), False),
    ):
        answers = [[10, 13] if content[0] in right_corrections else [10, 14] for content in contents]
        lenient = {"ibpo_rewrite_threshold": 1.0} if name.startswith("ibpo") else {}
        loop, made, own = Loop(in_turn(*answers)), group(*contents), context(algorithm(name, **lenient))
        operator = find_operator(own.algorithm)
        correct_groups([made], own, operator, loop.sample, loop.score)
        assert leaves_gradient(made, own, operator) is leaves, (name, contents)
        assert is_informative(made) is (contents == ([13], [14]))


LONG = [10, 11, 12, 12, 12, 12, 13]  # a right response of 8 tokens with its end: it would pay 1


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
        # 6 tokens pay .5, 8 and more pay 1; no order changes
        ("gspo", ([10, 11, 12, 12, 13], [14], [*LONG[:-1], 14]), None, [0.5, 0.0, -1.0], 0),
        ("gspo", ([10, 11, 13], [*LONG, *LONG[:-1], 14]), None, [1.0, -1.0], 0),
        ("gspo", ([13], LONG), None, [1.0, 0.0], 0),
        # 1 - 1 = 0 would lie below a wrong one that is graded, or corrected and worth .3
        ("gspo", (LONG, [14], [15]), [1.0, 0.4, 0.0], [0.4, 0.4, 0.0], 1),
        ("ibpo-shaping-only", (LONG, [10, 14]), None, [0.3, 0.3], 1),
    ],
)
def test_a_length_penalty_keeps_right_responses_above_wrong_ones(name, contents, graded, paid, limited):
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


def test_ppo_gives_every_token_its_own_advantage():
    """Rewards 1 and 0; the critic says .5 everywhere. γ = λ = 1: A = .5 on three tokens, -.5 on two; mean .1,
    variance .25 - .01. The golden credit has PPO with IBPO's bonus and corrections."""

    def judged(value, *contents):
        def critic(sequences):
            return [np.full(len(s.response_token_ids), value, np.float32) for s in sequences]

        return Loop(fix_last).credit([group(*contents)], algorithm("ppo", gae_lambda=1.0), values=critic)

    credit = judged(0.5, [12, 13], [14])
    std = math.sqrt(0.24)
    right, wrong = credit.sequences
    assert right.token_advantages == pytest.approx([0.4 / std] * 3)
    assert wrong.token_advantages == pytest.approx([-0.6 / std] * 2)
    assert np.concatenate([right.returns, wrong.returns]) == pytest.approx([1.0] * 3 + [0.0] * 2)
    assert ids_of(right.values) == (0.5,) * 3
    assert (right.advantage, right.has_advantage) == (pytest.approx(0.4 / std), True)
    assert credit.metrics["value_mean"] == 0.5
    # a critic that was right all along leaves nothing to learn
    assert [s.has_advantage for s in judged(1.0, [13], [13]).sequences] == [False, False]
    with pytest.raises(ValueError, match="--advantages critic gives every token its own"):
        check_run(parse_config(["--advantage-estimator", "ppo", "--loss-variant", "gspo"]))


class CutShort(Critic):
    def of_values(self, sequences, values):
        return [v[:-1] for v in values], values


def test_an_estimator_with_a_critic_gives_one_number_per_token():
    settings = algorithm("ppo", advantages=f"{__name__}:CutShort")
    assert (settings.trains_critic, settings.num_models) == (True, 2)
    assert (algorithm("gspo").trains_critic, algorithm("gspo").num_models) == (False, 1)
    for name, estimator in ESTIMATORS.items():
        assert AlgorithmConfig(advantages=name).trains_critic == needs_critic(estimator), "also by hand"
    with pytest.raises(ValueError, match=r"arrays of shapes \[\(1,\)\] .* \[2\] tokens .* one finite number"):
        Loop(fix_last).credit([group([14])], settings, values=lambda sequences: [np.zeros(2, np.float32)])


def requests_of(*prompts, prompt_ids=None, **settings):
    rollout = RolloutConfig(n_samples_per_prompt=4, **settings)
    return group_requests(prompts, rollout, seed=0, step=0, prompt_ids=prompt_ids)


def test_sampling_parameters_go_through_their_cycles_in_every_group():
    cycles = {"rollout_temperature_cycle": (0.7, 1.0, 1.2), "rollout_top_p_cycle": (0.9, 1.0)}
    requests, plain = (requests_of(prompt(0), prompt(1), **own) for own in (cycles, {"rollout_top_k": 5}))
    assert [r.temperature for r in requests] == [0.7, 1.0, 1.2, 0.7] * 2
    assert [r.top_p for r in requests] == [0.9, 1.0, 0.9, 1.0] * 2
    assert [r.seed for r in plain] == [r.seed for r in requests]
    assert {(r.temperature, r.top_k) for r in plain} == {(1.0, 5)}


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


def test_a_response_trains_on_its_own_prompt_and_temperature():
    cycled = response([14], 0.0, prompt=(1, 5, 6, 27), temperature=0.7)
    made, loop = Group(prompt(), [*scored(RIGHT), cycled]), Loop(fix_last)
    sampling = {"rollout_temperature": 0.9, "rollout_top_p": 0.8, "rollout_top_k": 20}
    rollout = RolloutConfig(rollout_max_response_len=7, **sampling)
    responses = by_kind(loop.credit([made], algorithm("ibpo"), rollout=rollout), "response")
    assert [ids_of(s.prompt_token_ids) for s in responses] == [(1, 5, 27), (1, 5, 6, 27)]
    assert [s.temperature for s in responses] == [1.0, 0.7]
    assert loop.asked == [(1, 5, 90, 14, 90, *RIGHT, 27)]
    (request,) = loop.requests
    assert (request.max_tokens, request.temperature, request.top_p, request.top_k) == (7, 0.9, 0.8, 20)


def test_a_sampling_mask_is_dropped_behind_another_prompt():
    mask = sampling_mask([[4], [5, 6]])
    given, behind = (sample_of(ids, [4, 5], sampling_mask=mask, reward=1.0) for ids in ([1, 2], [1, 9, 2]))
    whole = Group(Prompt(0, token_ids([1, 2]), 1, "", "", ""), [given], [Correction(0, (), behind)])
    (own,) = train_sequences(whole, 0, "response", [(given, 1.0, 1.0, None)], 1.0)
    (corrected,) = train_sequences(whole, 0, "correction", [(behind, 1.0, 1.0, None)], 1.0)
    assert own.sampling_mask is corrected.sampling_mask is mask
    (joined,) = plain_prompt_sequences(whole, 0, [1.0], [1.0], 1.0)
    assert joined.off_policy
    assert joined.sampling_mask is None
