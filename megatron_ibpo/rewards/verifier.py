"""Scoring responses: rewards by name or by import path, always in processes that can be killed."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.config import ConfigError, DataConfig, known_or_path, load_module
from megatron_ibpo.rewards.code import CHECK, CodeExecution
from megatron_ibpo.rewards.composite import COMPOSITE, Part, check_parts, combined, parts_of
from megatron_ibpo.rewards.workers import Outcome, WorkerPool

VERIFIERS = {
    "reasoning_gym": "megatron_ibpo.rewards.reasoning_gym:score",
    "math": "megatron_ibpo.rewards.math:score",
    "code": "megatron_ibpo.rewards.code:score",
}
"""--rm-type → where its function is. `composite` is made of these and of functions by import path."""
RM_TYPE = "rm_type"
"""Key of `Prompt.metadata` that names the verifier of this prompt; --rm-type is that of the others."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """A verifier's judgement of one response."""

    reward: float | None
    """None: the verifier failed. That is not a reward of 0."""
    correct: bool
    """The reward has reached the threshold."""
    error: str | None = None
    """How the verifier failed."""
    details: dict[str, float] = field(default_factory=dict)
    """Further numbers that it gave; `response_error` is 1 where it failed for the response's own fault, which
    is a reward of 0."""


class Pool(Protocol):
    """Processes that run reward functions: a `WorkerPool`, or one on each node of a cluster."""

    @property
    def deaths(self) -> int:
        """Processes that died so far."""
        ...

    def submit(self, target: str, arguments: tuple[Any, ...]) -> Future[Outcome]:
        """The outcome of one call of a function, package.module:function, when it comes."""
        ...

    def close(self) -> None:
        """End the processes."""
        ...


class Verifier:
    """Scores each response by the verifier of its prompt: the one that the prompt's metadata names under
    `rm_type`, else --rm-type.

    A verifier is a function (prompt text, response text, label, metadata) -> number, or a mapping with the
    number as `score` and further numbers. One with an attribute `batched` that is true is given lists
    instead: of each argument, those of all responses that wait to be scored, and it returns a value for each.
    """

    def __init__(self, pool: Pool, data: DataConfig):
        """
        Args:
            pool: runs the functions.

        Raises:
            ConfigError: as `reward_functions`.
        """
        reward_functions(data)
        self._data = data
        self._pool = pool
        self._errors = 0

    def score(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Score]:
        """Score each response text to its prompt, in order.

        A function that raises, hangs, kills its process (twice, for it is asked again) or returns what is no
        finite number gives a score without a reward. The first such error of a call is logged.
        """
        asked = [self._ask(prompt, response) for prompt, response in pairs]
        scores = [self._judged(one, [outcome.result() for outcome in one.outcomes]) for one in asked]
        errors = [
            f"{one.name}: {score.error}"
            for one, score in zip(asked, scores, strict=True)
            if score.error is not None
        ]
        if errors:
            _log.warning(
                "verifiers failed on %d of %d responses; the first: %s", len(errors), len(scores), errors[0]
            )
        return scores

    async def score_one(self, prompt: Prompt, response: str) -> Score:
        """Score one response text as `score` does, alongside others that are waited for. Errors are logged
        when their number, since the start, has reached a power of two.

        Raises:
            WorkerError: a process that had to be replaced does not start again.
        """
        asked = self._ask(prompt, response)
        outcomes = await asyncio.gather(*[asyncio.wrap_future(outcome) for outcome in asked.outcomes])
        score = self._judged(asked, outcomes)
        if score.error is not None:
            self._errors += 1
            if self._errors.bit_count() == 1:
                _log.warning(
                    "verifiers have failed on %d responses: %s: %s", self._errors, asked.name, score.error
                )
        return score

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, prompt: Prompt, response: str) -> _Asked:
        name = rm_type_of(prompt, self._data)
        try:
            parts, targets = parts_of(name, self._data), functions_of(prompt, self._data)
        except ConfigError as error:  # found at the start where the first prompts name it
            return _Asked(name, refused=f"{RM_TYPE} of the prompt: {error}")
        outcomes = [
            self._pool.submit(target, (prompt.text, response, prompt.label, self._metadata(prompt, target)))
            for target in targets
        ]
        return _Asked(name, parts, outcomes)

    def _metadata(self, prompt: Prompt, target: str) -> dict[str, Any]:
        """Return the metadata of the prompt; for programs with how they are run, whatever the prompt says of
        that."""
        if target != VERIFIERS["code"]:
            return prompt.metadata
        return prompt.metadata | CodeExecution.of(self._data).as_metadata()

    def _judged(self, asked: _Asked, outcomes: Sequence[Outcome]) -> Score:
        if asked.refused is not None:
            return Score(None, False, asked.refused)
        outcome = combined(asked.parts, outcomes) if asked.name == COMPOSITE else outcomes[0]
        if outcome.error is not None:
            return Score(None, False, outcome.error)
        assert outcome.value is not None
        return Score(outcome.value, outcome.value >= self._data.reward_threshold, details=outcome.details)


