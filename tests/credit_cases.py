"""Small scored groups, and a policy that corrects as told: what the tests of credit are made of."""

from __future__ import annotations

import random

from megatron_ibpo.config import PRESETS, AlgorithmConfig, RolloutConfig
from megatron_ibpo.credit import assign_credit
from megatron_ibpo.records import Group, Prompt, Response

EOS = 2
RIGHT = [10, 11, 12, 13]
"""The content of a right response in these tests; a response is right when it ends in 13."""


def response(content, reward=None, finish_reason="stop"):
    ids = [*content, EOS] if finish_reason == "stop" else list(content)
    correct = reward is not None and reward >= 1
    return Response(ids, [-0.5] * len(ids), finish_reason, 1.0, 0, reward, correct)


def scored(*contents):
    return [response(content, float(content[-1] == 13)) for content in contents]


def group(*contents, index=0):
    return Group(prompt(index), scored(*contents))


def prompt(index=0):
    return Prompt(index, (1, 5, 27), 2, "13", "test", "question")


def of_preset(name):
    """What a preset sets of the algorithm."""
    return {k: v for k, v in PRESETS[name].items() if hasattr(AlgorithmConfig, k)}


def algorithm(**settings):
    return AlgorithmConfig(**of_preset("ibpo") | settings)


GSPO = of_preset("gspo")


class Loop:
    """A policy that corrects as told: `answers` gives the content of each correction from its x̃."""

    def __init__(self, correct, rewards=None):
        self.correct, self.rewards, self.requests = correct, rewards, []

    def sample(self, requests):
        self.requests += requests
        return [response(self.correct(request.prompt_token_ids)) for request in requests]

    def score(self, pairs):
        for _, answer in pairs:
            right = answer.content_ids[-1:] == [13]
            answer.reward = self.rewards(answer) if self.rewards else float(right)
            answer.correct = answer.reward is not None and answer.reward >= 1

    def credit(self, groups, config, **settings):
        return assign_credit(
            groups,
            config,
            sample=self.sample,
            score=self.score,
            correction_prompt=lambda prompt, target, references: (
                *prompt.head_ids,
                *[token for candidate in (target, *references) for token in (90, *candidate)],
                *prompt.tail_ids,
            ),
            **{
                "rollout": RolloutConfig(rollout_max_response_len=8),
                "max_context": 100,
                "seed": 0,
                "step": 0,
                **settings,
            },
        )


def candidates(prompt_ids):
    """The solutions shown in an x̃ of these tests."""
    inner, found = prompt_ids[2:-1], []
    for token in inner:
        if token == 90:
            found.append([])
        else:
            found[-1].append(token)
    return found


def fix_last(prompt_ids):
    """The target with its last token made right: one edit."""
    return [*candidates(prompt_ids)[0][:-1], 13]


def by_kind(credit, kind):
    return [s for s in credit.sequences if s.kind == kind]


def some_groups(seed=0, num_groups=6, size=4):
    rng = random.Random(seed)
    return [
        group(
            *([rng.randrange(10, 15) for _ in range(rng.randrange(1, 6))] for _ in range(size)), index=40 + i
        )
        for i in range(num_groups)
    ]
