"""The paper's variants and further operators by hand, leaks, the gate, and which settings go together."""

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest
from gated import success_rate
from hypothesis import given
from hypothesis import strategies as st
from simulated_engines import SimulatedEngine, in_virtual_time

from megatron_ibpo.basics.records import Group, SampleRequest, token_ids
from megatron_ibpo.config import PRESETS, Config
from megatron_ibpo.credit.compared_parts import ThinkingMarks, compared_pairs, part_in_prompt
from megatron_ibpo.credit.edits import find_edits, gradient_mask, mark_rewrites
from megatron_ibpo.credit.estimators import group_z_score
from megatron_ibpo.edit_distance import opcodes
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.run.checks import check_settings
from megatron_ibpo.run.cost import CostMeter
from megatron_ibpo.sampling import Sampler
from megatron_ibpo.sampling.requests import with_beginning
from support.credit_cases import (
    AGREEMENT,
    EOS,
    GATED,
    GSPO,
    PROMPT,
    RANDOM_WINDOW,
    RESET_GROUPS,
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
    in_turn,
    of_preset,
    plain,
    prompt,
    response,
    some_groups,
    token_weights,
    tokens_spent,
)
from support.paths import ROOT
from support.sampling_cases import STEP, judge, make_prompts

WRONG = [10, 11, 12, 14]


def test_ratio_gives_the_share_of_tokens_kept():
    """ŷ keeps three of y's four tokens: Δ = 3/4, r' = .45; mask and β play no part."""
    credit = Loop(fix_last).credit([group(RIGHT, WRONG)], algorithm("ibpo-ratio"))
    right, wrong = by_kind(credit, "response")
    assert [right.advantage, wrong.advantage] == group_z_score([1.0, 0.6 * 0.75])
    assert wrong.token_weights is None
    assert credit.metrics["shaped_reward"] == pytest.approx(1.45 / 2)


def test_of_several_corrections_the_bonus_is_the_mean_and_the_mask_the_union():
    """Of five corrections two count: they change tokens 1 and 3. Δ = .5·2/4, since the last is not scored. A
    wrong one and a rewrite do not."""
    corrected = [10, 19, 12, 14, 13], [10, 11, 12, 13], [18, 11, 12, 15], [40, 41, 42, 43, 44, 13], [13]
    rewards, made = iter((1.0, 1.0, 0.0, 1.0, None)), group(RIGHT, WRONG)
    loop = Loop(in_turn(*corrected), lambda answer: next(rewards))
    credit = loop.credit([made], algorithm("ibpo-mask", ibpo_corrections=5))
    assert [c.rewritten for c in made.corrections[:4]] == [False, False, False, True]
    right, masked = by_kind(credit, "response")
    assert ids_of(masked.token_weights) == (0.0, 1.0, 0.0, 1.0, 0.0)
    assert [right.advantage, masked.advantage] == group_z_score([1.0, 0.6 * 0.25])


def test_a_correction_that_only_inserts_leaves_no_gradient_unless_asked():
    y, y_hat = [10, 12], [10, 20, 12, 13]
    for option, expected in ((False, (0, 0, 0)), (True, (1, 1, 0))):
        config = algorithm("ibpo-mask", ibpo_mask_insertions=option, ibpo_rewrite_threshold=1.0)
        credit = Loop(in_turn(y_hat)).credit([group(RIGHT, y)], config)
        assert ids_of(by_kind(credit, "response")[1].token_weights) == expected
        assert credit.metrics["empty_masks"] == float(not option)


def test_the_end_is_changed_where_the_correction_has_none():
    """y ends, ŷ was cut off: the end-of-sequence id is no common token. The other way round y has none."""
    made = Group(prompt(), [response([10, 14], 0.0), response([10, 14], 0.0, "length")])
    ends = [response([10, 13], 1.0, "length"), response([10, 13], 1.0)]
    made.corrections = [correction(target, corrected) for target, corrected in enumerate(ends)]
    edits, _ = find_edits(compared_pairs([made], None), mark_insertions=False)
    assert [flags.tolist() for flags in edits] == [[False, True, True], [False, True]]


tokens = st.lists(st.integers(1, 4), max_size=12)


