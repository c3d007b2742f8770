"""Variants and further operators by hand, leaks, when corrections pay, and which settings go together."""

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from gated import success_rate
from hypothesis import given
from hypothesis import strategies as st
from simulated_engines import SimulatedEngine, in_virtual_time

from megatron_ibpo.basics.records import Group, SampleRequest, token_ids
from megatron_ibpo.config import PRESETS, Config
from megatron_ibpo.credit import find_operator
from megatron_ibpo.credit.edits import find_edits, gradient_mask, mark_rewrites
from megatron_ibpo.credit.estimators import group_z_score
from megatron_ibpo.credit.metrics import composition_counts, learns_from_corrections, skill_needed
from megatron_ibpo.credit.pairing import ThinkingMarks, compared_pairs, part_in_prompt
from megatron_ibpo.edit_distance import distance, opcodes
from megatron_ibpo.models import forward_flops, read_hf_config
from megatron_ibpo.policy.loss_objective import loss_params
from megatron_ibpo.report.summary import break_even, break_even_lines
from megatron_ibpo.run.cost import CostMeter
from megatron_ibpo.run.settings import check_settings, parse_config
from megatron_ibpo.sampling import Sampler
from megatron_ibpo.sampling.requests import with_beginning
from megatron_ibpo.study.page import break_even_points
from megatron_ibpo.study.run_results import RunResult

from support.credit_cases import (  # isort: skip
    AGREEMENT, EOS, GATED, GSPO, PROMPT, RANDOM_WINDOW, RESET_GROUPS, RESUMED, RIGHT, Loop, algorithm,
    by_kind, candidates, check_algorithm, correction, fix_last, group, ids_of, in_turn, of_preset, plain,
    prompt, response, some_groups, token_weights, tokens_spent,
)  # fmt: skip
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


def test_several_corrections_give_a_mean_bonus_and_a_union_mask():
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
    for option, expected in ((False, changed), (True, changed | before)):
        pairs = compared_pairs([made], None)
        (flags,), edits = find_edits(pairs, mark_insertions=option)
        mark_rewrites(pairs, edits, 0.6, None)
        assert set(np.flatnonzero(flags).tolist()) == expected
        assert made.corrections[0].unmodified_share == pytest.approx(share), (option, expected)
        assert made.corrections[0].distance == distance(y, y_hat), (option, expected)
    assert len(gradient_mask([flags])) == len(y) + 1


def test_lambda_cancels_in_wrong_groups_and_the_signed_mask_inverts():
    """r' = λβ 0 0 0, and the spread of the group divides λ out. Eq. 17 then makes the wrong token likelier,
    and nothing else of the response."""

    def one_corrected(*contents, **settings):
        loop = Loop(lambda x: RIGHT if candidates(x)[0] == WRONG else [20, 21])
        return by_kind(loop.credit([group(*contents)], algorithm("ibpo-mask", **settings)), "response")

    wrong = WRONG, [20, 21], [22, 23], [24, 25]
    for estimator, expected in (("group", 3**0.5), ("group-bessel", 1.5), ("maxrl", 3.0)):
        for weight in (0.01, 1.9):
            corrected = one_corrected(*wrong, ibpo_lambda=weight, advantages=estimator)[0]
            assert corrected.advantage == pytest.approx(expected, rel=1e-5), (estimator, weight)
    assert one_corrected(*wrong, advantages="group-mean")[0].advantage == pytest.approx(0.3 * 3 / 4)
    changed, others = (0.0, 0.0, 0.0, 1.0, 0.0), (1.0, 1.0, 1.0, 0.0, 1.0)
    for variant, learns in (("mask", changed), ("signed-mask", others)):
        assert token_weights(one_corrected(*wrong, ibpo_variant=variant)) == [learns, None, None, None]
        assert token_weights(one_corrected(RIGHT, WRONG, ibpo_variant=variant)) == [None, changed]


