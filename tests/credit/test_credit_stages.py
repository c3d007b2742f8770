"""Credit in two stages: what is asked group by group, what is judged step by step, and in which order."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ibpo.basics.records import Correction, Group
from megatron_ibpo.config import PRESETS
from megatron_ibpo.credit import (
    CRITIC,
    ESTIMATORS,
    OPERATORS,
    ComparedSamples,
    Judgement,
    Operator,
    assign_credit,
    fill_batch,
    find_estimator,
    find_operator,
)
from megatron_ibpo.credit.estimators import (
    advantages,
    group_mean,
    group_z_score,
    group_z_score_bessel,
    leave_one_out,
    maxrl,
)
from support.credit_cases import (
    GSPO,
    RIGHT,
    Loop,
    algorithm,
    by_kind,
    check_algorithm,
    context,
    fix_last,
    group,
    of_preset,
    plain,
    response,
    scored,
    some_groups,
)

# -------------------------------------------------------------------------------------------- two stages


def test_a_group_is_followed_up_by_itself_with_the_same_draws():
    """What is asked of a group alone is what is asked of it among others."""
    config = context(algorithm(ibpo_corrections=2, ibpo_k=3))
    operator = find_operator(config.algorithm)
    together = [operator.follow_ups(made, config) for made in some_groups()]
    for number in range(len(together)):
        alone = operator.follow_ups(some_groups()[number], config)
        assert plain(alone) == plain(together[number])
    assert sum(map(len, together)) > 10


def test_follow_ups_are_asked_twice_alike_and_skipped_pairs_counted_once():
    made = group(RIGHT, [10, 11, 14], [10, 11, 12, 14])
    config = context(algorithm(), max_context=20)
    operator = find_operator(config.algorithm)
    first, second = (operator.follow_ups(made, config) for _ in range(2))
    assert plain(first) == plain(second)
    assert made.skipped_pairs == 1


def test_corrections_stand_in_the_order_in_which_they_were_asked():
    made = group(RIGHT, [10, 14], [11, 14])
    config = context(algorithm(ibpo_corrections=2))
    operator = find_operator(config.algorithm)
    asked = operator.follow_ups(made, config)
    answers = [response([20 + number, 13], 1.0) for number in range(4)]
    operator.attach(made, asked, answers)
    assert [(c.target, c.response.token_ids[0], c.response.index) for c in made.corrections] == [
        (1, 20, 0), (1, 21, 1), (2, 22, 2), (2, 23, 3),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="argument 2"):
        operator.attach(made, asked, answers[:3])


def test_a_step_that_is_credited_again_without_ibpo_has_the_credit_of_gspo():
    """As the gradient meter does: corrections hang on the groups and play no part."""
    groups = some_groups()
    Loop(fix_last).credit(groups, algorithm())
    assert any(made.corrections for made in groups)
    again = assign_credit(groups, context(algorithm(**GSPO)))
    fresh = assign_credit(some_groups(), context(algorithm(**GSPO)))
    assert plain(again.sequences) == plain(fresh.sequences)
    assert again.metrics == fresh.metrics


def test_corrections_of_a_recording_give_way_to_those_asked_for():
    made = group(RIGHT, RIGHT)
    made.corrections = [Correction(0, (), response([13], 1.0))]
    credit = Loop(fix_last).credit([made], algorithm())
    assert made.corrections == []
    assert credit.metrics["corrections"] == 0


# ------------------------------------------------------------------------------------- order of arrival


PRESETS_WITHOUT_MODELS = [name for name in PRESETS if name not in ("ppo", "ciw", "ciw-inverted")]


@pytest.mark.parametrize("name", PRESETS_WITHOUT_MODELS)
@given(seed=st.integers(0, 2**16), order=st.randoms(use_true_random=False))
@settings(max_examples=5, deadline=None)
def test_who_arrives_first_changes_no_credit(name, seed, order):
    """Groups are followed up in any order, and their corrections come back in any; the batch is ordered by
    prompt before it is judged."""
    config = context(algorithm(**of_preset(name)))
    operator = find_operator(config.algorithm)
    at_once = Loop(fix_last).credit(some_groups(seed), config.algorithm)

    arriving, loop = some_groups(seed), Loop(fix_last)
    order.shuffle(arriving)
    for made in arriving:
        asked = operator.follow_ups(made, config)
        places = list(range(len(asked)))
        order.shuffle(places)
        answers = dict(zip(places, loop.sample([asked[i].request for i in places]), strict=True))
        samples = [answers[i] for i in range(len(asked))]
        loop.score([(made.prompt, sample) for sample in samples])
        operator.attach(made, asked, samples)
    arriving.sort(key=lambda made: made.prompt.index)
    streamed = assign_credit(arriving, config)
    assert plain(streamed.sequences) == plain(at_once.sequences)
    assert streamed.metrics == at_once.metrics


# ---------------------------------------------------------------------------------------------- operators


class Halves(Operator):
    """A wrong response of even length was nearly right."""

    def judge(self, groups, context):
        return Judgement(
            [[0.5 * (not r.correct and len(r.content_ids) % 2 == 0) for r in g.responses] for g in groups]
        )


HALVES = Halves()


class OnlyJudges:
    def judge(self, groups, context):
        raise AssertionError("never asked")


class Undecided(Operator):
    """Has no judge."""


NUMBER = 3


def test_an_operator_of_ones_own_is_found_by_import_path():
    for name in ("HALVES", "Halves"):
        config = algorithm(ibpo_operator=f"{__name__}:{name}")
        credit = Loop(fix_last).credit([group(RIGHT, [14, 14], [14])], config)
        assert [s.advantage for s in credit.sequences] == group_z_score([1.0, 0.3, 0.0])


@pytest.mark.parametrize("name", ["OnlyJudges", "Undecided", "NUMBER"])
def test_what_is_no_operator_is_refused(name):
    path = f"{__name__}:{name}"
    says = f"--ibpo-operator {path}: must be a subclass of megatron_ibpo.credit.Operator that defines judge"
    with pytest.raises(ValueError, match=says):
        find_operator(algorithm(ibpo_operator=path))


def test_an_operator_may_ask_for_samples_of_its_own():
    """Every right response is followed up with itself; what comes of it is trained on as a correction."""

    class Again(Operator):
        def follow_ups(self, group, context):
            corrects = OPERATORS["compare-and-correct"]()
            asked = corrects.follow_ups(group, context)
            return [replace(one, references=()) for one in asked]

        def judge(self, groups, context):
            return Judgement([[0.0] * len(g.responses) for g in groups], metrics={"again": 1.0})

    credit = Loop(fix_last).credit([group(RIGHT, [14], [15])], algorithm(), operator=Again())
    assert [s.reward for s in by_kind(credit, "correction")] == [1.0, 1.0]
    assert credit.metrics["again"] == 1


# --------------------------------------------------------------------------------------------- estimators


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("group", [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),  # mean 1/4, population variance 3/16
        ("group-bessel", [1.5, -0.5, -0.5, -0.5]),  # the variance is 3/16 · 4/3
        ("group-mean", [0.75, -0.25, -0.25, -0.25]),
        ("maxrl", [3.0, -1.0, -1.0, -1.0]),
        ("leave-one-out", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        (CRITIC, [0.0] * 4),
    ],
)
def test_estimators_by_hand(name, expected):
    estimator = find_estimator(algorithm(advantages=name))
    assert estimator([1.0, 0.0, 0.0, 0.0]) == pytest.approx(expected, abs=1e-7)


rewards = st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0]), min_size=1, max_size=12)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(rewards)
@example([0.1] * 3)  # whose sum over 3 is not .1
def test_equal_rewards_have_no_advantage(name, values):
    found = find_estimator(algorithm(advantages=name))(values)
    assert len(found) == len(values)
    if len(set(values)) == 1:
        assert found == [0.0] * len(values)


@given(rewards.filter(lambda values: len(values) > 1))
def test_leave_one_out_is_what_it_says(values):
    others = [(sum(values) - value) / (len(values) - 1) for value in values]
    assert leave_one_out(values) == pytest.approx(
        [value - mean for value, mean in zip(values, others, strict=True)], abs=1e-12
    )
    scale = len(values) / (len(values) - 1)
    assert leave_one_out(values) == pytest.approx([a * scale for a in group_mean(values)], abs=1e-12)


@given(rewards.filter(lambda values: len(values) > 1))
def test_bessels_std_shrinks_advantages_by_a_factor_that_the_size_gives(values):
    factor = math.sqrt((len(values) - 1) / len(values))
    found, population = group_z_score_bessel(values), group_z_score(values)
    assert found == pytest.approx([a * factor for a in population], rel=1e-4)
    if len(set(values)) > 1:
        spread = statistics.stdev(values)
        mean = statistics.fmean(values)
        assert found == pytest.approx(
            [(value - mean) / (spread + 1e-8) for value in values], rel=1e-6, abs=1e-9
        )


def test_maxrl_is_the_gradient_of_the_log_of_the_mean():
    """Of 4 responses 1 is right: (1 - 1/4)/(1/4) = 3 for it and -1 for the others. Over the group the sum of
    A_i ∇ log π_i / 4 is ∇ log π of the right one less the mean of all: the score of log p̂ with a baseline."""
    assert maxrl([1.0, 0.0, 0.0, 0.0]) == [3.0, -1.0, -1.0, -1.0]
    assert maxrl([1.0, 1.0, 1.0, 0.0]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1])
    assert maxrl([0.0, 0.0]) == [0.0, 0.0]
    assert maxrl([1.0, 1.0]) == [0.0, 0.0]
    credit = Loop(fix_last).credit([group(RIGHT, [14])], algorithm(**GSPO | {"advantages": "maxrl"}))
    assert [s.advantage for s in credit.sequences] == [1.0, -1.0]


def test_maxrl_needs_rewards_that_have_a_logarithm():
    with pytest.raises(ValueError, match=r"--advantages maxrl takes the log of .*, and a reward is -1"):
        maxrl([1.0, -1.0])
    for lowering in ({"overlong_buffer_share": 0.2}, {"ibpo_rewrite_penalty": 0.5}):
        with pytest.raises(ValueError, match="--advantages maxrl takes the log"):
            check_algorithm(algorithm(advantages="maxrl", **lowering))


def test_dr_grpo_is_the_published_one():
    """Rewards less their mean, no std; the loss is divided by a constant, not by lengths."""
    settings = PRESETS["dr-grpo"]
    assert (settings["advantages"], settings["loss_variant"]) == ("group-mean", "dr-grpo")
    assert (settings["ibpo_operator"], settings["overlong_buffer_share"]) == ("none", 0)
    credit = Loop(fix_last).credit([group(RIGHT, [14], [15])], algorithm(**of_preset("dr-grpo")))
    assert [s.advantage for s in credit.sequences] == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def best_is_all(rewards):
    """An estimator of one's own."""
    return [reward - max(rewards) for reward in rewards]