@given(tokens, tokens)
def test_edits_are_those_of_the_edit_script(y, y_hat):
    """Changed are the tokens replaced or left out; with insertions also the one before each insertion."""
    made = Group(prompt(), [response(y, 0.0)])
    made.corrections = [correction(0, response(y_hat, 1.0))]
    script = opcodes(y, y_hat)
    taken = [range(step.a_start, step.a_end) for step in script if step.tag in ("replace", "delete")]
    changed = {place for places in taken for place in places}
    before = {step.a_start - 1 for step in script if step.tag == "insert"} - {-1}
    share = 1 - len(changed) / len(y) if y else 0
    steps = [step for step in script if step.tag != "equal"]
    count = sum(max(step.a_end - step.a_start, step.b_end - step.b_start) for step in steps)
    for option, expected in ((False, changed), (True, changed | before)):
        pairs = compared_pairs([made], None)
        (flags,), edits = find_edits(pairs, mark_insertions=option)
        mark_rewrites(pairs, edits, 0.6, None)
        assert set(np.flatnonzero(flags).tolist()) == expected
        assert made.corrections[0].unmodified_share == pytest.approx(share)
        assert made.corrections[0].distance == pytest.approx(count / max(len(y), len(y_hat), 1))
    assert len(gradient_mask([flags])) == len(y) + 1


def one_corrected(*contents, **settings):
    """Responses of a group of which WRONG alone is corrected."""
    loop = Loop(lambda x: RIGHT if candidates(x)[0] == WRONG else [20, 21])
    return by_kind(loop.credit([group(*contents)], algorithm("ibpo-mask", **settings)), "response")


def test_in_a_wrong_group_lambda_cancels_and_the_signed_mask_turns_round():
    """r' = λβ 0 0 0, and the spread of the group divides λ out. Eq. 17 then makes the wrong token likelier,
    and nothing else of the response."""
    wrong = WRONG, [20, 21], [22, 23], [24, 25]
    for estimator, expected in (("group", 3**0.5), ("group-bessel", 1.5), ("maxrl", 3.0)):
        for weight in (0.01, 1.9):
            corrected = one_corrected(*wrong, ibpo_lambda=weight, advantages=estimator)[0]
            assert corrected.advantage == pytest.approx(expected, rel=1e-5)
    assert one_corrected(*wrong, advantages="group-mean")[0].advantage == pytest.approx(0.3 * 3 / 4)
    changed, others = (0.0, 0.0, 0.0, 1.0, 0.0), (1.0, 1.0, 1.0, 0.0, 1.0)
    for variant, learns in (("mask", changed), ("signed-mask", others)):
        assert token_weights(one_corrected(*wrong, ibpo_variant=variant)) == [learns, None, None, None]
        assert token_weights(one_corrected(RIGHT, WRONG, ibpo_variant=variant)) == [None, changed]


def test_cipo_shows_the_wrong_answer_alone_and_trains_on_its_correction():
    """Rewards 1 0 0 0; of three corrections the first two are right."""
    loop, third = Loop(in_turn([13], [20, 13], [21])), 3**-0.5
    credit = loop.credit([group(RIGHT, [14], [15], [16])], algorithm("cipo"))
    assert [candidates(asked) for asked in loop.asked] == [[[14]], [[15]], [[16]]]
    expected = [3**0.5, -third, -third, -third, 2**-0.5, 2**-0.5, -(2**0.5)]
    assert [s.advantage for s in credit.sequences] == pytest.approx(expected, abs=1e-7)


def test_corrections_are_compared_within_their_pair_or_their_prompt():
    """Two corrections of each of two wrong responses, rewards 1 0 and 1 1."""
    third = 3**-0.5
    for compared, expected in (("pair", [1, -1, 0, 0]), ("prompt", [third, -(3**0.5), third, third])):
        loop = Loop(in_turn([10, 13], [10, 15], [11, 13], [11, 12, 13]))
        config = algorithm("ibpo", ibpo_corrections=2, ibpo_correction_group=compared)
        credit = loop.credit([group(RIGHT, [10, 14], [11, 14])], config)
        assert [s.advantage for s in by_kind(credit, "correction")] == pytest.approx(expected, abs=1e-7)
        assert credit.metrics["degenerate_correction_groups"] == (compared == "pair")


