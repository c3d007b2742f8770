"""Prompts from rows: a JSONL file, one object per line, or what a function of the user's own gives."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ibpo.config import searched
from megatron_ibpo.data.errors import DataError
from megatron_ibpo.data.prompts import chat_prompt, check_length, check_no_unknown, plain_prompt
from megatron_ibpo.data.tokenizer import Message, Tokenizer
from megatron_ibpo.records import Prompt
from megatron_ibpo.seeds import derive_seed

__all__ = ["RowSource", "read_jsonl"]

_KINDS: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "text or a list of messages": (str, list),
    "text or a number": (str, int, float),
    "an object": (dict,),
}


class RowSource:
    """Rows, over and over; for training in a new order every epoch.

    A row has a question (text, or chat messages ending with the user's), a label (text or number), and
    optionally `task` (text) and `metadata` (object). All are read and checked at once.
    """

    def __init__(
        self,
        rows: Iterable[tuple[str, dict[str, Any]]],
        tokenizer: Tokenizer,
        *,
        spec: str,
        input_key: str = "prompt",
        label_key: str = "label",
        apply_chat_template: bool = False,
        shuffle_seed: int | None = None,
        max_prompt_len: int | None = None,
    ):
        """
        Args:
            rows: each with where it is from, for messages.
            spec: of the source; its last part names the task where a row does not say.
            shuffle_seed: order of the epochs; None keeps that of the rows.
            max_prompt_len: tokens that a prompt may have.

        Raises:
            DataError: no rows, or one that cannot be used: says where and which field.
        """
        self._prompts: list[Prompt] = []
        for where, row in rows:
            try:
                prompt = _prompt(row, tokenizer, input_key, label_key, apply_chat_template, Path(spec).stem)
                check_no_unknown(prompt.token_ids, tokenizer)
                check_length(prompt.token_ids, max_prompt_len)
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
            self._prompts.append(prompt)
        if not self._prompts:
            raise DataError(f"{spec}: no prompts in it")
        self._shuffle_seed = shuffle_seed
        self._orders: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """Rows."""
        return len(self._prompts)

    def batch(self, step: int, n: int) -> list[Prompt]:
        """Prompts step·n to step·n + n - 1 of the endless stream."""
        return [self._at(position) for position in range(step * n, step * n + n)]

    def _at(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self._prompts))
        row = place if self._shuffle_seed is None else self._order(epoch)[place]
        return replace(self._prompts[row], index=position)

    def _order(self, epoch: int) -> list[int]:
        """Rows in the order of `epoch`; the last two epochs are kept, since a batch may span two."""
        if epoch not in self._orders:
            order = list(range(len(self._prompts)))
            random.Random(derive_seed("epoch", self._shuffle_seed or 0, epoch)).shuffle(order)
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: order}
        return self._orders[epoch]


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line, row) of every line that is not blank.

    Raises:
        DataError: file missing, or a line that is not a JSON object.
    """
    if not path.is_file():
        raise DataError(f"prompt file {path}: no such file{searched(path)}")
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
        yield where, row


def _prompt(
    row: dict[str, Any],
    tokenizer: Tokenizer,
    input_key: str,
    label_key: str,
    apply_chat_template: bool,
    task: str,
) -> Prompt:
    question = _field(row, input_key, "text or a list of messages", "--input-key")
    label = _field(row, label_key, "text or a number", "--label-key")
    messages = _messages(question, input_key)
    if apply_chat_template:
        token_ids, head_length = chat_prompt(messages, tokenizer)
    elif isinstance(question, list):
        raise DataError(f"field {input_key!r} has chat messages: add --apply-chat-template")
    else:
        token_ids, head_length = plain_prompt(question, tokenizer)
    return Prompt(
        index=0,
        token_ids=token_ids,
        head_length=head_length,
        label=str(label),
        task=_field({"task": task, **row}, "task", "text"),
        text=messages[-1]["content"],
        metadata=_field({"metadata": {}, **row}, "metadata", "an object"),
    )


def _field(row: dict[str, Any], key: str, kind: str, flag: str = "") -> Any:
    """row[key], which must be there, of one of the types of `kind` and not an empty text or list."""
    if key not in row:
        hint = f"; {flag} names another" if flag else ""
        raise DataError(f"no field {key!r} (found: {', '.join(map(repr, row)) or 'none'}){hint}")
    value = row[key]
    if not isinstance(value, _KINDS[kind]) or isinstance(value, bool):
        raise DataError(f"field {key!r} must be {kind}, found {type(value).__name__}")
    if isinstance(value, str | list) and not value:
        raise DataError(f"field {key!r} is empty")
    return value


def _messages(question: str | list[Any], input_key: str) -> list[Message]:
    if isinstance(question, str):
        return [{"role": "user", "content": question}]
    for number, message in enumerate(question):
        keys = ("role", "content")
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in keys):
            raise DataError(f"field {input_key!r}, message {number}: needs text under 'role' and 'content'")
    return question
