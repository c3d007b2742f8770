"""Small scored groups, and a policy that corrects as told: what the tests of credit are made of."""

import random
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np

from megatron_ibpo.basics.records import Correction, Group, Prompt, token_ids
from megatron_ibpo.config import Config, RolloutConfig
from megatron_ibpo.credit import CreditContext, Vocabulary, assign_credit, credit_of, find_method
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.policy.planning import plan_update
from megatron_ibpo.run.cost import CostMeter
from megatron_ibpo.run.settings import check_settings
from megatron_ibpo.sampling.requests import with_beginning
from support.paths import ROOT
from support.samples import sample_of

EOS = 2
PROMPT = (1, 5, 27)
RIGHT = [10, 11, 12, 13]  # content of a right response, which ends in 13


def response(content, reward=None, finish_reason="stop", *, prompt=PROMPT, written=None, temperature=1.0):
    """`written`: of each token of the content, whether the policy wrote it; by default all, and the end."""
    ids = [*content, *[EOS] * (finish_reason == "stop")]
    mask = np.ones(len(ids), bool)
    if written is not None:
        mask[: len(content)] = written
    return sample_of(
        prompt, ids, np.where(mask, -0.5, 0.0), finish_reason=finish_reason, temperature=temperature,
        loss_mask=mask, reward=reward, correct=reward is not None and reward >= 1,
    )  # fmt: skip


def correction(target, answer, references=(), **settings):
    return Correction(target, references, answer, **settings)


def plain(value):
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def ids_of(value):
    return None if value is None else tuple(value.tolist())


def token_weights(sequences):
    return [ids_of(sequence.token_weights) for sequence in sequences]


def scored(*contents):
    return [response(content, float(content[-1] == 13)) for content in contents]


def group(*contents, index=0):
    return Group(prompt(index), scored(*contents))


def prompt(index=0):
    return Prompt(index, token_ids(PROMPT), 2, "13", "test", "question")


def of_preset(name):
    return {"advantage_estimator": name}


def check_algorithm(settings, reward_threshold=1.0):
    config = Config(algorithm=settings)
    config.model.hf_checkpoint = Path()
    config.run.dry_run = True
    config.data.reward_threshold = reward_threshold
    check_settings(config)


def algorithm(advantage_estimator="ibpo", **settings):
    return credit_of(advantage_estimator, **settings)


AGREEMENT = "examples/credit/agreement.py:Agreement"
RESET_GROUPS = "examples/credit/resets.py:ResetGroups"
GATED = "examples/credit/gated.py:Gated"
RESUMED = "examples/credit/resumed.py:Resumed"
TURN_GROUPS = "examples/credit/turn_groups.py:TurnGroups"
RANDOM_WINDOW = "examples/credit/random_window.py:RandomWindow"
GSPO = of_preset("gspo")


def template(prompt, target, references):
    """x̃ with a 90 before every solution."""
    parts = [prompt.head_ids]
    for candidate in (target, *references):
        parts += [token_ids([90]), candidate]
    return np.concatenate([*parts, prompt.tail_ids])


def context(config, *, vocabulary=(), **settings):
    rollout, words = RolloutConfig(rollout_max_response_len=8), Vocabulary(template, **dict(vocabulary))
    defaults = {"rollout": rollout, "vocabulary": words, "max_context": 100, "seed": 0, "step": 0}
    return CreditContext(**{"algorithm": config} | defaults | settings)


def correct_groups(groups, context, operator, sample, score):
    """Ask everything that the operator wants sampled, of all groups at once, and attach it scored."""
    asked = [operator.follow_ups(group, context) for group in groups]
    requests = [follow_up.request for of_group in asked for follow_up in of_group]
    samples = sample(requests) if requests else []
    owners = [group.prompt for group, of_group in zip(groups, asked, strict=True) for _ in of_group]
    score(list(zip(owners, samples, strict=True)))
    left = iter(samples)
    for group, of_group in zip(groups, asked, strict=True):
        operator.attach(group, of_group, [next(left) for _ in of_group])


class Loop:
    """A policy that corrects as told: `answers` gives the content of each correction from its x̃."""

    def __init__(self, correct, rewards=None):
        self.correct, self.rewards, self.requests = correct, rewards, []

    def sample(self, requests):
        self.requests += requests
        asked = [(ids_of(request.prompt_token_ids), request.num_begun_tokens) for request in requests]
        return [with_beginning(response(self.correct(ids), prompt=ids), begun) for ids, begun in asked]

    def score(self, pairs):
        for _, answer in pairs:
            right = answer.content_ids[-1:].tolist() == [13]
            answer.reward = self.rewards(answer) if self.rewards else float(right)
            answer.correct = answer.reward is not None and answer.reward >= 1

    def credit(self, groups, config, *, operator=None, **settings):
        method, known = find_method(config, operator), context(config, **settings)
        correct_groups(groups, known, method.operator, self.sample, self.score)
        return assign_credit(groups, known, method)

    @property
    def asked(self):
        return [ids_of(request.prompt_token_ids) for request in self.requests]


def candidates(prompt_ids):
    starts = [i for i, token in enumerate(prompt_ids) if token == 90]
    ends = [*starts[1:], len(prompt_ids) - 1]
    return [list(prompt_ids[start + 1 : end]) for start, end in zip(starts, ends, strict=True)]


def fix_last(prompt_ids):
    return [*candidates(prompt_ids)[0][:-1], 13]


def in_turn(*answers):
    left = list(answers)
    return lambda prompt_ids: left.pop(0)


def tokens_spent(groups, credit, asked=()):
    """Tokens of a step by the run's meter: sampled, asked of the policy by these queries, and trained on."""
    meter = CostMeter(read_hf_config(ROOT / "examples/tiny_qwen3"), accelerators=1)
    meter.sampling(sample for group in groups for sample in group.samples)
    passes = plan_update(credit.sequences, Config(), 1, float).passes
    meter.training(passes.forward, passes.updates)
    meter.training([len(query.context) + len(query.continuation) for query in asked], [])
    return meter.spent.tokens


def by_kind(credit, kind):
    return [s for s in credit.sequences if s.kind == kind]


def some_groups(seed=0, num_groups=6, size=4):
    rng = random.Random(seed)
    groups = []
    for index in range(40, 40 + num_groups):
        contents = [[rng.randrange(10, 15) for _ in range(rng.randrange(1, 6))] for _ in range(size)]
        groups.append(group(*contents, index=index))
    return groups