def test_rewrites_pay_at_the_source():
    """Of four corrections two are right; of these one is farther than α from y, and so is one of the wrong
    ones: rewards 1, 1 - ρ, 0, -ρ with ρ = .5. The responses' own rewards do not pay. The latter is just as
    far from the reference: no rewrite, and it pays all the same."""
    answers = in_turn([10, 11, 12, 13], [20, 21, 22, 13], [10, 11, 12, 15], [20, 21, 22, 23])
    made = group([30, 31, 32, 13], WRONG)
    credit = Loop(answers).credit([made], algorithm("ibpo-rewrite-penalty"))
    assert [c.distance for c in made.corrections] == [0.25, 1.0, 0.25, 1.0]
    assert [c.beyond_threshold for c in made.corrections] == [False, True, False, True]
    assert [c.rewritten for c in made.corrections] == [False, True, False, False]
    std = math.sqrt((0.75**2 + 0.25**2 + 0.25**2 + 0.75**2) / 4)
    expected = [(reward - 0.25) / std for reward in (1.0, 0.5, 0.0, -0.5)]
    assert [s.advantage for s in by_kind(credit, "correction")] == pytest.approx(expected, abs=1e-6)
    assert [s.advantage for s in by_kind(credit, "response")] == group_z_score([1.0, 0.6 * 0.5 / 4])
    assert credit.metrics["beyond_threshold_rate"] == 0.5


THINK, END_THINK = 80, 81
MARKS = ThinkingMarks((THINK,), (END_THINK,))


def test_what_is_shown_of_a_solution_that_thinks():
    for prompt_ids, content, seen in (
        ((1, 2), [4, THINK, 5, END_THINK, 7, THINK, 6, END_THINK, 8], [4, 7, 8]),
        ((1, 2), [7, THINK, 5], [7]),  # never closed
        ((1, THINK), [5, 6, END_THINK, 7], [7]),  # the prompt opens it
        ((THINK, 3, END_THINK), [5, 6], [5, 6]),  # opened and closed there
        ((1, 2), [5, END_THINK, 7], [7]),  # it was not opened
        ((1, THINK), [], []),
    ):
        part = part_in_prompt(response(content, 0.0, prompt=prompt_ids), MARKS)
        assert part.ids.tolist() == [content[place] for place in part.places] == seen
    several = response([60, 61, 5, 60, 60, 62, 61, 7, 60], 0.0)
    assert part_in_prompt(several, ThinkingMarks((60, 61), (60, 62))).ids.tolist() == [61, 7, 60]


def test_hidden_thinking_is_neither_shown_nor_compared_and_keeps_its_gradient():
    """y hides four tokens and shows 10 11 14; of these ŷ keeps two of three, after other thoughts."""
    right, wrong = [THINK, 50, END_THINK, 10, 11, 13], [THINK, 51, 52, END_THINK, 10, 11, 14]
    loop, made = Loop(lambda x: [THINK, *range(53, 58), END_THINK, 10, 11, 13]), group(right, wrong)
    config = algorithm("ibpo-mask", ibpo_strip_thinking=True)
    credit = loop.credit([made], config, vocabulary={"thinking": MARKS})
    assert candidates(loop.asked[0]) == [[10, 11, 14], [10, 11, 13]]
    (correction,) = made.corrections
    assert (correction.distance, correction.reference_distance) == (pytest.approx(1 / 3), 0.0)
    assert correction.unmodified_share == pytest.approx(2 / 3)
    assert ids_of(by_kind(credit, "response")[1].token_weights) == (1, 1, 1, 1, 0, 0, 1, 0)
    loop.credit([group(right, wrong)], algorithm("ibpo-mask"), vocabulary={"thinking": MARKS})
    assert candidates(loop.asked[1]) == [wrong, right], "without the option it is shown whole"


def texts_of(ids):
    """Tokens below 30 are the digit of their last place, 30 is a plus, 31 an equals sign, 32 a hash."""
    return [{30: "+", 31: "=", 32: "#"}.get(i, str(i % 10)) for i in ids]


def sums(*results):
    """`1+1=…+1=…#…` with these results, the last of which is the answer; one token a number."""
    steps = [token for result in results for token in (30, 11, 31, 10 + result)]
    return [11, *steps, 32, 10 + results[-1]]


def agreed(*contents, **settings):
    config = algorithm("ibpo-shaping-only", ibpo_operator=AGREEMENT, **settings)
    loop = Loop(fix_last)
    credit = loop.credit([group(*contents)], config, vocabulary={"token_texts": texts_of})
    assert loop.requests == []
    return credit


