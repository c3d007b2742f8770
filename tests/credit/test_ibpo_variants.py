"""The paper's variants and further operators by hand, leaks, the gate, and which settings go together."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gated import success_rate
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ibpo.basics.records import Group
from megatron_ibpo.config import PRESETS, Config
from megatron_ibpo.credit.compared_parts import ThinkingMarks, compared_pairs, part_in_prompt
from megatron_ibpo.credit.edits import find_edits, gradient_mask, mark_rewrites
from megatron_ibpo.credit.estimators import group_z_score
from megatron_ibpo.edit_distance import opcodes
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.run.checks import check_settings
from megatron_ibpo.run.cost import CostMeter
from support.credit_cases import (
    AGREEMENT,
    GATED,
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
    prompt,
    response,
    some_groups,
    token_weights,
)
from support.paths import ROOT

WRONG = [10, 11, 12, 14]


def test_ratio_gives_the_share_of_tokens_kept():
    """ŷ keeps three of y's four tokens: Δ = 3/4, r' = .45; mask and β play no part."""
    credit = Loop(fix_last).credit([group(RIGHT, WRONG)], algorithm("ibpo-ratio"))
    right, wrong = by_kind(credit, "response")
    assert [right.advantage, wrong.advantage] == group_z_score([1.0, 0.6 * 0.75])
    assert wrong.token_weights is None
    assert credit.metrics["shaped_reward"] == pytest.approx(1.45 / 2)


def test_mask_lets_the_gradient_through_changed_tokens_only():
    """ŷ replaces y's last token and ends as y does; Δ is β as in the base variant."""
    masked = Loop(fix_last).credit([group(RIGHT, WRONG)], algorithm("ibpo-mask"))
    base = Loop(fix_last).credit([group(RIGHT, WRONG)], algorithm("ibpo"))
    assert token_weights(masked.sequences) == [None, (0.0, 0.0, 0.0, 1.0, 0.0), None]
    assert [s.advantage for s in masked.sequences] == [s.advantage for s in base.sequences]
    assert masked.metrics["empty_masks"] == 0


def test_of_several_corrections_the_bonus_is_the_mean_and_the_mask_the_union():
    """Of four corrections two count: they change tokens 1 and 3. Δ = .5·2/4. A wrong one and a rewrite do
    not."""
    answers = in_turn([10, 19, 12, 14, 13], [10, 11, 12, 13], [18, 11, 12, 15], [40, 41, 42, 43, 44, 13])
    made = group(RIGHT, WRONG)
    credit = Loop(answers).credit([made], algorithm("ibpo-mask", ibpo_corrections=4))
    assert [c.response.correct for c in made.corrections] == [True, True, False, True]
    assert [c.rewritten for c in made.corrections] == [False, False, False, True]
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


def one_is_corrected(prompt_ids):
    """10 11 12 14 becomes 10 11 12 13; whatever else is shown becomes wrong."""
    return RIGHT if candidates(prompt_ids)[0] == WRONG else [20, 21]


def test_lambda_cancels_where_no_response_is_correct():
    """r' = λβ or 0 there, and the spread of the group divides λ out: at any λ the corrected one of four has
    advantage √3 (Bessel: 3/2, MaxRL: 3). Beside a correct response, and without the spread, λ counts."""
    wrong, with_right = [WRONG, [20, 21], [22, 23], [24, 25]], [WRONG, [20, 21], RIGHT]

    def advantage(contents, weight, estimator):
        config = algorithm("ibpo", ibpo_lambda=weight, advantages=estimator)
        credit = Loop(one_is_corrected).credit([group(*contents)], config)
        return credit.sequences[0].advantage

    for estimator, expected in (("group", math.sqrt(3)), ("group-bessel", 1.5), ("maxrl", 3.0)):
        for weight in (0.01, 0.6, 1.9):
            assert advantage(wrong, weight, estimator) == pytest.approx(expected, rel=1e-5)
        assert advantage(wrong, 0.0, estimator) == 0
        low, high = advantage(with_right, 0.3, estimator), advantage(with_right, 1.9, estimator)
        assert low < advantage(with_right, 0.6, estimator) < high
    assert advantage(wrong, 0.4, "group-mean") == pytest.approx(0.4 * 0.5 * 3 / 4)


def test_in_a_wrong_group_the_mask_raises_the_wrong_token_and_the_signed_mask_the_others():
    """All four are wrong and one is corrected: r' = .3 0 0 0, A = √3 for it. Eq. 17 then makes its wrong
    token likelier, and nothing else of it."""
    for variant, learns in (("mask", (0.0, 0.0, 0.0, 1.0, 0.0)), ("signed-mask", (1.0, 1.0, 1.0, 0.0, 1.0))):
        config = algorithm("ibpo-mask", ibpo_variant=variant)
        credit = Loop(one_is_corrected).credit([group(WRONG, [20, 21], [22, 23], [24, 25])], config)
        assert token_weights(by_kind(credit, "response")) == [learns, None, None, None]