class ByLength:
    """An estimator that sees all groups and their samples: rewards less the mean of all, over lengths."""

    def of_batch(self, batch):
        everything = [reward for compared in batch for reward in compared.rewards]
        mean = sum(everything) / len(everything)
        return [
            [(r - mean) / len(s.token_ids) for r, s in zip(compared.rewards, compared.samples, strict=True)]
            for compared in batch
        ]


class FirstGroupOnly:
    def of_batch(self, batch):
        return [[0.0] * len(batch[0].rewards)]


def test_an_estimator_may_see_the_whole_batch_and_lengths():
    """Known rewards are 1, 0, 1 and 1, their mean 3/4; lengths count the end. Unscored ones are left out."""
    config = algorithm(**GSPO | {"advantages": f"{__name__}:ByLength"})
    unsure = Group(some_groups()[0].prompt, [*scored([13], [12, 13]), response([15], None)])
    credit = Loop(fix_last).credit([group(RIGHT, [14]), unsure], config)
    assert [s.advantage for s in credit.sequences] == [0.25 / 5, -0.75 / 2, 0.25 / 2, 0.25 / 3]


def test_an_estimator_of_a_batch_must_answer_every_comparison():
    config = algorithm(**GSPO | {"advantages": f"{__name__}:FirstGroupOnly"})
    with pytest.raises(ValueError, match="advantages for 1 comparisons instead of 2"):
        Loop(fix_last).credit([group(RIGHT, [14]), group(RIGHT, [15])], config)