def test_agreement_is_the_share_of_steps_that_correct_responses_have_too():
    """Steps of `1+1=2+1=3#3`: `1+1=2`, `+1=3`, `#3`. The first wrong one has one step of three of those, the
    second none. λ = .6."""
    right, near, far = sums(2, 3), sums(2, 4), sums(5, 6)
    credit = agreed(right, near, far)
    assert [s.advantage for s in credit.sequences] == group_z_score([1.0, 0.6 / 3, 0.0])
    assert credit.metrics["agreement"] == pytest.approx(1 / 6)
    assert token_weights(credit.sequences) == [None] * 3
    assert "corrections" not in credit.metrics
    # `1+1=2` agrees; `+1=4` and `#4` do not; both end
    mask = (0,) * 5 + (1,) * 4 + (1,) * 2 + (0,)
    assert token_weights(agreed(right, near, ibpo_variant="mask").sequences) == [None, mask]
    # r' = 1 .2 0 0 0 0 0 0, whose mean is .15: the near one becomes likelier, and the signed mask turns round
    signed = agreed(right, near, *[far] * 6, ibpo_variant="signed-mask").sequences[1]
    assert signed.advantage > 0
    assert ids_of(signed.token_weights) == tuple(1 - m for m in mask)
    nothing = agreed(near, sums(2, 5), ibpo_variant="mask").sequences
    assert [(s.advantage, s.token_weights) for s in nothing] == [(0.0, None)] * 2, "none is correct"


ANSWER = 70  # before the final answer, which is 13 where it is right
STEPS = list(range(20, 40))
NOT_YET = [*STEPS, ANSWER, 14]
SOLVED = [*STEPS[:10], *range(40, 50), ANSWER, 13]


def answer_start(prompt, ids):
    marks = [place for place, token in enumerate(ids.tolist()) if token == ANSWER]
    return marks[-1] + 1 if marks else None


def leaked(wrong, right, corrected, start=answer_start):
    """(the flag of the correction of `wrong`, the step's credit); `right` is its reference."""
    made = group(wrong, right)
    credit = Loop(lambda x: corrected).credit([made], algorithm(), vocabulary={"answer_start": start})
    return made.corrections[0].reference_leakage, credit


def test_corrections_that_take_over_a_references_answer_and_nothing_else_leak():
    for corrected, leaks in (
        ([*STEPS, 60, 61, ANSWER, 13], True),  # nothing but the answer is another one, and "so it is"
        ([*STEPS, 60, 61, 62, ANSWER, 13], False),  # more than a tenth is its own
        ([*STEPS[:19], 40, ANSWER, 13], False),  # the last step is repaired
        ([ANSWER, 13], True),  # no derivation at all
        ([20, 21, ANSWER, 13], False),  # a tenth of the reference's
        (SOLVED, False),  # a copy is a derivation; it is measured as such
        ([*STEPS, ANSWER, 15], False),  # wrong itself
        ([*STEPS, 13], False),  # says no answer
    ):
        flag, credit = leaked(NOT_YET, SOLVED, corrected)
        assert flag is leaks, corrected
        assert credit.metrics["reference_leakage_rate"] == float(leaks)
    # where no answer is given away nothing leaks
    corrected = [*STEPS, ANSWER, 13]
    assert not leaked(NOT_YET, [*SOLVED[:-1], 14], corrected)[0], "no reference is right"
    assert not leaked(STEPS, SOLVED, corrected)[0], "an answer that was cut off is completed"
    flag, unknown = leaked(NOT_YET, SOLVED, corrected, start=None)
    assert not flag
    assert "reference_leakage_rate" not in unknown.metrics
    flagged = leaked(NOT_YET, SOLVED, corrected)[1]
    assert [s.advantage for s in flagged.sequences] == [s.advantage for s in unknown.sequences]


def by_token(prompt, response, *, sharing, trained):
    """Prices where a token costs 1 to read, 1 to write and 3 to train on."""
    return prompt / sharing + response + 3 * trained


def gated(groups, memory=None, correct=fix_last, **settings):
    """(the corrections' prompts, the credit)"""
    loop, config = Loop(correct), algorithm(ibpo_operator=GATED, **settings)
    credit = loop.credit(groups, config, price=by_token, memory=memory or {})
    return loop.asked, credit


