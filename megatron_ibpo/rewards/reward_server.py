"""Requests to a server that scores responses: many at a time, from one thread of the driver."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import aiohttp

from megatron_ibpo.basics.text import counted, keep_keys_from_logs, shown, without_keys
from megatron_ibpo.config import ConfigError
from megatron_ibpo.rewards.http_wires import UNREADABLE, Question, Wire, is_transient
from megatron_ibpo.rewards.workers import Outcome

API_KEY = "IBPO_RM_API_KEY"
"""Environment variable with the key that servers of rewards get as a bearer token. There is no flag for it,
since flags are written into a run's directory."""
RETRIES = "retries"
"""Detail of a response: requests that were made again until the server answered for it."""
REFUSED = "judge_refused"
"""Detail of a judged response: 1 if the second answer has no readable score either, which makes the reward
0, else 0."""
_FIRST_WAIT = 0.5
"""Seconds before the first retry; doubled each time."""
_LONGEST_WAIT = 10.0
_TRIAL_S = 20.0
"""Seconds for the one request before the run."""
_LARGEST_ANSWER = 64 << 20
_MOST_UNREAD = 16
"""Responses in a row without a readable score that show that the server or the template is at fault."""
_SHOWN_CHARACTERS = 150
"""Characters of a judge's answer that a message shows."""
_LONGEST_WHY = 2000
_START_TIMEOUT = _CLOSE_TIMEOUT = 5.0
_HINTS: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: f"; the key is taken from the environment, {API_KEY}",
    HTTPStatus.FORBIDDEN: f"; the key is taken from the environment, {API_KEY}",
    HTTPStatus.NOT_FOUND: "; for a judge give the base URL that OpenAI's clients take, as a rule …/v1",
}

_log = logging.getLogger(__name__)


class _NoAnswerError(Exception):
    """The server gave no answer; the text says why, in one line and without the key, which a server or the
    library may quote."""

    def __init__(self, reason: str, *, transient: bool = False, status: int | None = None):
        """`transient`: the same request may succeed later. `status`: that of the answer, if there was one."""
        super().__init__(_line(reason))
        self.transient, self.status = transient, status


def _line(text: str) -> str:
    """Return a text in one line of bounded length and without keys."""
    return " ".join(without_keys(text[:_LONGEST_WHY]).split())


class _Call:
    """One response to be scored."""

    def __init__(self, question: Question):
        self.question = question
        self.outcome: Future[Outcome] = Future()
        self.retries = 0
        self.is_repeated = False
        """True once its first answer had no score that can be read: the next request demands one."""

    def settle(self, outcome: Outcome) -> None:
        if self.outcome.set_running_or_notify_cancel():
            error = None if outcome.error is None else without_keys(outcome.error)
            self.outcome.set_result(replace(outcome, error=error))

    def fail(self, error: Exception) -> None:
        if self.outcome.set_running_or_notify_cancel():
            self.outcome.set_exception(error)