def too_few(rewards):
    return rewards[1:]


def not_finite(rewards):
    return [float("nan")] * len(rewards)


def test_an_estimator_of_ones_own_is_found_by_import_path():
    config = algorithm(**GSPO | {"advantages": f"{__name__}:best_is_all"})
    made = Group(some_groups()[0].prompt, [*scored([13], [14]), response([15], None)])
    credit = Loop(fix_last).credit([made], config)
    assert [s.advantage for s in credit.sequences] == [0.0, -1.0]


@pytest.mark.parametrize("name", ["too_few", "not_finite"])
def test_an_estimator_must_give_one_number_for_each_reward(name):
    estimator = find_estimator(algorithm(advantages=f"{__name__}:{name}"))
    with pytest.raises(ValueError, match="one finite number per reward"):
        advantages([ComparedSamples([1.0, 0.0], scored([13], [14]))], estimator)


def test_an_unknown_estimator_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"--advantages leave-out.*'leave-one-out'"):
        find_estimator(algorithm(advantages="leave-out"))
    with pytest.raises(ValueError, match=r"--advantages .*is of type int, but must be callable"):
        find_estimator(algorithm(advantages=f"{__name__}:NUMBER"))


# ------------------------------------------------------------------------------------------ group filters


def test_groups_that_a_filter_refuses_are_never_in_the_batch():
    """Of rounds of three the filter takes even prompts, and two of these are all wrong."""
    rounds = [[group([14], [13] if i % 4 else [14], index=3 * n + i) for i in range(3)] for n in range(3)]

    def even(made):
        return made.prompt.index % 2 == 0

    groups, metrics = fill_batch(lambda number: rounds[number], 3, 3, usable=even)
    assert [made.prompt.index for made in groups] == [2, 4, 8]
    assert metrics["groups_refused"] == 4
    groups, metrics = fill_batch(lambda number: rounds[number], 6, 3, usable=even)
    assert sorted(made.prompt.index for made in groups) == [0, 2, 4, 6, 8]
    assert (metrics["groups_missing"], metrics["groups_filled_up"]) == (1, 2)
    with pytest.raises(ValueError, match="--group-filter refused all 9 groups of 3 rounds"):
        fill_batch(lambda number: rounds[number], 3, 3, usable=lambda made: False)


