"""The protocol of a server that scores responses: what it is sent, and how its answer is read;
and the verifier that asks one for numbers, such as a reward model: POST of JSON, `{"score": 0.8}` back."""

import urllib.parse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any

from megatron_ibpo.basics.reward_value import read_reward
from megatron_ibpo.config import ConfigError, DataConfig

API_KEY = "IBPO_RM_API_KEY"
"""Environment variable with the key that servers of rewards get as a bearer token. There is no flag for it,
since flags are written into a run's directory."""
UNREADABLE = "unreadable"
"""Detail of a response: 1 if the server's first answer for it has no score that can be read, else 0."""
REFUSED = "judge_refused"
"""Detail of a judged response: 1 if the second answer has none either, which makes the reward 0, else 0."""
_TRANSIENT = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)


@dataclass(frozen=True)
class Question:
    """One response to be scored."""

    prompt: str
    response: str
    label: str


def reward_url(data: DataConfig) -> str:
    """Return --rm-url without a slash at its end. Raises ConfigError if it is missing, or `server_url`
    refuses it."""
    if data.rm_url is None:
        raise ConfigError("--rm-url: required for http_judge and http_score; http://HOST:PORT/… or https://…")
    return server_url("--rm-url", data.rm_url)


def server_url(flag: str, url: str) -> str:
    """Return the URL without a slash at its end. Raises ConfigError if it is not an http(s) URL, or has a
    password, which logs would show."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{flag} {url}: expected http://HOST:PORT or https://…")
    if parts.username is not None:
        raise ConfigError(f"{flag}: a URL with a user or password would stand in logs; leave them out")
    return url.rstrip("/")


def is_transient(status: int) -> bool:
    """Return whether a request that was answered with this status may succeed when it is made again."""
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _TRANSIENT


class ScoreWire:
    """Our own protocol, with the settings of a run. A request is an object with prompt, response and label,
    and its answer an object with a number `score`; with --rm-batch-size above 1 both are lists of such
    objects.

    Attributes:
        url: URL of requests that score.
        batch_size: most responses of one request.
    """

    def __init__(self, data: DataConfig):
        """Read the settings. Raises ConfigError without a URL, and for a setting that only a judge uses."""
        self.url = reward_url(data)
        self.batch_size = data.rm_batch_size
        of_judges = {
            "--rm-template": data.rm_template,
            "--rm-model": data.rm_model,
            "--rm-score": data.rm_score,
        }
        for flag, value in of_judges.items():
            if value is not None:
                raise ConfigError(f"{flag}: only http_judge uses it, and --rm-url is for http_score")

    def body(self, questions: Sequence[Question], *, insists: bool = False) -> Any:
        """Return the body of a request as JSON: at most `batch_size` responses to score.

        Args:
            insists: the first answer had no score that can be read; the body of a judge demands one.
        """
        texts = [asdict(question) for question in questions]
        return texts if self.batch_size > 1 else texts[0]

    def answers(self, content: Any, count: int) -> list[Any]:
        """Return the server's answer for each of `count` responses. Raises ValueError, LookupError or
        TypeError if the content of its answer to the request does not follow the protocol."""
        scores = content if self.batch_size > 1 else [content]
        if not isinstance(scores, list) or len(scores) != count:
            raise ValueError(f"expected a list of {count} scores")
        return scores

    def reading(self, answer: Any) -> tuple[Any, ...]:
        """Return the arguments with which the verifier's function finds the score in one answer. It runs in a
        verifier process, where a slow pattern of the user can be stopped."""
        return (answer,)

    def trial(self) -> tuple[str, Any]:
        """Return URL and body of a request that shows before a run whether the server can be used; without a
        body it is a GET. Here it is to score the right answer to a sum."""
        return self.url, self.body([Question("What is 1 + 1?", "2", "2")])

    def trial_problem(self, content: Any) -> str | None:
        """Return why the server cannot be used, by its answer to the trial, which is read as a verifier
        process does during the run. Raises as `answers`."""
        (answer,) = self.answers(content, 1)
        read_reward(score(answer))
        return None


def score(answer: Any) -> Any:
    """Return the server's answer; the verifier process checks that it holds finite numbers."""
    return answer