def test_the_gate_opens_where_a_correction_beats_as_many_rollouts_as_it_costs():
    """By hand: x has 3 tokens, a response 5 with its end, x̃ 3 + 5 + 5 = 13. A rollout costs 3/4 + 5 + 3·8 =
    29.75, a correction 13 + 5 + 3·18 = 72: κ = 2.4202. With 1 of 4 correct p̂ = .25, and the gate opens
    where q̂ = (s + 1)/(n + 2) exceeds .60504."""
    of_one, of_two = [group(RIGHT, WRONG, WRONG, WRONG)], [group(RIGHT, RIGHT, WRONG, WRONG)]
    for memory, opens in (
        ({}, False),  # ½
        ({"1/4": [20, 31]}, True),  # 21/33 = .636
        ({"1/4": [19, 31]}, True),  # 20/33 = .60606
        ({"1/4": [19, 31.1]}, False),  # 20/33.1 = .60423
        ({"2/4": [20, 20]}, False),  # another composition
    ):
        asked, credit = gated(of_one, memory)
        assert len(asked) == (3 if opens else 0), memory
        assert credit.metrics["gated_pairs"] == (0 if opens else 3)
    # what is not trained on costs less: 13 + 5 = 18 against 29.75, κp̂ = .1513 < ½
    assert len(gated(of_one, ibpo_joint=False)[0]) == 3
    # two corrections read their prompt once: (6.5 + 5 + 54)/29.75·½ = 1.10 > 1, never worth it
    surely = {"2/4": [1e6, 1e6]}
    assert gated(of_two, surely, ibpo_corrections=2)[0] == []
    assert len(gated(of_two, surely, ibpo_joint=False)[0]) == 2
    # where nothing is correct everything wrong is corrected whatever it costs
    asked, credit = gated([group(WRONG, WRONG)], {"0/2": [0, 1000]})
    assert (len(asked), credit.metrics["gated_pairs"]) == (2, 0)


def test_what_came_of_corrections_is_remembered_by_composition_and_fades():
    """Of two groups without a correct one, three of four corrections succeed; nothing else is asked."""
    near, far = WRONG, [10, 11, 15]
    _, credit = gated(
        [group(near, near, index=0), group(near, far, index=1), group(RIGHT, RIGHT, RIGHT, WRONG, index=2)],
        memory={"0/2": [4, 20], "3/4": [1, 2], "2/4": [0.0, 0.0104]},
        correct=lambda x: fix_last(x) if candidates(x)[0] == near else far,
    )
    assert credit.memory == {"0/2": [0.95 * 4 + 3, 0.95 * 20 + 4], "3/4": [0.95, 1.9]}
    assert success_rate(credit.memory, 0, 2) == pytest.approx(7.8 / 25)
    assert success_rate(credit.memory, 1, 2) == 0.5
    assert Loop(fix_last).credit(some_groups(), algorithm()).memory == {}, "without the gate there is none"
    with pytest.raises(ValueError, match="groups with 1/2 right is no pair of counts"):
        gated([group(RIGHT, WRONG)], {"1/2": ["a", 1]})


def test_the_meters_price_of_a_sample_is_what_it_adds_up_for_one():
    """A prompt of 13 tokens, an answer of 5, an update over both; then four answers to one prompt of 3."""
    once, four = (CostMeter(read_hf_config(ROOT / "examples/tiny_qwen3"), 1) for _ in range(2))
    made = group(WRONG, WRONG)
    corrected = by_kind(Loop(fix_last).credit([made], algorithm()), "correction")[0]
    once.sampling([made.corrections[0].response])
    once.training([], [corrected.num_tokens])
    assert once.spent.tokens == 13 + 5 + 18
    assert once.of_sample(13, 5, trained=18) == pytest.approx(once.spent.flops, rel=1e-12)
    four.sampling(group(WRONG, RIGHT, WRONG, WRONG).responses)
    assert 4 * four.of_sample(3, 5, sharing=4) == pytest.approx(four.spent.flops, rel=1e-12)


JOINING = {"ibpo_lambda": 0.0, "ibpo_joint": False, "ibpo_plain_prompt": "successful"}
RESETS = GSPO | {"ibpo_operator": RESET_GROUPS, "ibpo_corrections": 2}
FAILS, FAR = [10, 11, 15, 15], [20, 21, 22, 23]


def joined(*contents, answers=None, rewards=None, **settings):
    """Credit of a group whose corrections are, by the last token of what they correct, these answers."""
    loop = Loop(lambda x: answers[candidates(x)[0][-1]] if answers else fix_last(x), rewards)
    return loop.credit([group(*contents)], algorithm(**JOINING | settings))


