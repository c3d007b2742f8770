"""Token ids of prompts, the place in them for candidate solutions, and sources of prompts in a fixed
order."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron_ibpo.basics.records import ENVIRONMENT, Prompt, TokenIds, token_ids
from megatron_ibpo.data.left_out import Tally
from megatron_ibpo.data.tokenizer import DataError, Message, Tokenizer, has_unknown

_SENTINEL = "SENTINELc9f0f895fb98ab91"
_ALWAYS_SHOWN = ("system", "developer", "user")
"""Roles whose messages a chat template has to show."""
_CHARACTERS_OF_A_TOKEN = 128
"""Length of the longest tokens in characters; they are runs of spaces."""


class TooLongError(DataError):
    """A prompt that leaves no room for a response."""


@dataclass(frozen=True)
class PromptSource:
    """An endless sequence of prompts in a fixed order."""

    at: Callable[[int], Prompt]
    """Return the prompt at a position. It depends on the position alone, so that resuming needs no state."""
    size: int = 0
    """Number of prompts before they repeat; 0 if they never do, or if it is not known yet."""
    count: Callable[[], int] | None = None
    """Finds `size` if it is not known; reads a large file through."""
    notes: tuple[str, ...] = ()
    """Lines to print before the source is used."""
    tallies: tuple[Tally, ...] = ()
    """Counts of the rows left out of each part."""
    ready: int | None = None
    """Number of first prompts already made, if making one may take long; None: all are quick."""
    grows: bool = False
    """True if drawing prompts may reveal more rows to leave out."""

    def __len__(self) -> int:
        return self.size

    def num_prompts(self) -> int:
        """Return the number of prompts before they repeat; 0 if they never do."""
        return self.size if self.count is None else self.count()

    def left_out(self) -> dict[str, float]:
        """Return metrics of the rows left out of large files so far; empty if all rows were checked first."""
        if not self.grows:
            return {}
        reasons = Counter[str]()
        for tally in self.tallies:
            reasons.update(tally.counts)
        return {f"left_out/{reason.replace(' ', '_')}": float(count) for reason, count in reasons.items()}

    def batch(self, step: int, n: int) -> list[Prompt]:
        """Return prompts step·n to step·n + n - 1."""
        return [self.at(position) for position in range(step * n, step * n + n)]


def in_environment(source: PromptSource, environment: str | None) -> PromptSource:
    """Return the source with every prompt in an environment: the one that it names itself, or this one if it
    names none."""
    if environment is None:
        return source

    def at(position: int) -> Prompt:
        prompt = source.at(position)
        return replace(prompt, metadata=prompt.metadata | {ENVIRONMENT: prompt.environment or environment})

    return replace(source, at=at)


def plain_prompt(text: str, tokenizer: Tokenizer, tail: str = "") -> tuple[TokenIds, int]:
    """Return the token ids of `text` followed by `tail`, and the number of them that are `text`
    (`Prompt.head_length`)."""
    head = tokenizer.encode_prompt(text)
    return token_ids([*head, *tokenizer.encode(tail)]), len(head)


def chat_prompt(
    messages: Sequence[Message], tokenizer: Tokenizer, settings: Mapping[str, Any] | None = None
) -> tuple[TokenIds, int]:
    """Return the token ids of `messages` in the tokenizer's chat format, and their number up to the end of
    the last user content.

    The text after that content is found by rendering the chat again with a marker appended to it.

    Args:
        settings: further arguments of the template, such as {"enable_thinking": False}.

    Raises:
        DataError: the last message is not the user's, there is no chat template, or the template leaves out
            a message or does not show the user's content last.
    """
    if messages[-1]["role"] != "user":
        raise DataError(f"the last message must be the user's, not {messages[-1]['role']!r}")
    render = partial(tokenizer.render_chat, settings=settings)
    text = render(messages)
    last, marked = len(messages) - 1, check_shown(messages, render)
    if last:
        marked = render([*messages[:-1], _marked(messages[-1], last)])
    tail = marked.rpartition(_mark(last))[2]
    if not text.endswith(tail):
        raise DataError(
            "the chat template treats the last user message by its content, so that candidate solutions "
            "cannot be inserted after it"
        )
    head = tokenizer.encode_rendered(text[: len(text) - len(tail)])
    return token_ids([*head, *tokenizer.encode(tail)]), len(head)


def check_shown(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> str:
    """Refuse a chat template that leaves out the content of a message, or its end. Earlier turns of the
    assistant may be shown without their reasoning, and answers of tools in other forms, so these are not
    looked for.

    Args:
        render: returns messages as the template's text.

    Returns:
        the text with a mark at the end of every content that was looked for.

    Raises:
        DataError: says which message is missing.
    """
    looked_for = {n for n, message in enumerate(messages) if message["role"] in _ALWAYS_SHOWN}
    looked_for.add(len(messages) - 1)
    text = render([_marked(message, n) if n in looked_for else message for n, message in enumerate(messages)])
    for number in sorted(looked_for):
        if _mark(number) not in text:
            role = messages[number]["role"]
            raise DataError(
                f"the chat template leaves out the content of message {number} ({role}), or its end: it may "
                "read content as a list of parts, know other roles, or cut long texts; use a checkpoint with "
                "another template, or drop --apply-chat-template"
            )
    return text


def _marked(message: Message, number: int) -> Message:
    return {**message, "content": message["content"].rstrip() + _mark(number)}


def _mark(number: int) -> str:
    return f"{_SENTINEL}{number}."


def check_size(characters: int, max_prompt_len: int | None) -> None:
    """Raise TooLongError for a text that exceeds the context whatever its tokens are. A tokenizer could take
    minutes to find that out."""
    if max_prompt_len is not None and characters > max_prompt_len * _CHARACTERS_OF_A_TOKEN:
        raise TooLongError(
            f"the prompt has {characters:,} characters, far more than the {max_prompt_len} tokens that fit "
            "with the response; shorten it, or leave it out (--drop-long-prompts)"
        )


def check_prompt(ids: TokenIds, tokenizer: Tokenizer, max_prompt_len: int | None) -> None:
    """Raise DataError for a prompt that the tokenizer cannot express, since the policy would not see the
    task, and TooLongError for one that leaves no room for a response in the context."""
    if has_unknown(tokenizer, ids):
        raise DataError(
            f"the tokenizer has no token for some of the prompt's characters (shown as ⁇ in "
            f"{_legible(ids, tokenizer)!r}); use another tokenizer or other prompts"
        )
    if max_prompt_len is not None and len(ids) > max_prompt_len:
        raise TooLongError(
            f"the prompt has {len(ids)} tokens, but only {max_prompt_len} fit with the response; "
            "shorten it, leave it out (--drop-long-prompts), lower --rollout-max-response-len, or raise "
            "--rollout-max-context-len"
        )


def _legible(ids: TokenIds, tokenizer: Tokenizer) -> str:
    return "".join("⁇" if i == tokenizer.unk_id else tokenizer.decode([i]) for i in ids[:60].tolist())
