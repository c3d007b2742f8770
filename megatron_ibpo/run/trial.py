"""One use of every function of the user before a run starts: reward functions score their first prompt, an
environment plays a short episode, and credit functions judge a made-up group. Nothing is counted."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ibpo.basics.records import Floats, Group, Prompt, Sample, SampleRequest, token_ids
from megatron_ibpo.basics.text import REWARD_FAULTS, append_trace, fault_text, shown
from megatron_ibpo.config import AlgorithmConfig, ConfigError, DataConfig
from megatron_ibpo.config.hooks import is_import_path
from megatron_ibpo.credit import CreditContext, assign_credit, find_group_filter, find_method
from megatron_ibpo.environments import EpisodeFaultError, Message, Tool
from megatron_ibpo.environments.processes import EnvironmentPool
from megatron_ibpo.rewards import Outcome, Pool
from megatron_ibpo.rewards.verifier import EXTRACTION, VERIFIERS, functions_of, place_of

_LONGEST_LABEL = 200
_VALUES = {"integer": 1, "number": 1.0, "boolean": True, "array": list[Any](), "object": dict[str, Any]()}
"""Made-up arguments by their JSON type; text is the label."""
_LONGEST_RESPONSE = 8
"""Tokens of the longest made-up response. They differ in length, as honest functions may divide by the spread
of lengths."""


def _response_to(prompt: Prompt) -> str:
    return f"The answer is {prompt.label[:_LONGEST_LABEL]}."


def try_rewards(
    pool: Pool, prompts: Sequence[Prompt], data: DataConfig, logs: Path | None = None
) -> dict[str, float]:
    """Call every function of the user that would score one of a run's first prompts, once, and its module's
    `extract_answer`, if there is one. Return the further numbers that the functions gave. Raises ConfigError
    with the line and the prompt if a function raises (other than ResponseError), takes longer than
    --reward-timeout, or returns no reward.

    Args:
        logs: folder for tracebacks; None: they are not kept.
    """
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        for target in functions_of(prompt, data):
            if target not in VERIFIERS.values():
                first.setdefault(target, prompt)
    details: dict[str, float] = {}
    for target, prompt in first.items():
        response = _response_to(prompt)
        scored = pool.submit(target, (prompt.text, response, prompt.label, prompt.metadata))
        extracted = pool.submit(EXTRACTION, (target, response, prompt.metadata))
        for prefix, unread, outcome in (
            ("", "return 0 or raise ResponseError", scored.result()),
            ("its extract_answer: ", "return None", extracted.result()),
        ):
            _check(f"--rm-type {target}: {prefix}", unread, outcome, prompt, logs)
            details |= outcome.details
    return details


def _check(prefix: str, unread: str, outcome: Outcome, prompt: Prompt, logs: Path | None) -> None:
    """Raise an error of a function as ConfigError; `unread` is what the function should do with a response
    that it cannot read."""
    if outcome.error is None:
        return
    response = shown(_response_to(prompt))
    message = f"{prefix}{outcome.error} on {place_of(prompt)}, with a made-up response, {response}"
    if outcome.trace is not None:
        message += f" ({unread} for one that it cannot read)"
        if logs is not None:
            append_trace(logs / REWARD_FAULTS, message, outcome.trace)
            message += f"; the traceback is in {logs / REWARD_FAULTS}"
    raise ConfigError(f"{message}; the run has not started")


def try_environment(pool: EnvironmentPool, target: str, prompt: Prompt) -> dict[str, float]:
    """Play an environment with made-up messages, a call of its first tool if it has any and then an answer,
    have it scored, and return the further numbers that it gave. A server's environment is not played:
    `EnvironmentPool.check` has opened a session there. Raises ConfigError with the line if a method raises,
    takes longer than --step-timeout, or returns what it must not."""
    if "://" in target:
        return {}

    async def played() -> dict[str, float]:
        session = await pool.open(target, prompt.text, prompt.label, prompt.metadata, seed=0)
        try:
            answer = {"role": "assistant", "content": _response_to(prompt)}
            tools = session.opening.tools
            for message in [*([_call(tools[0], prompt.label)] if tools else []), answer]:
                if (await session.step(message)).done:
                    break
            return (await session.score()).details
        finally:
            await session.close()

    faults, opened = Counter(pool.faults), pool.opened
    try:
        return asyncio.run(played())
    except EpisodeFaultError as fault:
        place = f"{place_of(prompt)}, with a made-up message"
        raise ConfigError(f"--environment {target}: {fault} on {place}; the run has not started") from None
    finally:
        pool.faults, pool.opened = faults, opened


def _call(tool: Tool, label: str) -> Message:
    """Return a message that calls the tool with made-up values of all arguments that it requires."""
    schemas, arguments = tool["parameters"].get("properties", {}), dict[str, Any]()
    for name in tool["parameters"].get("required", ()):
        schema = schemas.get(name, {})
        value = _VALUES.get(str(schema.get("type")), label[:_LONGEST_LABEL])
        arguments[name] = schema["enum"][0] if schema.get("enum") else value
    call = {"id": "call_0", "type": "function", "function": {"name": tool["name"], "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


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
    half of its responses are right, and so are half of the samples that the operator requests. Raises
    ConfigError with its line if one of them raises an exception, or gives an invalid result.

    Args:
        context: of the run's first step; what only a running policy could lend is made up too.
        details: further numbers that the run's verifiers give with a reward.
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
    request = SampleRequest(prompt.token_ids, 0, _LONGEST_RESPONSE)
    responses = range(context.rollout.n_samples_per_prompt)
    group = Group(prompt, [_sample(request, i, context, details) for i in responses])
    try:
        find_group_filter(context.algorithm)(group)
        method = find_method(context.algorithm)  # not the run's, which may remember what it has judged
        follow_ups = method.operator.follow_ups(group, context)
        samples = [_sample(follow_up.request, i, context, details) for i, follow_up in enumerate(follow_ups)]
        method.operator.attach(group, follow_ups, samples)
        list(map(str, assign_credit([group], context, method).explanations))
    except Exception as error:
        place = f"{fault_text(error)} on {place_of(prompt)}, with a made-up group"
        raise ConfigError(f"{', '.join(functions)}: {place}; the run has not started") from error


def _sample(
    request: SampleRequest, index: int, context: CreditContext, details: Mapping[str, float]
) -> Sample:
    """Return a response of which every second one is right, each with other tokens of the prompt."""
    source = request.prompt_token_ids if len(request.prompt_token_ids) else token_ids([0])
    ids = np.resize(np.roll(source, index), _LONGEST_RESPONSE - index % (_LONGEST_RESPONSE // 2))
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