def test_cipo_shows_the_wrong_answer_alone_and_trains_its_correction():
    """Rewards 1 0 0 0; of three corrections the first two are right."""
    loop = Loop(in_turn([13], [20, 13], [21]))
    credit = loop.credit([group(RIGHT, [14], [15], [16])], algorithm("cipo"))
    assert [candidates(asked) for asked in loop.asked] == [[[14]], [[15]], [[16]]]
    advantages = group_z_score([1.0, 0.0, 0.0, 0.0]) + group_z_score([1.0, 1.0, 0.0])
    assert [s.advantage for s in credit.sequences] == advantages


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


def test_correction_prompts_hide_the_thinking_of_a_solution():
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


def test_hidden_thinking_is_not_compared_but_keeps_its_gradient():
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


def test_agreement_is_the_share_of_steps_found_in_correct_responses():
    """Steps of `1+1=2+1=3#3`: `1+1=2`, `+1=3`, `#3`. The first wrong one has one step of three of those, the
    others none: λ = .6, r' = 1 .2 0 0 0 0 0 0 of mean .15."""

    def texts_of(ids):  # below 30 the digit of the last place
        return [{30: "+", 31: "=", 32: "#"}.get(i, str(i % 10)) for i in ids]

    def sums(*results):
        steps = [token for result in results for token in (30, 11, 31, 10 + result)]
        return [11, *steps, 32, 10 + results[-1]]

    right, near, far = sums(2, 3), sums(2, 4), sums(5, 6)
    # `1+1=2` agrees; `+1=4` and `#4` do not; both end. The near one becomes likelier, which turns the mask
    masks = {"mask": (*[0] * 5, *[1] * 6, 0), "signed-mask": (*[1] * 5, *[0] * 6, 1)}
    for variant, mask in masks.items():
        config = algorithm("ibpo-shaping-only", ibpo_operator=AGREEMENT, ibpo_variant=variant)
        made, texts = group(right, near, *[far] * 6), {"token_texts": texts_of}
        credit = Loop(fix_last).credit([made], config, vocabulary=texts)
        assert [s.advantage for s in credit.sequences] == group_z_score([1.0, 0.6 / 3, *[0.0] * 6]), (
            variant,
            mask,
        )
        assert credit.metrics["agreement"] == pytest.approx(1 / 21), (variant, mask)
        assert token_weights(credit.sequences[:2]) == [None, mask]


def test_a_correction_that_takes_over_only_the_answer_leaks():
    """Token 70 comes before the final answer, which is 13 where it is right."""
    answer, steps = 70, list(range(20, 40))
    not_yet, solved = [*steps, answer, 14], [*steps[:10], *range(40, 50), answer, 13]

    def answer_start(prompt, ids):
        marks = [place for place, token in enumerate(ids.tolist()) if token == answer]
        return marks[-1] + 1 if marks else None

    def leaked(wrong, right, corrected, start=answer_start):
        loop = Loop(lambda x: corrected)
        return loop.credit([group(wrong, right)], algorithm(), vocabulary={"answer_start": start})

    taken_over = [*steps, answer, 13]
    for wrong, right, corrected, leaks in (
        (not_yet, solved, [*steps, 60, 61, answer, 13], 1),  # nothing but the answer and "so it is" is new
        (not_yet, solved, [*steps, 60, 61, 62, answer, 13], 0),  # more than a tenth is its own
        (not_yet, solved, [*steps[:19], 40, answer, 13], 0),  # the last step is repaired
        (not_yet, solved, [answer, 13], 1),  # no derivation at all
        (not_yet, solved, [20, 21, answer, 13], 0),  # a tenth of the reference's
        (not_yet, solved, solved, 0),  # a copy is a derivation; it is measured as such
        (not_yet, solved, [*steps, answer, 15], 0),  # wrong itself
        (not_yet, solved, [*steps, 13], 0),  # says no answer
        (not_yet, [*solved[:-1], 14], taken_over, 0),  # no reference is right
        (steps, solved, taken_over, 0),  # an answer that was cut off is completed
    ):
        assert leaked(wrong, right, corrected).metrics["reference_leakage_rate"] == leaks, corrected
    flagged, unknown = (leaked(not_yet, solved, taken_over, start) for start in (answer_start, None))
    assert "reference_leakage_rate" not in unknown.metrics
    assert plain(flagged.sequences) == plain(unknown.sequences)


