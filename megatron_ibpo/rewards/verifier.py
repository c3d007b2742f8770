"""Scoring of responses: rewards by name or by import path, always in processes that can be killed; and the
check at the start that labels can be graded."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.basics.reward_value import LabelError
from megatron_ibpo.basics.text import REWARD_FAULTS, append_trace, counted, fault_text, shown
from megatron_ibpo.config import ConfigError, DataConfig, known_or_path, load_module, rm_type_in
from megatron_ibpo.rewards.code import CHECK, CodeExecution
from megatron_ibpo.rewards.composite import COMPOSITE, check_parts, combined, parts_of
from megatron_ibpo.rewards.http_wires import JudgeWire, Question, ScoreWire, Wire
from megatron_ibpo.rewards.response import Response, open_at_end
from megatron_ibpo.rewards.workers import Outcome, WorkerPool

if TYPE_CHECKING:
    from megatron_ibpo.rewards.reward_server import RewardServer

VERIFIERS = {
    "reasoning_gym": "megatron_ibpo.rewards.reasoning_gym:score",
    "math": "megatron_ibpo.rewards.math:score",
    "code": "megatron_ibpo.rewards.code:score",
    "http_judge": "megatron_ibpo.rewards.http_wires:judged_score",
    "http_score": "megatron_ibpo.rewards.http_wires:server_score",
}
"""--rm-type → import path of its function. `composite` is made of these and of functions by import path."""
WIRES: dict[str, Callable[[DataConfig], Wire]] = {
    VERIFIERS["http_judge"]: JudgeWire,
    VERIFIERS["http_score"]: ScoreWire,
}
"""Functions that get a server's answer in place of a response → the protocol of that server."""
_READS_MARKS = frozenset(VERIFIERS.values()) - {VERIFIERS["http_score"]}
"""Functions that read a response with its marks of thinking; others read what the policy wrote."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """A verifier's judgement of one response."""

    reward: float | None
    """None: the verifier failed. That differs from a reward of 0."""
    correct: bool
    error: str | None = None
    details: dict[str, float] = field(default_factory=dict)
    """Further numbers from the verifier; `response_error` is 1 if it failed through the response's own fault,
    which gives a reward of 0."""


class Pool(Protocol):
    """Processes that run reward functions: a `WorkerPool`, or one on each node of a cluster."""

    @property
    def deaths(self) -> int:
        """Processes that died so far."""
        ...

    def submit(self, target: str, arguments: tuple[Any, ...]) -> Future[Outcome]:
        """Submit one call of a function, package.module:function; the future gets its outcome."""
        ...

    def close(self) -> None:
        """End the processes."""
        ...