def test_a_successful_correction_joins_its_group_by_hand():
    """Rewards 1 0 0 0. The correction of y1 is right and near, that of y2 wrong, that of y3 right and a
    rewrite: five rewards 1 0 0 0 1, of mean .4 and standard deviation √.24."""
    credit = joined(RIGHT, WRONG, FAILS, FAR, answers={14: RIGHT, 15: FAILS, 23: RIGHT})
    up, down = 0.6 / math.sqrt(0.24), -0.4 / math.sqrt(0.24)
    assert [s.advantage for s in credit.sequences] == pytest.approx([up, down, down, down, up], abs=1e-7)
    (one,) = by_kind(credit, "correction")
    assert (ids_of(one.prompt_token_ids), ids_of(one.response_token_ids)) == (PROMPT, (*RIGHT, EOS))
    assert (one.off_policy, one.index, one.weight, one.reward) == (True, 0, 0.25, 1)
    assert not any(s.off_policy for s in by_kind(credit, "response"))
    assert credit.metrics["joined_corrections"] == 1


def test_joining_gives_a_wrong_group_something_to_compare_and_leaves_alone_what_has_no_success():
    credit = joined(WRONG, WRONG)
    assert [s.advantage for s in credit.sequences] == pytest.approx([-1, -1, 1, 1], abs=1e-7)
    assert credit.metrics["degenerate_groups"] == 0
    gspo = plain(Loop(fix_last).credit([group(RIGHT, WRONG)], algorithm(**GSPO)).sequences)
    assert plain(joined(RIGHT, WRONG, answers={14: FAILS}).sequences) == gspo
    unscored = joined(RIGHT, WRONG, rewards=lambda answer: None)
    assert plain(unscored.sequences) == gspo
    assert unscored.metrics["joined_corrections"] == 0
    # shaping and joining add up: r' = 1 .3 0, and 1 joins: mean .575
    shaping = {"ibpo_lambda": 0.6, "ibpo_beta": 0.5, "advantages": "group-mean"}
    credit = joined(RIGHT, WRONG, FAR, answers={14: RIGHT, 23: FAR}, **shaping)
    assert [s.advantage for s in credit.sequences] == pytest.approx([0.425, -0.275, -0.575, 0.425])


def test_critique_grpo_takes_one_refinement_of_a_group_a_right_one_if_there_is_one():
    """Rewards 1 0 0 and that of the second refinement, 1: less their mean, .5 -.5 -.5 .5. In a group without
    a right refinement the first joins and is punished: 1 0 0 less 1/3."""
    one = {"ibpo_plain_prompt": "one", "advantages": "group-mean"}
    right = joined(RIGHT, WRONG, FAR, answers={14: FAILS, 23: RIGHT}, **one)
    assert [s.advantage for s in right.sequences] == pytest.approx([0.5, -0.5, -0.5, 0.5])
    assert [s.index for s in by_kind(right, "correction")] == [1]
    wrong = joined(RIGHT, WRONG, answers={14: FAILS}, **one)
    assert [s.advantage for s in wrong.sequences] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert wrong.sequences[2].off_policy


def test_the_meter_counts_what_the_recipes_say():
    """|x| = 3, |y| = 5 with its end, 4 without. GSPO reads 3, writes and trains 2·5 and 2·8. A correction
    that joins reads x̃ of 3 + 2·(1 + 4), writes |y|, trains |x| + |y|. Of a reset after f = 3 tokens, K = 2
    suffixes read |x| + f once, write K(|y| - f), train K(|x| + |y|)."""

    def spent(correct, settings):
        made = [group(RIGHT, WRONG)]
        return tokens_spent(made, Loop(correct).credit(made, algorithm(**settings)))

    gspo = spent(fix_last, GSPO)
    assert gspo == 3 + 2 * 5 + 2 * 8
    assert spent(fix_last, JOINING) - gspo == (3 + 2 * 5) + 5 + (3 + 5)
    assert spent(in_turn([13], [14]), RESETS) - gspo == (3 + 3) + 2 * (5 - 3) + 2 * (3 + 5)