def gated(groups, memory=None, correct=fix_last, **settings):
    """(the corrections' prompts, the credit) where a token costs 1 to read, 1 to write and 3 to train on"""

    def by_token(prompt, response, *, sharing, trained):
        return prompt / sharing + response + 3 * trained

    loop, config = Loop(correct), algorithm(ibpo_operator=GATED, **settings)
    credit = loop.credit(groups, config, price=by_token, memory=memory or {})
    return loop.asked, credit


def test_the_gate_opens_where_corrections_beat_rollouts_of_equal_cost():
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


def test_a_rescue_corrects_only_groups_without_a_correct_response():
    asked, credit = gated([group(RIGHT, WRONG), group(WRONG, WRONG)], {"1/2": [9, 9]}, ibpo_rescue_only=True)
    assert len(asked) == 2
    assert credit.metrics["gated_pairs"] == 1


def test_the_gate_remembers_correction_success_by_composition_and_forgets_slowly():
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


def test_a_resumed_correction_writes_only_its_end():
    """[10, 11, 15] leaves [10, 11, 12, 13] after two tokens: they are given, and only the rest is trained on
    behind the plain prompt. Its reference is the right response; rewards 1 0 1."""
    loop = Loop(lambda x: [12, 13])
    credit = loop.credit([group(RIGHT, [10, 11, 15])], algorithm(ibpo_operator=RESUMED))
    (request,) = loop.requests
    assert (ids_of(request.prompt_token_ids)[-2:], request.num_begun_tokens) == ((10, 11), 2)
    assert request.max_tokens == 8 - 2
    (one,) = by_kind(credit, "correction")
    assert (ids_of(one.prompt_token_ids), ids_of(one.response_token_ids)) == (PROMPT, (*RIGHT, EOS))
    assert one.loss_mask.tolist() == [False, False, True, True, True]
    assert [s.advantage for s in credit.sequences] == pytest.approx(
        [math.sqrt(0.5), -math.sqrt(2), math.sqrt(0.5)], abs=1e-6
    )
    assert (credit.metrics["correction_success"], credit.metrics["correction_begun_length"]) == (1, 2)


def test_a_response_equal_to_its_reference_is_corrected_whole():
    loop = Loop(lambda x: RIGHT)
    loop.credit([group(WRONG, WRONG)], algorithm(ibpo_operator=RESUMED))
    assert [request.num_begun_tokens for request in loop.requests] == [0, 0]
    control = Loop(lambda x: RIGHT)
    control.credit([group(WRONG, WRONG)], algorithm(ibpo_operator=RESUMED, ibpo_resume_at="random"))
    assert all(0 <= request.num_begun_tokens < len(WRONG) for request in control.requests)
    with pytest.raises(ValueError, match="a resumed correction is no rewrite and earns no bonus"):
        check_algorithm(algorithm(ibpo_operator=RESUMED, ibpo_lambda=0.6))
    with pytest.raises(ValueError, match="a resumed correction has no mask"):
        check_algorithm(algorithm(ibpo_operator=RESUMED, ibpo_variant="mask"))


def test_joining_gives_wrong_groups_a_contrast_and_needs_a_success():
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


