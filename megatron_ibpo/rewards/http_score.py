"""Verifier that asks a server for numbers, such as a reward model: POST of JSON, `{"score": 0.8}` back."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_ibpo.basics.reward_value import read_reward
from megatron_ibpo.config import ConfigError, DataConfig
from megatron_ibpo.rewards.http_wire import Question, reward_url

_TRIAL = Question("What is 1 + 1?", "2", "2")


class ScoreWire:
    """Our own protocol. A request is an object with prompt, response and label, and its answer an object with
    a number `score`; with --rm-batch-size above 1 both are lists of such objects."""

    def __init__(self, data: DataConfig):
        """
        Raises:
            ConfigError: no URL, or a setting that only a judge uses.
        """
        self.url = reward_url(data)
        self.batch_size = data.rm_batch_size
        for flag, value in (
            ("--rm-template", data.rm_template),
            ("--rm-model", data.rm_model),
            ("--rm-score", data.rm_score),
        ):
            if value is not None:
                raise ConfigError(f"{flag}: only http_judge uses it, and --rm-url is for http_score")

    def body(self, questions: Sequence[Question], *, insists: bool = False) -> Any:
        texts = [asdict(question) for question in questions]
        return texts if self.batch_size > 1 else texts[0]

    def answers(self, content: Any, count: int) -> list[Any]:
        """Return one object for each response."""
        scores = content if self.batch_size > 1 else [content]
        if not isinstance(scores, list) or len(scores) != count:
            raise ValueError(f"expected a list of {count} scores")
        return scores

    def reading(self, answer: Any) -> tuple[Any]:
        return (answer,)

    def trial(self) -> tuple[str, Any]:
        """Return a request to score the right answer to a sum."""
        return self.url, self.body([_TRIAL])

    def trial_problem(self, content: Any) -> str | None:
        """Read the answer as a verifier process does during the run."""
        (answer,) = self.answers(content, 1)
        read_reward(score(answer))
        return None


def score(answer: Any) -> Any:
    """Return the server's answer; the verifier process checks that it holds finite numbers."""
    return answer