def test_a_wrong_response_goes_on_where_it_leaves_a_right_one_by_hand():
    """10 11 12 14 shares 10 11 12 with the second right response, more than with the first, and 20 21 shares
    nothing. Of the former, one suffix of two is right: ½ and -½, on the suffix alone. Of the latter,
    neither."""
    loop, contents = Loop(in_turn([13], [14], [20], [21, 22])), ([10, 13], RIGHT, WRONG, [20, 21])
    credit = loop.credit([group(*contents)], algorithm(**RESETS))
    assert loop.asked == [(*PROMPT, 10, 11, 12)] * 2 + [PROMPT] * 2
    assert [r.max_tokens for r in loop.requests] == [5, 5, 8, 8]
    assert len({r.seed for r in loop.requests}) == 4
    suffixes = by_kind(credit, "correction")
    assert [s.advantage for s in suffixes] == [0.5, -0.5, 0.0, 0.0]
    assert [ids_of(s.prompt_token_ids) for s in suffixes] == [PROMPT] * 4
    assert ids_of(suffixes[0].response_token_ids) == (10, 11, 12, 13, EOS)
    assert ids_of(suffixes[0].loss_mask) == (False, False, False, True, True)
    assert {s.weight for s in credit.sequences} == {1 / 4}
    assert credit.metrics["tokens_reset_suffixes"] == 2 + 2 + 2 + 3
    assert (credit.metrics["reset_success"], credit.metrics["reset_shared_length"]) == (0.25, 1.5)
    gspo = Loop(in_turn()).credit([group(*contents)], algorithm(**GSPO))
    assert plain(by_kind(credit, "response")) == plain(gspo.sequences)
    # without a right response, or where all of a response that was cut off is shared, nothing is reset
    loop, cut_off = Loop(in_turn()), group(RIGHT)
    cut_off.responses.append(response([10, 11, 12], 0.0, "length"))
    nothing = loop.credit([group(WRONG, WRONG), cut_off], algorithm(**RESETS))
    assert (loop.requests, nothing.metrics["skipped_pairs"]) == ([], 1)
    assert "reset_success" not in nothing.metrics