class Verifier(AbstractContextManager["Verifier"]):
    """A scorer of responses by the verifier of their prompt: the one under `rm_type` in the prompt's
    metadata, else --rm-type. A verifier is a function as `rewards.worker` calls it."""

    def __init__(self, pool: Pool, data: DataConfig, logs: Path | None = None):
        """Score in the processes of a pool. Raises ConfigError as `reward_functions`. Tracebacks of functions
        that raise are kept in the folder `logs`, if it is given."""
        reward_functions(data)
        self._data, self._pool, self._logs = data, pool, logs
        self._servers: dict[str, RewardServer] = {}
        """Servers that were asked so far, by the function that reads their answers."""
        self._errors = 0

    def score(self, pairs: Sequence[tuple[Prompt, str | Response]]) -> list[Score]:
        """Score each response to its prompt, in order. In a response given as text alone, thinking is open
        from the start if the text of the prompt ends in a mark that opens it. A function that raises, hangs,
        kills its process twice or returns no finite number gives a score without a reward. The first such
        error of a call is logged."""
        scores, errors = list[Score](), list[str]()
        for scoring in [self._ask(prompt, response) for prompt, response in pairs]:
            score = self._combined_score(scoring, [outcome.result() for outcome in scoring.outcomes])
            scores.append(score)
            if score.error is not None:
                errors.append(scoring.described(score.error))
        if errors:
            counts = len(errors), len(scores)
            _log.warning("verifiers failed on %d of %d responses; the first: %s", *counts, errors[0])
        return scores

    async def score_one(self, prompt: Prompt, response: str | Response) -> Score:
        """Score one response as `score` does, concurrently with other calls. Errors are logged when
        their number since the start reaches a power of two. Raises WorkerError if a process that had to be
        replaced does not start again."""
        scoring = self._ask(prompt, response)
        outcomes = await asyncio.gather(*[asyncio.wrap_future(outcome) for outcome in scoring.outcomes])
        score = self._combined_score(scoring, outcomes)
        if score.error is not None:
            self._errors += 1
            if self._errors.bit_count() == 1:
                error = scoring.described(score.error)
                _log.warning("verifiers have failed on %d responses: %s", self._errors, error)
        return score

    def close(self) -> None:
        """End the requests to servers and the worker processes."""
        self.close_servers()
        self._pool.close()

    def close_servers(self) -> None:
        """End the requests to servers; the worker processes are left to the opener of the pool."""
        for server in self._servers.values():
            server.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, prompt: Prompt, response: str | Response) -> _Scoring:
        response = _as_response(prompt, response)
        try:
            name, targets = rm_type_in(prompt.metadata, self._data), functions_of(prompt, self._data)
            outcomes = [self._submit(target, prompt, response) for target in targets]
        except ConfigError as error:  # found at the start where the first prompts name it
            return _Scoring("verifier of the row", prompt, refused=str(error))
        return _Scoring(name, prompt, outcomes)

    def _submit(self, target: str, prompt: Prompt, response: Response) -> Future[Outcome]:
        text, metadata = _text_for(target, response), prompt.metadata
        if target in WIRES:
            return self._server(target).submit(Question(prompt.text, text, prompt.label))
        if target == VERIFIERS["code"]:  # how programs are run, which the prompt cannot override
            metadata = metadata | CodeExecution.from_config(self._data).as_metadata()
        return self._pool.submit(target, (prompt.text, text, prompt.label, metadata))

    def _server(self, target: str) -> RewardServer:
        if target not in self._servers:
            from megatron_ibpo.rewards.reward_server import RewardServer  # aiohttp takes half a second

            self._servers[target] = RewardServer(
                WIRES[target](self._data),
                partial(self._pool.submit, target),
                concurrency=self._data.rm_concurrency,
                timeout=self._data.rm_timeout,
            )
        return self._servers[target]

    def _combined_score(self, scoring: _Scoring, outcomes: Sequence[Outcome]) -> Score:
        if scoring.refused is not None:
            return Score(None, False, scoring.refused)
        parts = parts_of(scoring.name, self._data)
        outcome = combined(parts, outcomes) if scoring.name == COMPOSITE else outcomes[0]
        if outcome.value is not None:
            return Score(outcome.value, outcome.value >= self._data.reward_threshold, details=outcome.details)
        error = outcome.error or ""
        if outcome.trace is not None:
            if self._logs is not None:
                append_trace(self._logs / REWARD_FAULTS, scoring.described(error), outcome.trace)
            error += f" on {place_of(scoring.prompt)}"
        return Score(None, False, error, outcome.details)


@dataclass(frozen=True)
class _Scoring:
    """The calls for one response."""

    name: str
    prompt: Prompt
    outcomes: Sequence[Future[Outcome]] = ()
    refused: str | None = None

    def described(self, error: str) -> str:
        """Return an error with the verifier and the prompt."""
        place = f" on {place_of(self.prompt)}"
        return f"{self.name}: {error.removesuffix(place)}{place}"


def open_verifier(data: DataConfig) -> Verifier:
    """Open the verifier that `data` names, on this machine alone. Raises what `open_pool` and `check_servers`
    raise."""
    check_servers(data)
    return Verifier(open_pool(data), data)