def test_critique_grpo_adds_one_refinement_preferably_right():
    """Rewards 1 0 0 and that of the second refinement, 1: less their mean, .5 -.5 -.5 .5. In a group without
    a right refinement the first joins and is punished: 1 0 0 less 1/3."""
    one = {"ibpo_plain_prompt": "one", "advantages": "group-mean"}
    right = joined(RIGHT, WRONG, FAR, answers={14: FAILS, 23: RIGHT}, **one)
    assert [s.advantage for s in right.sequences] == pytest.approx([0.5, -0.5, -0.5, 0.5])
    assert [s.index for s in by_kind(right, "correction")] == [1]
    wrong = joined(RIGHT, WRONG, answers={14: FAILS}, **one)
    assert [s.advantage for s in wrong.sequences] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert wrong.sequences[2].off_policy


def test_the_cost_meter_agrees_with_the_recipes():
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
    # the price that the gate goes by
    meter = CostMeter(read_hf_config(ROOT / "examples/tiny_qwen3"), 1)
    meter.sampling(group(WRONG, RIGHT, WRONG, WRONG).responses)
    meter.training([], [8] * 4)
    assert 4 * meter.of_sample(3, 5, sharing=4, trained=8) == pytest.approx(meter.spent.flops, rel=1e-12)