class RewardServer:
    """A server that scores responses, asked from a thread with an event loop.

    At most `concurrency` requests are in flight. A request that fails in a way that may pass (429, 5xx, a
    time-out, a lost connection) is made again after a wait that doubles. A batch that fails is made again one
    by one, since one response may be the cause.
    """

    def __init__(
        self,
        wire: Wire,
        read: Callable[[tuple[Any, ...]], Future[Outcome]],
        *,
        concurrency: int,
        timeout: float,
    ):
        """
        Args:
            read: finds the score in an answer; gets `wire.reading`.
            timeout: seconds for all requests for one response, without the wait for its turn. One request may
                take half of that, so that a request that hangs is made again.
        """
        self._wire, self._read, self._timeout = wire, read, timeout
        self._turns = asyncio.Semaphore(concurrency)
        self._waiting: deque[_Call] = deque()
        self._alone: deque[_Call] = deque()
        """Calls whose batch has failed, each with half of the time left, and those to be asked again, with as
        much time as before."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[_Call] = set()
        self._doubtful: list[tuple[_Call, Any]] = []
        """Calls without a readable score after the second request, with that answer."""
        self._has_scored = False
        """True once a readable score has shown that there are any."""
        self._unread_in_a_row = self._refusals = 0
        """Such calls since the last readable score, and those that got a reward of 0."""
        self._failures = 0
        self._jitter = random.Random()  # never the run's generators
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reward server", daemon=True)
        self._thread.start()
        self._ready.wait(_START_TIMEOUT)

    def submit(self, question: Question) -> Future[Outcome]:
        """Have one response scored; the future gets its outcome. Without an answer it has an error."""
        call = _Call(question)
        self._loop.call_soon_threadsafe(self._enter, call)
        return call.outcome

    def close(self) -> None:
        """Give up the requests; their futures are cancelled."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(_CLOSE_TIMEOUT)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with _session() as self._session:
            self._ready.set()
            await self._closing.wait()
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for call in list(self._open):  # cancelling one takes it out
                call.outcome.cancel()

    # ------------------------------------------------------------------------------------------- the queue

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _enter(self, call: _Call) -> None:
        self._open.add(call)
        call.outcome.add_done_callback(lambda _: self._open.discard(call))
        self._enqueue(self._waiting, call)

    def _enqueue(self, calls: deque[_Call], call: _Call) -> None:
        calls.append(call)
        self._start(self._ask_next())

    async def _ask_next(self) -> None:
        """Ask for the calls that come next, once it is their turn: one alone, or as many waiting ones as a
        request may have."""
        async with self._turns:
            if self._alone:
                call = self._alone.popleft()
                await self._ask([call], self._timeout if call.is_repeated else self._timeout / 2)
            elif count := min(len(self._waiting), self._wire.batch_size):
                calls = [self._waiting.popleft() for _ in range(count)]
                await self._ask(calls, self._timeout if count == 1 else self._timeout / 2)

    async def _ask(self, calls: Sequence[_Call], seconds: float) -> None:
        """Get an answer for the calls within so many seconds."""
        try:
            server_answers = await self._request_answers(calls, seconds)
        except _NoAnswerError as error:
            if len(calls) > 1:
                for call in calls:
                    call.retries += 1
                    self._enqueue(self._alone, call)
                return
            (call,) = calls
            error_message = f"{self._wire.url}: {error} ({counted(call.retries + 1, 'request')})"
            call.settle(Outcome(None, error_message, {RETRIES: float(call.retries)}))
            self._settle_doubtful()
        except Exception as error:  # a fault of ours
            for call in calls:
                call.fail(error)
            self._settle_doubtful()
        else:
            for call, answer in zip(calls, server_answers, strict=True):
                self._start(self._take_score(call, answer))

    # ------------------------------------------------------------------------------------------- the scores

    async def _take_score(self, call: _Call, answer: Any) -> None:
        """Settle a call with the score that is found in its answer, or have it asked again."""
        try:
            read = await asyncio.wrap_future(self._read(self._wire.reading(answer)))
        except asyncio.CancelledError:
            call.outcome.cancel()
            return
        except Exception as error:  # a verifier process that does not start
            call.fail(error)
        else:
            if read.details.get(UNREADABLE) and call.is_repeated:
                self._doubtful.append((call, answer))
            elif read.details.get(UNREADABLE):
                call.is_repeated = True
                self._enqueue(self._alone, call)
            else:
                details = read.details | {RETRIES: float(call.retries)}
                if UNREADABLE in read.details:
                    details |= {UNREADABLE: float(call.is_repeated), REFUSED: 0.0}
                    self._has_scored, self._unread_in_a_row = True, 0
                call.settle(Outcome(read.value, read.error, details))
        self._settle_doubtful()

    def _settle_doubtful(self) -> None:
        """Settle the calls that the server has refused twice to score. The response is the cause, and the
        reward 0, if the server gives readable scores to others. A server that gives none to so many in a row
        is broken, and these calls have no reward. Until the first score is read, they wait for the others
        under way."""
        is_broken = self._unread_in_a_row + len(self._doubtful) >= _MOST_UNREAD
        others_under_way = {call for call, _ in self._doubtful} != self._open
        if others_under_way and not (self._has_scored or is_broken):
            return
        self._unread_in_a_row += len(self._doubtful)
        for call, answer in self._doubtful:
            details = {UNREADABLE: 1.0, RETRIES: float(call.retries)}
            end = shown(without_keys(str(answer)[-_LONGEST_WHY:])[-_SHOWN_CHARACTERS:])
            ending = f"no score in the judge's answer, which ends {end}"
            if is_broken:
                last_responses = counted(self._unread_in_a_row, "response")
                ending += "; it was asked twice, and has given a readable score to none of the last "
                call.settle(Outcome(None, f"{ending}{last_responses}: see the template", details))
                continue
            self._refusals += 1
            if self._refusals.bit_count() == 1:
                count = counted(self._refusals, "response")
                _log.warning("%s: reward 0 for %s, asked about twice: %s", self._wire.url, count, ending)
            call.settle(Outcome(0.0, None, details | {REFUSED: 1.0}))
        self._doubtful.clear()

    # ------------------------------------------------------------------------------------------ the request

    async def _request_answers(self, calls: Sequence[_Call], seconds: float) -> list[Any]:
        """Return the answers of one request, made until it succeeds, fails for good, or time is up."""
        deadline, wait = self._loop.time() + seconds, _FIRST_WAIT
        body = self._wire.body([call.question for call in calls], insists=calls[0].is_repeated)
        while True:
            seconds_left = deadline - self._loop.time()
            try:
                content = await _exchange(self._session, self._wire.url, body, min(seconds_left, seconds / 2))
                return _understood(self._wire.answers, content, len(calls))
            except _NoAnswerError as error:
                self._failures += 1
                if self._failures.bit_count() == 1:
                    requests = counted(self._failures, "request")
                    _log.warning("%s: %s failed; the last: %s", self._wire.url, requests, error)
                pause = wait * self._jitter.uniform(0.5, 1)
                if not error.transient or self._loop.time() + pause >= deadline:
                    raise
            await asyncio.sleep(pause)
            wait = min(2 * wait, _LONGEST_WAIT)
            for call in calls:
                call.retries += 1


