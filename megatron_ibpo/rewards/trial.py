"""One call of every reward function of the user before a run starts, on the first prompt that it scores."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.basics.text import REWARD_FAULTS, append_trace, shown
from megatron_ibpo.config import ConfigError, DataConfig, load_module
from megatron_ibpo.rewards.verifier import VERIFIERS, Pool, functions_of
from megatron_ibpo.rewards.workers import Outcome

_LONGEST_LABEL = 200


def trial_response(prompt: Prompt) -> str:
    """Return a response as a policy could write it."""
    return f"The answer is {prompt.label[:_LONGEST_LABEL]}."


def try_rewards(
    pool: Pool, prompts: Sequence[Prompt], data: DataConfig, logs: Path | None = None
) -> dict[str, float]:
    """Call every function of the user that would score one of the prompts, once, and its module's
    `extract_answer`, if there is one. The package's own functions are not called. Nothing is counted.

    Args:
        prompts: the first of a run.
        logs: folder for tracebacks; None: they are not kept.

    Returns:
        the further numbers that the functions gave.

    Raises:
        ConfigError: a function raises, takes longer than --reward-timeout, or returns no reward; names its
            line and the prompt. A ResponseError is none of these.
    """
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        for target in functions_of(prompt, data):
            if target not in VERIFIERS.values():
                first.setdefault(target, prompt)
    details: dict[str, float] = {}
    for target, prompt in first.items():
        response = trial_response(prompt)
        scored = pool.submit(target, (prompt.text, response, prompt.label, prompt.metadata))
        extracted = pool.submit(f"{__name__}:extraction", (target, response, prompt.metadata))
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
    response = shown(trial_response(prompt))
    place = f"{prompt.task}, prompt {prompt.index}"
    message = f"{prefix}{outcome.error} on {place}, with a made-up response, {response}"
    if outcome.trace is not None:
        message += f" ({unread} for one that it cannot read)"
    if outcome.trace is not None and logs is not None:
        append_trace(logs / REWARD_FAULTS, message, outcome.trace)
        message += f"; the traceback is in {logs / REWARD_FAULTS}"
    raise ConfigError(f"{message}; the run has not started")


def extraction(target: str, response: str, metadata: dict[str, Any]) -> float:
    """Call `extract_answer` of a function's module, in a worker, since it may hang. Raises whatever it
    raises."""
    extract = getattr(load_module("--rm-type", target), "extract_answer", None)
    if extract is not None:
        answer = extract(*(response, metadata)[: len(inspect.signature(extract).parameters)])
        if not isinstance(answer, str | None):
            raise TypeError(f"expected text or None, got {type(answer).__name__} {answer!r:.100}")
    return 0.0
