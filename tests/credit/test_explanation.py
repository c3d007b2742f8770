"""The explanations of credit: a reader recomputes every advantage from what is shown."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from megatron_ibpo.basics.records import Group
from megatron_ibpo.config import RolloutConfig
from megatron_ibpo.config.presets import PRESETS
from megatron_ibpo.credit import Judgement, Operator, assign_credit, find_method
from megatron_ibpo.credit.explanation import Line

from support.credit_cases import (  # isort: skip
    AGREEMENT, GATED, RANDOM_WINDOW, RESET_GROUPS, RIGHT, TURN_GROUPS, Loop, algorithm, context,
    correction, group, prompt, response, some_groups,
)  # fmt: skip

ON_GSPO = {"advantage_estimator": "gspo"}
CASES: dict[str, dict] = {
    **{name: {"advantage_estimator": name} for name in PRESETS},
    "graded": {"advantage_estimator": "ibpo", "ibpo_lambda": 0.1},
    "withheld": {"advantage_estimator": "ibpo"},
    "overlong": {"advantage_estimator": "ibpo", "overlong_buffer_share": 0.5},
    "bessel": ON_GSPO | {"advantages": "group-bessel"},
    "leave-one-out": ON_GSPO | {"advantages": "leave-one-out"},
    "maxrl": {"advantage_estimator": "ibpo-shaping-only", "advantages": "maxrl"},
    "agreement": ON_GSPO | {"ibpo_operator": AGREEMENT, "ibpo_lambda": 0.6},
    "reset-groups": ON_GSPO | {"ibpo_operator": RESET_GROUPS},
    "gated": {"advantage_estimator": "ibpo", "ibpo_operator": GATED},
    "random-window": ON_GSPO | {"token_credit": RANDOM_WINDOW},
    "turn-groups": ON_GSPO | {"advantages": TURN_GROUPS, "loss_variant": "token"},
}
TEXTS = {"token_texts": lambda ids: [f"{token} " for token in ids.tolist()], "placeholder_id": 0}


def lent():
    """What a running policy would lend, made up."""
    return {
        "logprobs": lambda queries: [np.full(len(q.continuation), -0.1 * (i + 1), np.float32)
                                     for i, q in enumerate(queries)],
        "values": lambda sequences: [np.full(len(s.response_token_ids), 0.3, np.float32) for s in sequences],
        "price": lambda prompt, response, *, sharing, trained: float(prompt + response + trained),
        "vocabulary": TEXTS,
        "rollout": RolloutConfig(rollout_max_response_len=6),
    }  # fmt: skip


def corrected(prompt_ids):
    """Corrections of which some are right, and some far from the response."""
    return [10, 11, 12, 13] if sum(prompt_ids) % 3 else [10, 13, 7, 8, 9, 14]


def graded(step):
    """Rewards that are partial for wrong answers: 0, one step or two."""
    return lambda answer: (
        1.0 if answer.content_ids[-1:].tolist() == [13] else step * (len(answer.token_ids) % 3)
    )


def of_case(name):
    """The settings of a case, the credit of a step, and its groups."""
    config = algorithm(**CASES[name])
    groups = [group(RIGHT, [10, 11, 14], [10, 12, 13], [15, 16, 17, 18, 14], index=1), *some_groups(4)]
    reward = {"graded": graded(0.1), "withheld": graded(0.4)}.get(name)
    if reward is not None:
        for own in groups:
            own.responses = [replace(r, reward=reward(r), correct=reward(r) >= 1) for r in own.responses]
    groups[0].responses.append(response([10, 14], None))
    loop = Loop(corrected, reward)
    return config, loop.credit(groups, config, **lent()), groups


SUMS = str.maketrans({"−": "-", "·": "*", "√": "R"})


def shown(explanation):
    """Name → (the value shown, the value of the sum shown or None), read from the text alone."""
    values = {}
    for name, rest in (line.split(": ", 1) for line in str(explanation).splitlines()):
        *total, value = re.sub(r" \(([a-zA-Zβ]|\d+ of).*\)$", "", rest).split(" = ")
        numeric = re.fullmatch(r"−?[\d.]+(e[-−+]?\d+)?", value)
        value = float(value.replace("−", "-")) if numeric else value
        values[name] = (value, eval(total[-1].translate(SUMS), {"R": math.sqrt}) if total else None)
    return values


def near(value):
    return pytest.approx(value, rel=2e-4, abs=2e-5)


def comparisons(credit, groups, operator):
    """For every sample that was compared: (its lines, those that it was compared with, its sequence)."""
    sequences = {(s.group, s.kind, s.index): s for s in credit.sequences}
    for place, (explained, made) in enumerate(zip(credit.explanations, groups, strict=True)):
        responses, corrections = (
            list(map(shown, own)) for own in (explained.responses, explained.corrections)
        )
        scored = [lines for lines in responses if lines["verified reward r"][0] != "none"]
        assert len(scored) == len(responses) - (place == 0), "one verifier failed"
        joined = (
            [lines for lines in corrections if "trained on" not in lines] if not operator.ibpo_joint else []
        )
        for index, lines in enumerate(scored):
            yield lines, [*scored, *joined], sequences[place, "response", index]
        for index, lines in enumerate(corrections if operator.ibpo_joint else ()):
            own = made.corrections[index].target
            by_pair = operator.ibpo_correction_group == "pair"
            others = [
                c
                for c, m in zip(corrections, made.corrections, strict=True)
                if not by_pair or m.target == own
            ]
            yield lines, others, sequences[place, "correction", index]


@pytest.mark.parametrize("name", CASES)
def test_the_explanation_suffices_to_recompute_every_advantage(name):
    config, credit, groups = of_case(name)
    method = find_method(config)
    text = "\n".join(map(str, credit.explanations))
    assert ("overlong penalty" in text) == (config.overlong_buffer_share > 0)
    assert ("(−ρ)" in text) == (name == "ibpo-rewrite-penalty")
    assert ("is withheld" in text) == (name == "withheld")
    sums = 0
    for lines, compared, sequence in comparisons(credit, groups, method.operator):
        reward, _ = lines["verified reward r"]
        if (shaped := lines.get("shaped reward r′")) is not None:
            assert shaped[0] == near(shaped[1] if shaped[1] is not None else reward), (
                lines,
                compared,
                sequence,
            )
            if "φ = Δ" in lines and shaped[1] is not None and name not in ("overlong", "withheld"):
                assert shaped[0] == near(reward + method.operator.ibpo_lambda * lines["φ = Δ"][0])
        assert sequence.reward == near((shaped or lines["verified reward r"])[0])
        value, total = lines["advantage"]
        assert sequence.advantage == near(value)
        assert lines["weight in the loss"][0] == near(sequence.weight)
        if sequence.token_weights is not None:
            mean = sequence.token_weights[sequence.loss_mask].mean()
            assert lines["mean token weight"][0] == near(mean)
        if config.trains_critic:
            continue
        rewards = [own.get("shaped reward r′", own["verified reward r"])[0] for own in compared]
        assert lines["group mean"][0] == near(np.mean(rewards))
        assert lines["group σ"][0] == near(np.std(rewards))
        if total is not None:
            assert value == near(total), (lines, compared, sequence)
            sums += 1
        else:
            assert name == "turn-groups" or value == 0, (lines, compared, sequence)
    assert sums > 3 or name in ("turn-groups", "ppo", "ibpo-on-ppo")


def test_the_words_of_compare_and_correct_are_the_papers():
    """β, α, both distances and the bonus; λ and φ; who was left out."""
    failed = response([10, 14], None)
    made = Group(prompt(), [*group(RIGHT, [10, 11, 12, 14], [7, 8, 9, 14]).responses, failed])
    made.corrections = [
        correction(1, response(RIGHT, 1.0), (0,)), correction(2, response([10, 11, 13], 1.0), (0,)),
    ]  # fmt: skip
    known = context(algorithm("ibpo"))
    credit = assign_credit([made], known, find_method(known.algorithm))
    (explained,) = credit.explanations
    right, corrected_one, rewritten, unscored = explained.responses
    assert right["shaped reward r′"] == 1.0
    assert str(corrected_one).splitlines()[:4] == [
        "verified reward r: 0",
        "rewrite test of correction 1: no rewrite (distance 0.25 from the response is not above α = 0.6)",
        "φ = Δ: 0.5 (β = 0.5, for a right correction that is no rewrite)",
        "shaped reward r′: r + λφ = 0 + 0.6·0.5 = 0.3",
    ]
    distances = (
        "distance 1 from the response is above α = 0.6 and above 0.25, that from the nearest reference"
    )
    assert str(rewritten).splitlines()[1] == f"rewrite test of correction 2: rewrite ({distances})"
    assert rewritten["φ = Δ"] == 0
    assert (
        str(unscored) == "verified reward r: none (the verifier failed: left out of comparison and training)"
    )
    assert "made for: response 3, shown beside response 1" in str(explained.corrections[1])
    with pytest.raises(KeyError, match="beta: not among verified reward r"):
        corrected_one["beta"]


class Half(Operator):
    """A user's operator: half of λ for every wrong response."""

    ibpo_joint = False
    words: list | None = None

    def judge(self, groups, context):
        phi = [[0.0 if response.correct else 0.5 for response in own.responses] for own in groups]
        return Judgement(phi, explanations=self.words)