def test_the_sampler_gives_a_begun_response_back_whole():
    """So that the verifier reads all of it, and only what was sampled now is trained on."""
    (asked_about,) = make_prompts(0, 1)
    seen = []

    async def score(prompt, sample):
        seen.append(ids_of(sample.token_ids))
        judge(prompt, sample)

    sampler = Sampler([SimulatedEngine(STEP, lambda request: [41, 42])], score, stall_timeout=100.0)
    plain_ids = asked_about.token_ids
    asked = [
        SampleRequest(np.concatenate([plain_ids, token_ids([31, 32, 33])]), 1, 9, begun=3),
        SampleRequest(plain_ids, 2, 9),
    ]

    async def work():
        return await asyncio.wait_for(sampler.answer(asked_about, asked), 1000)

    begun, fresh = in_virtual_time(work())[0]
    assert sorted(seen) == [(31, 32, 33, 41, 42), (41, 42)]
    assert ids_of(begun.prompt_token_ids) == ids_of(plain_ids)
    assert ids_of(begun.loss_mask) == (False, False, False, True, True)
    assert len(begun.logprobs) == 5
    assert (begun.num_begun_tokens, fresh.num_begun_tokens) == (3, 0)
    assert fresh.loss_mask.all()
    # spans of versions keep their places
    sample = response([41, 42, 43], prompt=(1, 2, 31, 32))
    sample.versions = ((0, 6), (2, 7))
    whole = with_beginning(sample, 2)
    assert whole.versions == ((0, 6), (4, 7))
    assert whole.tokens_by_version() == [(6, 4), (7, 2)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ibpo_lambda": 2.0, "ibpo_beta": 0.5}, "λΔ must stay below 1"),
        ({"ibpo_lambda": math.nan}, "--ibpo-lambda: must be .*, is nan"),
        ({"ibpo_k": 0, "ibpo_corrections": -1}, r"(?s)--ibpo-k: .*is 0.*--ibpo-corrections: .*is -1"),
        (
            {"ibpo_beta": 1.1, "ibpo_rewrite_threshold": -0.1, "ibpo_correction_weight": -1.0}
            | {"ibpo_rewrite_penalty": -0.5},
            r"(?s)-beta: must .*1\.1.*-threshold: must .*-0\.1.*-weight: must .*-1.*-penalty: must .*-0\.5",
        ),
        ({"advantage_estimator": "gsop"}, "did you mean 'gspo'"),
        ({"advantages": "leave-out"}, r"--advantages leave-out.*'leave-one-out'"),
        (of_preset("gspo") | {"ibpo_lambda": 0.6}, "gspo with --ibpo-operator none has no such par.* has it"),
        ({"ibpo_operator": AGREEMENT, "ibpo_variant": "ratio"}, "ibpo_variant: 'ratio' is not one of"),
        ({"ibpo_corrections": 0}, r"--ibpo-corrections: must be .*for none, --ibpo-operator none\), is 0"),
        ({"ibpo_mask_insertions": True}, "--ibpo-mask-insertions"),
        ({"ibpo_variant": "signed-mask", "advantages": "critic"}, "--ibpo-variant signed-mask goes by the"),
        ({"ibpo_correction_group": "pair"}, "--ibpo-correction-group pair"),
        ({"ibpo_rewrite_penalty": 0.5, "ibpo_joint": False}, "--ibpo-rewrite-penalty acts on"),
        ({"ibpo_variant": "ratio", "ibpo_lambda": 1.0}, "--ibpo-lambda 1.0 times a share of up to 1 is 1"),
        (JOINING | {"ibpo_joint": True}, "a correction is trained on once"),
        (JOINING | {"ibpo_operator": AGREEMENT}, "--ibpo-operator compare-and-correct has it"),
        (JOINING | {"advantages": "critic"}, "--advantages critic compares none"),
        (RESETS | {"ibpo_corrections": 1}, r"--ibpo-corrections: must be between 2 and .*, is 1"),
        (RESETS | {"ibpo_joint": False}, f"--ibpo-joint: gspo with --ibpo-operator {RESET_GROUPS} has no"),
        (of_preset("ppo") | {"token_credit": "wrong-weight"}, "--token-credit wrong-weight compares"),
        ({"token_credit": "divergence-cut", "ibpo_variant": "mask"}, "--ibpo-variant mask both choose"),
        (of_preset("ciw") | {"token_credit": RANDOM_WINDOW}, "--ibpo-operator span-masking both choose"),
        ({"token_credit": RANDOM_WINDOW, "token_credit_unit": "step"}, "--token-credit divergence-.* has it"),
        ({"token_credit": "wrong-weight", "token_credit_weight": -1.0}, "--token-credit-weight: must be"),
        ({"token_credit": "wrong-weight-by-length", "token_credit_tokens": 0}, "--token-credit-tokens: must"),
        (GSPO | {"ciw_inverted": True}, "--ciw-inverted"),
        (of_preset("ciw") | {"ibpo_joint": True}, "--ibpo-joint: ciw with --ibpo-operator span-masking"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        check_algorithm(algorithm(**settings))


def test_settings_that_go_together_are_not_refused():
    for preset in PRESETS:
        check_algorithm(algorithm(preset))
    for fine in (
        JOINING, RESETS, {"ibpo_lambda": 1.5, "ibpo_beta": 0.5},
        {"token_credit": "wrong-weight", "ibpo_variant": "mask"},
        {"token_credit": "divergence-window", "ibpo_variant": "ratio"},
        of_preset("dapo") | {"token_credit": "divergence-window", "token_credit_unit": "step"},
        of_preset("ciw") | {"token_credit": "wrong-weight-by-length"},
    ):  # fmt: skip
        check_algorithm(algorithm(**fine))
    with pytest.raises(ValueError, match=r"--reward-threshold 0.3"):
        check_algorithm(algorithm(), reward_threshold=0.3)


def test_sampling_ahead_or_from_a_part_of_the_distribution_is_refused_where_credit_needs_more():
    gated, teacher = {"ibpo_operator": GATED}, GSPO | {"token_credit": "self-teacher"}
    for own, name, value, says in (
        (gated, "max_staleness", 1, "--ibpo-operator Gated: goes by the corrections of the steps"),
        (teacher, "rollout_top_p", 0.9, "--token-credit self-teacher: compares"),
        (teacher, "rollout_top_k", 20, "--token-credit self-teacher: compares"),
        (teacher, "rollout_top_p_cycle", (1.0, 0.9), "--token-credit self-teacher: compares"),
    ):
        config = Config(algorithm=algorithm(**own))
        config.model.hf_checkpoint, config.run.dry_run = Path(), True
        check_settings(config)
        setattr(config.rollout, name, value)
        with pytest.raises(ValueError, match=says):
            check_settings(config)


def test_presets_are_what_is_published():
    published = {
        "loss_variant": "gspo", "ibpo_lambda": 0.6, "ibpo_beta": 0.5, "ibpo_k": 2, "ibpo_corrections": 1,
        "ibpo_rewrite_threshold": 0.6, "ibpo_joint": True, "advantages": "group", "dynamic_sampling": False,
    }  # fmt: skip
    assert published.items() <= PRESETS["ibpo"].items()
    for name, differs in (
        ("grpo", {"loss_variant": "grpo"}),
        ("dapo", {"loss_variant": "dapo", "dynamic_sampling": True, "overlong_buffer_share": 0.2}),
        ("dr-grpo", {"loss_variant": "dr-grpo", "advantages": "group-mean"}),
    ):
        assert PRESETS["gspo"] | differs == PRESETS[name]