def check_servers(data: DataConfig, rm_types: Iterable[str] = ()) -> None:
    """Make one request to the server that `data.rm_type` or `rm_types` need, if there is one. Raises
    ConfigError as `reward_functions`, or with the reason why the server cannot be used."""
    for target in reward_functions(data, rm_types):
        if target in WIRES:
            from megatron_ibpo.rewards.reward_server import check_server

            check_server(WIRES[target](data))


def open_pool(data: DataConfig, rm_types: Iterable[str] = ()) -> WorkerPool:
    """Open a pool of processes on this machine that run the functions named by `data.rm_type` and `rm_types`.
    Raises as `start_pool` and `check_pool`."""
    pool = start_pool(data, rm_types)
    check_pool(pool, data, rm_types)
    return pool


def start_pool(data: DataConfig, rm_types: Iterable[str] = ()) -> WorkerPool:
    """Start the processes of `open_pool`; `check_pool` waits for them. Raises ConfigError as
    `reward_functions`."""
    return WorkerPool(reward_functions(data, rm_types), size=worker_count(data), timeout=data.reward_timeout)


def check_pool(pool: WorkerPool, data: DataConfig, rm_types: Iterable[str] = ()) -> None:
    """Wait until a pool's processes can score. Raises ConfigError if there is no sandbox for running
    programs, and WorkerError for a function that cannot be loaded; the pool is closed then."""
    pool.wait_ready()
    if VERIFIERS["code"] in reward_functions(data, rm_types):
        checked = pool.submit(CHECK, ("", "", "", CodeExecution.from_config(data).as_metadata())).result()
        if checked.error is not None:
            pool.close()
            raise ConfigError(f"code rewards: {checked.error}")