def test_an_operator_without_explanations_gets_the_general_lines():
    made, operator, config = [group(RIGHT, [14])], Half(), algorithm("gspo")
    (explained,) = Loop(corrected).credit(made, config, operator=operator).explanations
    assert str(explained.responses[1]).splitlines()[:3] == [
        "verified reward r: 0", "φ: 0.5", "shaped reward r′: r + λφ = 0 + 0.6·0.5 = 0.3",
    ]  # fmt: skip
    operator.words = [[[Line("luck", "good")], []]]
    (explained,) = Loop(corrected).credit(made, config, operator=operator).explanations
    assert explained.responses[0]["luck"] == "good"
    operator.words = [[["luck"], []]]
    with pytest.raises(ValueError, match="explanations hold 'luck', which is no Line"):
        Loop(corrected).credit(made, config, operator=operator)
    operator.words = [[[]]]
    with pytest.raises(ValueError, match=r"explanations are for groups of \[1\] responses instead of \[2\]"):
        Loop(corrected).credit(made, config, operator=operator)


def test_close_rewards_are_shown_with_enough_digits():
    made = Group(prompt(), [response([10 + n], 0.5 + 1e-9 * n) for n in range(3)])
    credit = Loop(corrected).credit([made], algorithm("gspo"))
    value, total = shown(credit.explanations[0].responses[2])["advantage"]
    assert value == near(credit.sequences[2].advantage)
    assert value > 0.05
    assert total == near(value)


def test_equal_rewards_teach_nothing_only_if_the_estimator_gives_zero():
    made = [Group(prompt(), [response([10, 11], 1.0), response([10, 12], 1.0)])]
    for estimator, note in ((f"{__name__}:everything", ""), ("group", "nothing to learn")):
        credit = Loop(corrected).credit(made, algorithm("gspo", advantages=estimator))
        assert [s.advantage for s in credit.sequences] == ([0.0] * 2 if note else [1.0, 1.0])
        assert ("nothing to learn" in str(credit.explanations[0])) == bool(note)


def everything(rewards):
    return list(rewards)