# --------------------------------------------------------------------------------------------- multi-turn
# 50 is what a tool says: context that the policy did not write


def with_tool(content, reward):
    return response(content, reward, written=[token < 50 for token in content])


def test_tool_output_takes_no_part_in_lengths():
    """Of 2 + 3 tokens and the end the policy wrote three; limit 8, buffer 4: 3 tokens cost nothing."""
    long = [10, 50, 50, 50, 50, 50, 13]
    config = algorithm(**GSPO | {"overlong_buffer_share": 0.5})
    made = Group(some_groups()[0].prompt, [with_tool(long, 1.0), *scored([14])])
    credit = Loop(fix_last).credit([made], config)
    assert [s.reward for s in credit.sequences] == [1.0, 0.0]
    assert credit.metrics["tokens_responses"] == 3 + 2
    assert credit.metrics["response_length"] == 2.5
    first, _ = credit.sequences
    assert (first.num_trained_tokens, first.num_tokens) == (3, 3 + 8)
    all_written = Group(some_groups()[0].prompt, [*scored(long), *scored([14])])
    assert Loop(fix_last).credit([all_written], config).sequences[0].reward == 0.0


def test_corrections_are_compared_by_what_the_policy_wrote():
    """y = 10 [50 51] 11 14, ŷ = 10 [60] 11 13: of three written tokens one is changed, d = 1/3, and the mask
    stands on the whole response. The correction prompt shows all of it."""
    wrong = with_tool([10, 50, 51, 11, 14], 0.0)
    made = Group(some_groups()[0].prompt, [*scored(RIGHT), wrong])
    config = context(algorithm(ibpo_variant="mask"))
    operator = find_operator(config.algorithm)
    (asked,) = operator.follow_ups(made, config)
    assert asked.request.prompt_token_ids[3:8].tolist() == [10, 50, 51, 11, 14]
    operator.attach(made, [asked], [with_tool([10, 60, 11, 13], 1.0)])
    credit = assign_credit([made], config)
    (found,) = made.corrections
    assert found.distance == pytest.approx(1 / 3)
    assert found.unmodified_share == pytest.approx(2 / 3)
    assert not found.rewritten
    weights = by_kind(credit, "response")[1].token_weights
    assert weights[wrong.loss_mask].tolist() == [0.0, 0.0, 1.0, 0.0]


