"""One use of the user's credit functions before a run starts, on a made-up group."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from megatron_ibpo.basics.records import Floats, Group, Prompt, Sample, SampleRequest, token_ids
from megatron_ibpo.basics.text import fault_text
from megatron_ibpo.config import AlgorithmConfig, ConfigError
from megatron_ibpo.config.hooks import is_import_path
from megatron_ibpo.credit.assign import assign_credit
from megatron_ibpo.credit.group_filters import find_group_filter
from megatron_ibpo.credit.operator import CreditContext
from megatron_ibpo.credit.registries import find_method

_LONGEST = 8
"""Tokens of the longest made-up response. They differ in length, as honest functions may divide by the spread
of lengths."""


def credit_functions(algorithm: AlgorithmConfig) -> list[str]:
    """Return the flags that name functions of the user, with their values."""
    flags = {
        "--group-filter": algorithm.group_filter,
        "--ibpo-operator": algorithm.ibpo_operator,
        "--advantages": algorithm.advantages,
        "--token-credit": algorithm.token_credit,
    }
    return [f"{flag} {value}" for flag, value in flags.items() if value and is_import_path(value)]


def try_credit(prompt: Prompt, context: CreditContext, details: Mapping[str, float]) -> None:
    """Have the user's group filter, operator, estimator and token credit judge a made-up group of the prompt:
    half of its responses are right, and so are half of the samples that the operator requests.

    Args:
        context: of the run's first step; what only a running policy could lend is made up too.
        details: further numbers that the run's verifiers give with a reward.

    Raises:
        ConfigError: one of them raises an exception, or gives an invalid result; names its line.
    """
    functions = credit_functions(context.algorithm)
    if not functions:
        return
    context = replace(
        context,
        logprobs=lambda queries: [_logprobs(i, len(query.continuation)) for i, query in enumerate(queries)],
        values=lambda sequences: [np.zeros(len(s.response_token_ids), np.float32) for s in sequences],
        price=lambda prompt, response, *, sharing, trained: float(prompt + response + trained),
    )
    count = context.rollout.n_samples_per_prompt
    request = SampleRequest(prompt.token_ids, 0, _LONGEST)
    responses = [_sample(request, i, context, details) for i in range(count)]
    group = Group(prompt, responses)
    try:
        find_group_filter(context.algorithm)(group)
        method = find_method(context.algorithm)  # not the run's, which may remember what it has judged
        operator = method.operator
        follow_ups = operator.follow_ups(group, context)
        samples = [_sample(follow_up.request, i, context, details) for i, follow_up in enumerate(follow_ups)]
        operator.attach(group, follow_ups, samples)
        list(map(str, assign_credit([group], context, method).explanations))
    except Exception as error:
        place = f"{prompt.task}, prompt {prompt.index}, with a made-up group"
        raise ConfigError(
            f"{', '.join(functions)}: {fault_text(error)} on {place}; the run has not started"
        ) from error


def _sample(
    request: SampleRequest, index: int, context: CreditContext, details: Mapping[str, float]
) -> Sample:
    """Return a response of which every second one is right, each with other tokens of the prompt."""
    source = request.prompt_token_ids if len(request.prompt_token_ids) else token_ids([0])
    ids = np.resize(np.roll(source, index), _LONGEST - index % (_LONGEST // 2))
    correct = index % 2 == 0
    threshold = context.reward_threshold
    return Sample(
        prompt_token_ids=request.prompt_token_ids,
        token_ids=ids,
        logprobs=_logprobs(index, len(ids)),
        finish_reason="stop",
        temperature=request.temperature,
        versions=((0, 0),),
        loss_mask=np.ones(len(ids), bool),
        index=index,
        reward=threshold if correct else min(0.0, threshold - 1),
        correct=correct,
        reward_details=defaultdict(float, details),  # a server's numbers are not known
    )


def _logprobs(number: int, length: int) -> Floats:
    """Return made-up log-probs, which differ between tokens and between texts."""
    return np.linspace(-1.0, -0.25 - 0.5 / (number + 1), length, dtype=np.float32)