def check_server(wire: Wire) -> None:
    """Make one request, so that a server that is missing or wrong is found before the run. Raises ConfigError
    if the server does not answer, or not as it must."""

    async def tried() -> Any:
        async with _session() as session:
            return await _exchange(session, url, body, _TRIAL_S)

    url, body = wire.trial()
    try:
        problem = _understood(wire.trial_problem, asyncio.run(tried()))
    except _NoAnswerError as error:
        hint = _HINTS.get(error.status, "") if error.status else ""
        problem = f"{error}{hint}"
    if problem is not None:
        raise ConfigError(_line(f"--rm-url: {url}: {problem}"))


def _session() -> aiohttp.ClientSession:
    keep_keys_from_logs()
    key = os.environ.get(API_KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{API_KEY}: has characters that no HTTP header can hold; set it to the key alone")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),  # `RewardServer` keeps the limit
        timeout=aiohttp.ClientTimeout(total=None),
        headers=headers,
    )


async def _exchange(session: aiohttp.ClientSession, url: str, body: Any, seconds: float) -> Any:
    """Return the JSON with which the server answers one request: a GET without a body, else a POST."""
    method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
    try:
        async with (
            asyncio.timeout(seconds),
            session.request(method, url, data=data, allow_redirects=False) as response,
        ):
            status, content = response.status, await _content(response)
    except TimeoutError:
        raise _NoAnswerError(f"no answer within {seconds:.3g} s", transient=True) from None
    except (aiohttp.ClientError, OSError) as error:
        raise _NoAnswerError(f"{type(error).__name__}: {error}", transient=True) from None
    if not HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
        reason = f"status {status}: {_start_of(content)}"
        raise _NoAnswerError(reason, transient=is_transient(status), status=status)
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise _NoAnswerError(f"expected JSON, got {_start_of(content)}") from None


async def _content(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > _LARGEST_ANSWER:
            raise _NoAnswerError(f"the answer is longer than {_LARGEST_ANSWER:,} bytes")
    return bytes(content)


def _understood(read: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the wire reads from the content of an answer."""
    try:
        return read(*arguments)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        got = _start_of(json.dumps(arguments[0]).encode())
        raise _NoAnswerError(f"{type(error).__name__}: {error}; got {got}") from None


def _start_of(content: bytes) -> str:
    """Return the beginning of an answer for a message. Keys are replaced first, since the text is shortened,
    and with it a key in it."""
    return shown(without_keys(content[:_LONGEST_WHY].decode(errors="replace")))
