"""Reset groups: from where a response goes on, what its suffixes are compared with, and what they cost."""

import asyncio

import numpy as np
import pytest
from simulated_engines import SimulatedEngine, in_virtual_time

from megatron_ibpo.basics.records import SampleRequest, token_ids
from megatron_ibpo.sampling import Sampler
from megatron_ibpo.sampling.requests import with_beginning
from support.credit_cases import (
    EOS,
    GSPO,
    PROMPT,
    RESET_GROUPS,
    RIGHT,
    Loop,
    algorithm,
    by_kind,
    check_algorithm,
    group,
    ids_of,
    in_turn,
    plain,
    response,
    tokens_spent,
)
from support.sampling_cases import STEP, judge, make_prompts

WRONG = [10, 11, 12, 14]
RESETS = GSPO | {"ibpo_operator": RESET_GROUPS, "ibpo_corrections": 2}


def test_a_wrong_response_goes_on_where_it_leaves_a_right_one_by_hand():
    """10 11 12 14 shares 10 11 12 with 10 11 12 13, and 20 21 shares nothing. Of the first, one suffix
    of two is right: ½ and -½, on the suffix alone. Of the second, neither."""
    loop = Loop(in_turn([13], [14], [20], [21, 22]))
    made = [group(RIGHT, WRONG, [20, 21])]
    credit = loop.credit(made, algorithm(**RESETS))
    assert loop.asked == [(*PROMPT, 10, 11, 12)] * 2 + [PROMPT] * 2
    assert [r.max_tokens for r in loop.requests] == [5, 5, 8, 8]
    assert len({r.seed for r in loop.requests}) == 4
    suffixes = by_kind(credit, "correction")
    assert [s.advantage for s in suffixes] == [0.5, -0.5, 0.0, 0.0]
    assert [ids_of(s.prompt_token_ids) for s in suffixes] == [PROMPT] * 4
    assert ids_of(suffixes[0].response_token_ids) == (10, 11, 12, 13, EOS)
    assert ids_of(suffixes[0].loss_mask) == (False, False, False, True, True)
    assert suffixes[0].num_trained_tokens == 2
    assert {s.weight for s in credit.sequences} == {1 / 3}
    assert credit.metrics["reset_success"] == 0.25
    assert credit.metrics["reset_shared_length"] == 1.5
    assert credit.metrics["degenerate_correction_groups"] == 1
    assert credit.metrics["tokens_reset_suffixes"] == 2 + 2 + 2 + 3


def test_the_responses_are_those_of_gspo():
    credit = Loop(in_turn([13], [14])).credit([group(RIGHT, WRONG)], algorithm(**RESETS))
    gspo = Loop(in_turn()).credit([group(RIGHT, WRONG)], algorithm(**GSPO))
    assert plain(by_kind(credit, "response")) == plain(gspo.sequences)


def test_the_longest_shared_prefix_counts():
    loop = Loop(in_turn([13], [13]))
    loop.credit([group([10, 13], RIGHT, WRONG)], algorithm(**RESETS))
    assert loop.asked == [(*PROMPT, 10, 11, 12)] * 2


def test_without_a_right_response_or_without_room_nothing_is_asked():
    loop = Loop(in_turn())
    cut_off = group(RIGHT)
    cut_off.responses[0] = response([10, 11, 12, 13], 1.0)
    cut_off.responses.append(response([10, 11, 12], 0.0, "length"))  # all of it is shared
    credit = loop.credit([group(WRONG, WRONG), cut_off], algorithm(**RESETS))
    assert loop.requests == []
    assert credit.metrics["skipped_pairs"] == 1
    assert "reset_success" not in credit.metrics


def test_the_meter_counts_what_the_recipe_says():
    """|x| = 3, |y| = 5, f = 3, K = 2: reads |x| + f once, writes K(|y| - f), trains K(|x| + |y|)."""
    made, plainly = [group(RIGHT, WRONG)], [group(RIGHT, WRONG)]
    credit = Loop(in_turn([13], [14])).credit(made, algorithm(**RESETS))
    gspo = Loop(in_turn()).credit(plainly, algorithm(**GSPO))
    assert tokens_spent(made, credit) - tokens_spent(plainly, gspo) == (3 + 3) + 2 * (5 - 3) + 2 * (3 + 5)


def test_the_sampler_gives_a_begun_response_back_whole():
    """So that the verifier reads all of it, and only what was sampled now is trained on."""
    (prompt,) = make_prompts(0, 1)
    seen = []

    async def score(prompt, sample):
        seen.append(ids_of(sample.token_ids))
        judge(prompt, sample)

    sampler = Sampler([SimulatedEngine(STEP, lambda request: [41, 42])], score, stall_timeout=100.0)
    asked = [
        SampleRequest(np.concatenate([prompt.token_ids, token_ids([31, 32, 33])]), 1, 9, begun=3),
        SampleRequest(prompt.token_ids, 2, 9),
    ]

    async def work():
        return await asyncio.wait_for(sampler.answer(prompt, asked), 1000)

    begun, fresh = in_virtual_time(work())[0]
    assert sorted(seen) == [(31, 32, 33, 41, 42), (41, 42)]
    assert ids_of(begun.prompt_token_ids) == ids_of(prompt.token_ids)
    assert ids_of(begun.loss_mask) == (False, False, False, True, True)
    assert len(begun.logprobs) == 5
    assert (begun.num_begun_tokens, fresh.num_begun_tokens) == (3, 0)
    assert fresh.loss_mask.all()


def test_spans_of_versions_keep_their_places():
    sample = response([41, 42, 43], prompt=(1, 2, 31, 32))
    sample.versions = ((0, 6), (2, 7))
    whole = with_beginning(sample, 2)
    assert whole.versions == ((0, 6), (4, 7))
    assert whole.tokens_by_version() == [(6, 4), (7, 2)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ibpo_corrections": 1}, r"--ibpo-corrections: must be between 2 and .*, is 1"),
        (
            {"ibpo_joint": False},
            f"--ibpo-joint: gspo with --ibpo-operator {RESET_GROUPS} has no such parameter",
        ),
        ({"ibpo_variant": "mask"}, "--ibpo-operator compare-and-correct has it"),
    ],
)
def test_what_cannot_be_had_with_it_is_refused(settings, says):
    check_algorithm(algorithm(**RESETS))
    with pytest.raises(ValueError, match=says):
        check_algorithm(algorithm(**RESETS | settings))