def test_a_reset_starts_where_wrong_and_right_responses_part():
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
    with_start = np.concatenate([asked_about.token_ids, token_ids([31, 32, 33])])
    asked = [SampleRequest(with_start, 1, 9, num_begun_tokens=3), SampleRequest(asked_about.token_ids, 2, 9)]
    begun, fresh = in_virtual_time(sampler.answer(asked_about, asked))[0]
    assert sorted(seen) == [(31, 32, 33, 41, 42), (41, 42)]
    assert ids_of(begun.prompt_token_ids) == ids_of(asked_about.token_ids)
    assert ids_of(begun.loss_mask) == (False, False, False, True, True)
    assert len(begun.logprobs) == 5
    assert fresh.loss_mask.all()
    # spans of versions keep their places
    sample = response([41, 42, 43], prompt=(1, 2, 31, 32))
    sample.versions = ((0, 6), (2, 7))
    assert with_beginning(sample, 2).tokens_by_version() == [(6, 4), (7, 2)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ibpo_lambda": 2.0, "ibpo_beta": 0.5}, "λΔ must stay below 1"),
        ({"ibpo_lambda": math.nan}, "--ibpo-lambda: must be .*, is nan"),
        ({"ibpo_k": 0, "ibpo_corrections": -1}, r"(?s)--ibpo-k: .*is 0.*--ibpo-corrections: .*is -1"),
        ({"ibpo_beta": 1.1, "ibpo_rewrite_penalty": -0.5}, r"(?s)-beta: must .*1\.1.*-penalty: must .*-0\.5"),
        ({"advantage_estimator": "gsop"}, "did you mean 'gspo'"),
        ({"advantages": "leave-out"}, r"--advantages leave-out.*'leave-one-out'"),
        (of_preset("gspo") | {"ibpo_lambda": 0.6}, "gspo with --ibpo-operator none has no such par.* has it"),
        ({"ibpo_operator": AGREEMENT, "ibpo_variant": "ratio"}, "ibpo_variant: 'ratio' is not one of"),
        ({"ibpo_corrections": 0}, r"--ibpo-corrections: must be .*for none, --ibpo-operator none\), is 0"),
        ({"ibpo_mask_insertions": True}, "--ibpo-mask-insertions"),
        ({"ibpo_variant": "signed-mask", "advantages": "critic"}, "--ibpo-variant signed-mask goes by one"),
        ({"ibpo_correction_group": "pair"}, "--ibpo-correction-group pair"),
        ({"ibpo_rewrite_penalty": 0.5, "ibpo_joint": False}, "--ibpo-rewrite-penalty acts on"),
        ({"ibpo_joint_on": "successful", "ibpo_joint": False}, "--ibpo-joint-on successful chooses among"),
        ({"ibpo_variant": "ratio", "ibpo_lambda": 1.0}, "--ibpo-lambda 1.0 times a share of up to 1 is 1"),
        ({"advantages": "maxrl", "overlong_buffer_share": 0.2}, "--advantages maxrl takes the log"),
        ({"advantages": "maxrl", "ibpo_rewrite_penalty": 0.5}, "--advantages maxrl takes the log"),
        (of_preset("ciw") | {"dynamic_sampling_by": "credit"}, "--dynamic-sampling-by credit judges groups"),
        (JOINING | {"ibpo_joint": True}, "a correction is trained on once"),
        (JOINING | {"ibpo_operator": AGREEMENT}, "--ibpo-operator compare-and-correct has it"),
        (JOINING | {"advantages": "critic"}, "--ibpo-plain-prompt successful goes by one advantage"),
        (RESETS | {"ibpo_corrections": 1}, r"--ibpo-corrections: must be between 2 and .*, is 1"),
        (RESETS | {"ibpo_joint": False}, f"--ibpo-joint: gspo with --ibpo-operator {RESET_GROUPS} has no"),
        (of_preset("ppo") | {"token_credit": "wrong-weight"}, "--token-credit wrong-weight goes by one"),
        ({"token_credit": "divergence-cut", "ibpo_variant": "mask"}, "--ibpo-variant mask both choose"),
        (of_preset("ciw") | {"token_credit": RANDOM_WINDOW}, "--ibpo-operator span-masking both choose"),
        ({"token_credit": RANDOM_WINDOW, "token_credit_unit": "step"}, "--token-credit divergence-.* has it"),
        (GSPO | {"ciw_inverted": True}, "--ciw-inverted"),
        (of_preset("ciw") | {"ibpo_joint": True}, "--ibpo-joint: ciw with --ibpo-operator span-masking"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        check_algorithm(algorithm(**settings))


def test_settings_that_go_together_are_not_refused():
    for preset in PRESETS:
        check_algorithm(own := algorithm(preset))
        assert (own.dynamic_sampling_by == "credit") is bool(own.parameters.get("ibpo_corrections")), preset
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


def test_credit_that_needs_fresh_or_full_sampling_refuses_otherwise():
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


def test_presets_match_the_publications():
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
    dapo = parse_config(["--advantage-estimator", "dapo"]).loss
    assert (dapo.loss_variant, loss_params(dapo)) == ("dapo", {"eps_low": 0.2, "eps_high": 0.28})


@given(p=st.floats(0.01, 0.99), q=st.floats(0.01, 0.99), price=st.floats(1, 6), spent=st.floats(0.5, 50))
def test_the_skill_law_says_which_way_first_finds_a_success(p, q, price, spent):
    needed = skill_needed(p, price, first=True)
    by_corrections, by_responses = 1 - (1 - q) ** (spent / price), 1 - (1 - p) ** spent
    if abs(q - needed) > 1e-6 and max(by_corrections, by_responses) < 1 - 1e-9:
        assert (q > needed) == (by_corrections > by_responses)


def test_outcomes_are_counted_by_whether_the_rest_contains_a_success():
    def group_of(outcomes, corrected):
        responses, answers = ([response([7], float(ok)) for ok in oks] for oks in (outcomes, corrected))
        wrong = [place for place, correct in enumerate(outcomes) if not correct]
        return Group(prompt(), responses, [correction(i, own) for i, own in zip(wrong, answers, strict=True)])

    groups = [
        group_of([1, 0, 0, 0], [1, 0, 0]),  # the correct one is alone among wrong ones, the others are not
        group_of([0, 0, 0, 0], [1, 0, 0, 0]),
        group_of([1, 1, 0, 0], [1, 1]),
    ]
    assert composition_counts(groups) == {
        "responses_alone": 5, "responses_alone_correct": 1,
        "corrections_alone": 4, "corrections_alone_correct": 1,
        "responses_accompanied": 7, "responses_accompanied_correct": 2,
        "corrections_accompanied": 5, "corrections_accompanied_correct": 3,
    }  # fmt: skip
    unscored = group_of([0, 0, 0], [1, 1, 1])
    unscored.responses[0].reward = unscored.corrections[0].response.reward = None
    counts = composition_counts([unscored])
    assert (counts["responses_alone"], counts["corrections_alone"]) == (2, 2)


def test_the_metered_price_is_that_of_sampling_and_update():
    """Two responses of 5 tokens to one prompt of 3, and a correction of 5 to a prompt of 13."""
    made = group(WRONG, [20, 14, 14, 14])
    credit = Loop(lambda x: RIGHT).credit([made], algorithm())
    made.corrections.pop()
    responses, corrections = by_kind(credit, "response"), by_kind(credit, "correction")
    shape = read_hf_config(ROOT / "examples/tiny_qwen3")
    f = [forward_flops(shape, n) for n in range(19)]
    of_response = (f[3] + 2 * (f[8] - f[3]) + 2 * 3 * f[8]) / 2
    meter = CostMeter(shape, 1)
    price = meter.correction_price([made], [*responses, corrections[0]])
    assert price == pytest.approx((f[18] + 3 * f[18]) / of_response)
    assert meter.correction_price([made], responses) == pytest.approx(f[18] / of_response)
    assert meter.correction_price([group(RIGHT)], responses) is None
    assert meter.spent.flops == 0  # asking costs nothing


def test_a_run_and_a_study_say_where_corrections_stand():
    def step(price, **tried):
        """A step's row: of responses_alone=(20, 3) and so on, 3 of 20 were right."""
        row = {"kind": "step", "correction_price": price}
        for name in map("_".join, product(("responses", "corrections"), ("alone", "accompanied"))):
            row[name], row[f"{name}_correct"] = tried.get(name, (0.0, 0.0))
        return row | {"corrections": row["corrections_alone"] + row["corrections_accompanied"]}

    rare = step(2.0, responses_alone=(1000, 50), corrections_alone=(400, 200))
    frequent = step(5.0, responses_accompanied=(1000, 600), corrections_accompanied=(200, 100))
    without = {"kind": "step", "reward": 0.5}
    found = break_even([rare, frequent, without])
    assert found["price"] == pytest.approx((2 * 400 + 5 * 200) / 600)
    assert found["alone"]["needed"] == pytest.approx(1 - 0.95**3)
    assert found["accompanied"]["needed"] == pytest.approx(1.8)
    assert (found["alone"]["pays"], found["accompanied"]["pays"]) == (True, False)
    assert found["alone"]["skill"]["low"] == pytest.approx(0.451, abs=1e-3)
    price, alone, _, origin = break_even_lines(found)
    assert "only such a run tells" in origin
    assert price == "A correction costs as much as 3.0 responses."
    assert alone.endswith("worth their cost from 14% on, so these are.")
    doubtful = break_even([step(3.0, responses_alone=(40, 4), corrections_alone=(20, 5))])
    assert (doubtful["alone"]["pays"], "accompanied" in doubtful) == (None, False)
    assert "from 27% on; there were too few to tell" in break_even_lines(doubtful)[-2]
    hopeless = break_even([step(3.0, responses_alone=(40, 0), corrections_alone=(20, 0))])
    told = "cannot be told: no retry succeeded, and no correction."
    assert break_even_lines(hopeless)[-2].endswith(told)
    assert break_even([without]) is None
    assert break_even_lines(None) == []
    points = break_even_points([RunResult("ibpo", 0, {}, 8, 1, {}, [], 0, [], 8, {}, {}, break_even=found)])
    assert [point.margin for point in points] == pytest.approx([0.5 - (1 - 0.95**3), 0.5 - 1.8])


def test_only_training_on_corrected_texts_consults_the_skill_law():
    plain_prompt = ["--config", str(ROOT / "examples/algorithms/ibpo_plain_prompt.yaml")]
    learning, shaping = (["--advantage-estimator", name] for name in ("ibpo", "ibpo-shaping-only"))
    operators = [find_operator(parse_config(flags).algorithm) for flags in (learning, plain_prompt, shaping)]
    assert [learns_from_corrections(operator) for operator in operators] == [True, True, False]