@dataclass(frozen=True)
class _Asked:
    """The calls that one response takes."""

    name: str
    """Name of the verifier."""
    parts: Sequence[Part] = ()
    outcomes: Sequence[Future[Outcome]] = ()
    """Outcomes of the parts."""
    refused: str | None = None
    """Why nobody can be asked."""


def open_verifier(data: DataConfig) -> Verifier:
    """The verifier that `data` names, on this machine alone. Raises what `open_pool` raises."""
    return Verifier(open_pool(data), data)


def open_pool(data: DataConfig, rm_types: Iterable[str] = ()) -> WorkerPool:
    """Processes of this machine that run the functions which `data.rm_type` and `rm_types` name.

    Raises:
        ValueError: an unknown name (with the nearest), a function that cannot be loaded, or no sandbox for
            programs that are to be run.
    """
    targets = reward_functions(data, rm_types)
    pool = WorkerPool(targets, size=worker_count(data), timeout=data.reward_timeout)
    if VERIFIERS["code"] in targets:
        checked = pool.submit(CHECK, ("", "", "", CodeExecution.of(data).as_metadata())).result()
        if checked.error is not None:
            pool.close()
            raise ConfigError(f"code rewards: {checked.error}")
    return pool


def worker_count(data: DataConfig, processors: int | None = None) -> int:
    """Verifier processes of a node with so many processors; of this one when None."""
    if processors is None:
        processors = len(os.sched_getaffinity(0))
    return data.reward_workers or max(2, processors // 2)


def reward_functions(data: DataConfig, rm_types: Iterable[str] = ()) -> list[str]:
    """module:function of everything that `data.rm_type` and `rm_types` name, each once.

    Raises:
        ConfigError: an unknown name (with the nearest), or parts of a composite that make no sense.
    """
    if data.reward_part:
        check_parts(data)
    named = dict.fromkeys([data.rm_type, *rm_types])
    parts = [part.name for name in named for part in parts_of(name, data)]
    return list(dict.fromkeys(_function(name) for name in parts))


def rm_type_of(prompt: Prompt, data: DataConfig) -> str:
    """The name of the verifier of a prompt."""
    return str(prompt.metadata.get(RM_TYPE, data.rm_type))


def main_rm_type(data: DataConfig) -> str:
    """--rm-type, or the main part of a composite."""
    return parts_of(data.rm_type, data)[0].name


def functions_of(prompt: Prompt, data: DataConfig) -> list[str]:
    """module:function of the verifier of a prompt, or of its parts.

    Raises:
        ConfigError: an unknown name (with the nearest).
    """
    return [_function(part.name) for part in parts_of(rm_type_of(prompt, data), data)]


def answer_extractor(rm_type: str) -> Callable[[str], str | None] | None:
    """`extract_answer(response) -> str | None` of the module in which a verifier is, for majority votes; None
    if it has none.

    Answers that are written differently are different answers.

    Raises:
        ConfigError: an unknown name, or a module that cannot be loaded.
    """
    return getattr(load_module("--rm-type", _function(rm_type)), "extract_answer", None)


def extracted_answer(prompt: Prompt, response: str, data: DataConfig) -> str | None:
    """The final answer of a response, as the module of the prompt's verifier (of its main part) finds it:
    `extract_answer(response)` or `extract_answer(response, metadata)`. None without an answer, or without
    such a function."""
    name = parts_of(rm_type_of(prompt, data), data)[0].name
    extract: Callable[..., str | None] | None = answer_extractor(name)
    if extract is None:
        return None
    arguments = (response, prompt.metadata)[: len(inspect.signature(extract).parameters)]
    return extract(*arguments)


def _function(name: str) -> str:
    """module:function of a verifier that is no composite.

    Raises:
        ConfigError: an unknown name, with the nearest.
    """
    known = dict.fromkeys([*VERIFIERS, COMPOSITE], "") | VERIFIERS
    return known_or_path("--rm-type", name, known, "verifier") or name
