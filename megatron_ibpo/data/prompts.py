"""Prompts as token ids, the place in them for candidate solutions, and sources of prompts in a fixed order.
What is made from these ids: the correction prompt x̃ = (x; y, references) (ibpo step 4), the same question
asked in several ways, and responses as text."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from megatron_ibpo.basics.records import ENVIRONMENT, Prompt, Sample, TokenIds, token_ids
from megatron_ibpo.data.sources import Tally
from megatron_ibpo.data.tokenizer import DataError, Message, Tokenizer, has_unknown, id_of
from megatron_ibpo.rewards.response import SPECIAL_MARKS, Response, left_open, open_at_end

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


_NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")


def correction_instruction(num_candidates: int) -> str:
    """Return the instruction to correct K candidate solutions; K=2 is the paper's wording."""
    if num_candidates == 1:
        return (
            "You are given a candidate solution to the problem. Check it step by step, identify any errors, "
            "and then produce a corrected solution and final answer."
        )
    in_words = dict(enumerate(_NUMBERS, start=2)).get(num_candidates, str(num_candidates))
    return (
        f"You are given {in_words} candidate solutions to the same problem. Compare them step by step, "
        "identify any inconsistencies or errors, and then produce a corrected solution and final answer."
    )


def candidate_heading(number: int) -> str:
    """Return the heading of the candidate solution `number`, counted from 1."""
    return f"Candidate solution {number}: "


class CorrectionTemplate:
    """A builder of correction prompts: the prompt up to the end of its user content, the candidates (the
    wrong response first), the instruction, and the prompt's own generation prompt.

    Candidates are inserted as the sampled ids, so nothing is decoded and encoded again.
    """

    def __init__(self, tokenizer: Tokenizer, num_candidates: int):
        """
        Args:
            num_candidates: K, the wrong response included; smaller prompts can be built too.

        Raises:
            DataError: the tokenizer has no tokens for the template's words.
        """
        counts = range(1, num_candidates + 1)
        self._headings = {n: self._encode(tokenizer, "\n" + candidate_heading(n)) for n in counts}
        self._instructions = {
            n: self._encode(tokenizer, "\n" + correction_instruction(n)) for n in {1, num_candidates}
        }
        self._newline = token_ids(tokenizer.encode("\n"))

    @staticmethod
    def _encode(tokenizer: Tokenizer, text: str) -> TokenIds:
        ids = token_ids(tokenizer.encode(text))
        if not len(ids) or has_unknown(tokenizer, ids):
            raise DataError(
                f"the tokenizer has no tokens for the correction prompt's text {text!r}; "
                "use another tokenizer or another --ibpo-k"
            )
        return ids

    def __call__(self, prompt: Prompt, target_ids: TokenIds, references: Sequence[TokenIds]) -> TokenIds:
        """Return the token ids of x̃.

        Args:
            target_ids: the wrong response, without its end-of-sequence id.
            references: the K-1 references in drawn order, without end-of-sequence ids; may be empty (K=1).
        """
        candidates = (target_ids, *references)
        parts = [prompt.head_ids]
        for number, candidate in enumerate(candidates, start=1):
            parts += [self._headings[number], candidate]
        parts += [self._instructions[len(candidates)]]
        parts += [prompt.tail_ids if len(prompt.tail_ids) else self._newline]
        return np.concatenate(parts)


class PromptSuffixes:
    """Appends one of several texts to the user's content, in turn over the samples of a group, to make them
    more diverse."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]):
        """
        Args:
            texts: an empty one leaves the prompt unchanged; without texts, all prompts are unchanged.

        Raises:
            DataError: the tokenizer cannot express one of them.
        """
        self._suffixes = [token_ids(tokenizer.encode(text) if text else []) for text in texts]
        for text, ids in zip(texts, self._suffixes, strict=True):
            if has_unknown(tokenizer, ids):
                raise DataError(
                    f"--rollout-prompt-suffixes: the tokenizer has no tokens for some of {text!r}; use "
                    "another text"
                )

    @property
    def longest(self) -> int:
        """Largest number of tokens added to a prompt."""
        return max(map(len, self._suffixes), default=0)

    def __call__(self, prompt: Prompt, sample: int) -> TokenIds:
        """Return the prompt of sample number `sample`."""
        if not self._suffixes:
            return prompt.token_ids
        suffix = self._suffixes[sample % len(self._suffixes)]
        if not len(suffix):
            return prompt.token_ids
        return np.concatenate([prompt.head_ids, suffix, prompt.tail_ids])


_END = 64
"""Ids at the end of a prompt that are searched for a mark at its end."""
_MOST_TAILS = 256
"""Ends of prompts that are remembered; a chat template writes one or two."""


class ResponseText:
    """Returns the text of a sample for verifiers. Finds out whether its prompt leaves thinking open, as the
    templates of many reasoning models do."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._special = _special_marks(tokenizer)
        self._mark_of_tail = lru_cache(_MOST_TAILS)(self._left_open)

    def __call__(self, prompt: Prompt, sample: Sample) -> Response:
        """Return the text of a response to the prompt, or of a correction."""
        return self.of_ids(prompt, sample.prompt_token_ids, sample.token_ids)

    def of_ids(self, prompt: Prompt, prompt_ids: TokenIds, ids: TokenIds) -> Response:
        """Return the text of these ids, written after `prompt_ids`."""
        text = self._tokenizer.decode(ids)
        marked = _with_marks(ids.tolist(), self._special, self._tokenizer) if self._special else text
        return Response(text, self.open_mark(prompt, prompt_ids) + marked)

    def open_mark(self, prompt: Prompt, prompt_ids: TokenIds) -> str:
        """Return the mark of the thinking that is open where the policy begins to write; empty if none is.

        The generation prompt of the chat template decides, and not what a user or a candidate solution says
        before it. A prompt without one leaves thinking open if it ends in a mark.

        Args:
            prompt_ids: ids that were sampled from: the prompt's own, or those of a correction.
        """
        tail = prompt.tail_ids
        if len(tail) and np.array_equal(prompt_ids[-len(tail) :], tail):
            return self._mark_of_tail(tuple(tail.tolist()))
        return open_at_end(self._tokenizer.decode_all(prompt_ids[-_END:]))

    def _left_open(self, tail: tuple[int, ...]) -> str:
        return left_open(self._tokenizer.decode_all(tail))


def _special_marks(tokenizer: Tokenizer) -> dict[int, str]:
    """Return id → mark of the marks of thinking that decoding leaves out."""
    ids = {id_of(mark, tokenizer): mark for mark in SPECIAL_MARKS}
    return {token: mark for token, mark in ids.items() if token is not None and not tokenizer.decode([token])}


def _with_marks(ids: Sequence[int], marks: dict[int, str], tokenizer: Tokenizer) -> str:
    """Return the text of ids with these marks, which decoding leaves out."""
    pieces, start = list[str](), 0
    for place, token in enumerate(ids):
        if token in marks:
            pieces += [tokenizer.decode(ids[start:place]), marks[token]]
            start = place + 1
    return "".join([*pieces, tokenizer.decode(ids[start:])])