@settings(max_examples=20)
@given(st.integers(0, 10_000))
def test_a_signed_mask_is_the_mask_or_the_rest_by_the_sign_of_the_advantage(seed):
    masked, signed = (
        Loop(fix_last).credit(some_groups(seed), algorithm("ibpo-mask", ibpo_variant=variant))
        for variant in ("mask", "signed-mask")
    )
    for one, other in zip(masked.sequences, signed.sequences, strict=True):
        assert one.advantage == other.advantage
        mask = ids_of(one.token_weights)
        if mask is not None and one.advantage > 0:
            mask = tuple(1 - m for m in mask)
        assert ids_of(other.token_weights) == mask


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
    ones: rewards 1, 1 - ρ, 0, -ρ with ρ = .5. The responses' own rewards do not pay."""
    answers = in_turn([10, 11, 12, 13], [20, 21, 22, 13], [10, 11, 12, 15], [20, 21, 22, 23])
    made = group([10, 11, 22, 13], WRONG)
    credit = Loop(answers).credit([made], algorithm("ibpo-rewrite-penalty"))
    assert [c.distance for c in made.corrections] == [0.25, 1.0, 0.25, 1.0]
    assert [c.beyond_threshold for c in made.corrections] == [False, True, False, True]
    std = math.sqrt((0.75**2 + 0.25**2 + 0.25**2 + 0.75**2) / 4)
    expected = [(reward - 0.25) / std for reward in (1.0, 0.5, 0.0, -0.5)]
    assert [s.advantage for s in by_kind(credit, "correction")] == pytest.approx(expected, abs=1e-6)
    assert [s.advantage for s in by_kind(credit, "response")] == group_z_score([1.0, 0.6 * 0.5 / 4])
    assert credit.metrics["beyond_threshold_rate"] == 0.5


def test_a_far_correction_pays_even_where_the_reference_makes_it_no_rewrite():
    """d(y, ŷ) > α, and ŷ is just as far from the reference: no rewrite, yet beyond α."""
    made = group([30, 31, 32, 13], WRONG)
    answers = in_turn([20, 21, 22, 23], [10, 11, 12, 15], [10, 11, 12, 16], [10, 11, 12, 17])
    credit = Loop(answers).credit([made], algorithm("ibpo-rewrite-penalty"))
    assert (made.corrections[0].rewritten, made.corrections[0].beyond_threshold) == (False, True)
    assert by_kind(credit, "correction")[0].advantage < 0


THINK, END_THINK = 80, 81
MARKS = ThinkingMarks((THINK,), (END_THINK,))


@pytest.mark.parametrize(
    ("prompt_ids", "content", "seen"),
    [
        ((1, 2), [4, THINK, 5, END_THINK, 7, THINK, 6, END_THINK, 8], [4, 7, 8]),
        ((1, 2), [7, THINK, 5], [7]),  # never closed
        ((1, THINK), [5, 6, END_THINK, 7], [7]),  # the prompt opens it
        ((1, THINK), [5, 6], []),
        ((THINK, 3, END_THINK), [5, 6], [5, 6]),  # opened and closed there
        ((1, 2), [5, END_THINK, 7], [7]),  # it was not opened
        ((1, 2), [], []),
    ],
)
def test_what_is_shown_of_a_solution_that_thinks(prompt_ids, content, seen):
    part = part_in_prompt(response(content, 0.0, prompt=prompt_ids), MARKS)
    assert part.ids.tolist() == seen
    assert [content[place] for place in part.places] == seen


def test_marks_of_several_tokens_are_found():
    marks = ThinkingMarks((60, 61), (60, 62))
    part = part_in_prompt(response([60, 61, 5, 60, 60, 62, 61, 7, 60], 0.0, prompt=(1,)), marks)
    assert part.ids.tolist() == [61, 7, 60]


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


ANSWER = 70
"""Token before the final answer, which is 13 where it is right."""
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


def test_where_no_answer_is_given_away_nothing_leaks():
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


def test_asking_depends_on_the_group_alone():
    """So that a journal replays it: the same prompts and seeds, whatever other groups there are."""
    together, _ = gated(some_groups(), {"1/4": [30, 31]})
    assert together == [x for made in some_groups() for x in gated([made], {"1/4": [30, 31]})[0]]


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


def test_sampling_ahead_knows_no_corrections_of_the_steps_before():
    config = Config(algorithm=algorithm(ibpo_operator=GATED))
    config.model.hf_checkpoint, config.run.dry_run = Path(), True
    check_settings(config)
    config.rollout.max_staleness = 1
    with pytest.raises(ValueError, match="--ibpo-operator Gated: goes by the corrections of the steps"):
        check_settings(config)


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
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        check_algorithm(algorithm(**settings))


def test_settings_that_go_together_are_not_refused():
    for preset in PRESETS:
        check_algorithm(algorithm(preset))
    check_algorithm(algorithm(ibpo_lambda=1.5, ibpo_beta=0.5))  # as shares they may not
    with pytest.raises(ValueError, match=r"--reward-threshold 0.3"):
        check_algorithm(algorithm(), reward_threshold=0.3)


def test_presets_are_what_is_published():
    assert PRESETS["ibpo"] == {
        "loss_variant": "gspo", "ibpo_operator": "compare-and-correct", "ibpo_variant": "base",
        "ibpo_lambda": 0.6, "ibpo_beta": 0.5, "ibpo_k": 2, "ibpo_corrections": 1,
        "ibpo_rewrite_threshold": 0.6, "ibpo_rewrite_penalty": 0.0, "ibpo_joint": True,
        "ibpo_plain_prompt": "none", "ibpo_correction_group": "prompt", "token_credit": "uniform",
        "advantages": "group", "dynamic_sampling": False, "dynamic_sampling_by": "credit",
        "overlong_buffer_share": 0.0,
    }  # fmt: skip
    gspo = algorithm("gspo")
    assert replace(algorithm("grpo"), advantage_estimator="gspo") == gspo, "they differ in the loss"
    dapo = algorithm("dapo")
    assert (dapo.dynamic_sampling, dapo.overlong_buffer_share) == (True, 0.2)
    alike = {"advantage_estimator": "gspo", "dynamic_sampling": False, "overlong_buffer_share": 0.0}
    assert replace(dapo, **alike) == gspo
    # Dr. GRPO: no std, and the loss is divided by a constant
    of_dr_grpo = {"advantages": "group-mean", "loss_variant": "dr-grpo"}
    assert PRESETS["gspo"] | of_dr_grpo == PRESETS["dr-grpo"]