def worker_count(data: DataConfig, processors: int | None = None) -> int:
    """Return the number of verifier processes for a node with this many processors; None: this node's."""
    if processors is None:
        processors = len(os.sched_getaffinity(0))
    return data.reward_workers or max(2, processors // 2)


def reward_functions(data: DataConfig, rm_types: Iterable[str] = ()) -> list[str]:
    """Return module:function of every verifier that `data.rm_type` and `rm_types` name, each once. Raises
    ConfigError for an unknown name (with the nearest), parts of a composite that make no sense, or settings
    of a server that cannot be used."""
    if data.reward_part:
        check_parts(data)
    named = dict.fromkeys([data.rm_type, *rm_types, *data.allowed_rm_types])
    parts = [part.name for name in named for part in parts_of(name, data)]
    targets = list(dict.fromkeys(_function(name) for name in parts))
    for target in targets:
        if target in WIRES:
            WIRES[target](data)  # reads the settings
    return targets


def main_rm_type(data: DataConfig) -> str:
    """Return --rm-type, or the main part of a composite."""
    return parts_of(data.rm_type, data)[0].name


def functions_of(prompt: Prompt, data: DataConfig) -> list[str]:
    """Return module:function of a prompt's verifier, or of its parts. Raises ConfigError as `rm_type_in`, or
    for an unknown name (with the nearest)."""
    return [_function(part.name) for part in parts_of(rm_type_in(prompt.metadata, data), data)]


def answer_extractor(rm_type: str) -> Callable[[str], str | None] | None:
    """Return `extract_answer(response) -> str | None` of a verifier's module, for majority votes; None if it
    has none. Answers that are written differently are different answers. Raises ConfigError for an unknown
    name, or a module that cannot be loaded."""
    return getattr(load_module("--rm-type", _function(rm_type)), "extract_answer", None)


def extracted_answer(prompt: Prompt, response: str | Response, data: DataConfig) -> str | None:
    """Return a response's final answer as found by the module of the prompt's verifier (of its main part):
    `extract_answer(response)` or `extract_answer(response, metadata)`. None without an answer or such a
    function, or if its verifier is refused."""
    try:
        name = parts_of(rm_type_in(prompt.metadata, data), data)[0].name
    except ConfigError:
        return None
    extract = answer_extractor(name)
    text = _text_for(_function(name), _as_response(prompt, response))
    try:
        return None if extract is None else _extracted(extract, text, prompt.metadata)
    except Exception as error:
        place = f"{place_of(prompt)}: {fault_text(error, __file__)}"
        raise ConfigError(f"--rm-type {name}: its extract_answer failed on {place}") from error


def _extracted(extract: Callable[..., Any], text: str, metadata: dict[str, Any]) -> Any:
    return extract(*(text, metadata)[: len(inspect.signature(extract).parameters)])


def place_of(prompt: Prompt) -> str:
    """Return the prompt's place in its data, for messages."""
    return f"{prompt.task}, prompt {prompt.index}"


def _as_response(prompt: Prompt, response: str | Response) -> Response:
    if isinstance(response, Response):
        return response
    return Response(response, open_at_end(prompt.text) + response)


def _text_for(target: str, response: Response) -> str:
    return response.marked if target in _READS_MARKS else response.text


def _function(name: str) -> str:
    """Return module:function of a verifier other than a composite."""
    builtin = dict.fromkeys([*VERIFIERS, COMPOSITE], "") | VERIFIERS
    return known_or_path("--rm-type", name, builtin, "verifier") or name


CHECKED_AT_START = 64
"""Prompts per source whose labels are checked before the run starts."""
_SHOWN_LABELS = 5
_LONGEST_QUESTION = 60


def named_rm_types(prompts: Iterable[Prompt], data: DataConfig) -> list[str]:
    """Return the verifiers of these prompts, each once. Raises ConfigError as `rm_type_in`."""
    return list(dict.fromkeys(rm_type_in(prompt.metadata, data) for prompt in prompts))


def check_labels(pool: Pool, prompts: Sequence[Prompt], data: DataConfig) -> None:
    """Ask the verifiers of these prompts whether they can grade the labels. Raises LabelError with the first
    label for each reason if some cannot be graded."""
    problems = _label_problems(pool, prompts, data)
    if problems:
        lines = [*reversed(dict(reversed(problems)).values())]  # the first with each reason
        raise LabelError(
            f"{counted(len(problems), 'label')} of the first {len(prompts)} cannot be graded:\n  "
            + "\n  ".join(lines[:_SHOWN_LABELS])
        )


def label_problems(pool: Pool, prompts: Sequence[Prompt], data: DataConfig) -> list[str]:
    """Return a line for each of these labels that its verifier cannot grade: the prompt, the label and why. A
    verifier's module may define `label_problem(label, metadata) -> str | None` for that."""
    return [line for _, line in _label_problems(pool, prompts, data)]


def _label_problems(pool: Pool, prompts: Sequence[Prompt], data: DataConfig) -> list[tuple[str, str]]:
    """Return (the reason, a line with it) for each label that cannot be graded."""
    calls = [
        (prompt, pool.submit(f"{__name__}:problem", (target, prompt.label, prompt.metadata)))
        for prompt in prompts
        for target in functions_of(prompt, data)
    ]
    problems = [(prompt, error) for prompt, call in calls if (error := call.result().error) is not None]
    return [
        (
            error,
            f"{place_of(prompt)}, label {shown(prompt.label)}: {error} (the question: "
            f"{shown(prompt.text[:_LONGEST_QUESTION])})",
        )
        for prompt, error in problems
    ]


EXTRACTION = f"{__name__}:extraction"


def extraction(target: str, response: str, metadata: dict[str, Any]) -> float:
    """Try `extract_answer` of a function's module, in a worker, since it may hang. Raises whatever it
    raises, and TypeError for what is no answer."""
    extract = getattr(load_module("--rm-type", target), "extract_answer", None)
    answer = None if extract is None else _extracted(extract, response, metadata)
    if not isinstance(answer, str | None):
        raise TypeError(f"expected text or None, got {type(answer).__name__} {answer!r:.100}")
    return 0.0


def problem(target: str, label: str, metadata: dict[str, Any]) -> float:
    """Check one label, in a worker, since this check may hang as a reward function may. Raises LabelError if
    the module of `target` refuses the label."""
    module = load_module("--rm-type", target)
    ask = getattr(module, "label_problem", None)
    if ask is not None and (reason := ask(label, metadata)) is not None:
        raise LabelError(reason)
    return 0.0