def test_a_response_of_tool_output_alone_is_not_trained_on():
    silent = response([50, 51], 0.0, finish_reason="length", written=[False, False])
    made = Group(some_groups()[0].prompt, [*scored(RIGHT), silent])
    credit = Loop(fix_last).credit([made], algorithm(**GSPO))
    assert [s.index for s in credit.sequences] == [0]


def test_a_critic_is_asked_of_written_tokens_alone():
    """V = .2 [9] .4, reward 1, γ = .9, λ = .5: δ = .9·.4 - .2 = .16 and .6; the tool's plays no part."""
    made = Group(some_groups()[0].prompt, [response([10, 50, 13], 1.0, "length", written=[1, 0, 1])])
    config = algorithm(**of_preset("ppo") | {"gae_gamma": 0.9, "gae_lambda": 0.5})
    critic = [np.array([0.2, 9.0, 0.4], np.float32)]
    credit = Loop(fix_last).credit([made], config, values=lambda sequences: critic)
    (found,) = credit.sequences
    first, last = 0.16 + 0.45 * 0.6, 0.6
    assert found.returns == pytest.approx([first + 0.2, 0.0, last + 0.4])
    assert found.token_advantages == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)
    assert found.advantage == pytest.approx(0, abs=1e-9)
    assert credit.metrics["value_mean"] == pytest.approx(0.3)


def test_steps_that_only_a_tool_wrote_are_no_steps():
    """Three lines, of which the second is a tool's: the answer is asked for once as it is and once without
    the first."""
    texts = {20: "\n"}
    asked = []

    def logprobs(queries):
        asked.extend(queries)
        return [np.zeros(len(query.continuation), np.float32) for query in queries]

    made = Group(
        some_groups()[0].prompt, [response([10, 20, 50, 20, 13], 1.0, written=[1, 1, 0, 0, 1]), *scored([14])]
    )
    credit = Loop(fix_last).credit(
        [made],
        algorithm(**of_preset("ciw")),
        logprobs=logprobs,
        vocabulary={"token_texts": lambda ids: [texts.get(int(i), "w") for i in ids], "placeholder_id": 0},
    )
    assert [query.context[3:].tolist() for query in asked] == [[10, 20, 50, 20], [0, 0, 50, 20]]
    assert credit.metrics["masked_spans"] == 1
