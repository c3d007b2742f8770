"""Prompts from rows: a JSONL file, one object per line, or what a function of the user's own gives."""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_ibpo.config import DataConfig, load_hook, searched
from megatron_ibpo.data.prompts import PromptSource, chat_prompt, check_prompt, check_size, plain_prompt
from megatron_ibpo.data.tokenizer import DataError, Message, Tokenizer
from megatron_ibpo.records import Prompt
from megatron_ibpo.seeds import derive_seed
from megatron_ibpo.strict_json import read_json
from megatron_ibpo.words import listed

OWN_SCHEME = "import://"
"""Starts the URL of rows that a function of the user's own gives: `import://package.module:function`."""

_KINDS: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "text or a list of messages": (str, list),
    "text or a number": (str, int, float),
    "an object": (dict,),
}


def prompts_of_rows(
    rows: Iterable[tuple[str, dict[str, Any]]],
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    spec: str,
    shuffled: bool,
    max_prompt_len: int | None,
) -> PromptSource:
    """Rows, over and over; shuffled in a new order every epoch. All are read and checked at once.

    A row has a question (text, or chat messages ending with the user's), a label (text or number), and
    optionally `task` (text) and `metadata` (object).

    Args:
        rows: each with where it is from, for messages.
        spec: of the source; its last part names the task where a row does not say.
        max_prompt_len: tokens that a prompt may have.

    Raises:
        DataError: no rows, or one that cannot be used: says where and which field.
    """
    prompts: list[Prompt] = []
    for where, row in rows:
        try:
            prompt = _prompt(row, tokenizer, data, Path(spec).stem, max_prompt_len)
            check_prompt(prompt.token_ids, tokenizer, max_prompt_len)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{spec}: no prompts in it")

    @lru_cache(maxsize=2)  # a batch may span two epochs
    def order(epoch: int) -> list[int]:
        drawn = list(range(len(prompts)))
        random.Random(derive_seed("epoch", data.data_seed, epoch)).shuffle(drawn)
        return drawn

    def prompt_at(position: int) -> Prompt:
        epoch, place = divmod(position, len(prompts))
        return replace(prompts[order(epoch)[place] if shuffled else place], index=position)

    return PromptSource(prompt_at, len(prompts))


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
            row = read_json(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
        yield where, row


def own_rows(spec: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(which one, row) of all that function(split) gives; rows as in a JSONL file.

    Raises:
        ValueError: it cannot be loaded; DataError: it raises, or gives other than dictionaries.
    """
    function = load_hook("--prompt-data", spec.removeprefix(OWN_SCHEME))
    try:
        rows = list(function(split))
    except Exception as error:
        raise DataError(f"{spec}: it raised {type(error).__name__}: {error}") from error
    for number, row in enumerate(rows):
        where = f"{spec}, {split} row {number}"
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected a dictionary, found {type(row).__name__}")
        yield where, row


def _prompt(
    row: dict[str, Any], tokenizer: Tokenizer, data: DataConfig, task: str, max_prompt_len: int | None
) -> Prompt:
    question = _field(row, data.input_key, "text or a list of messages", "--input-key")
    label = _field(row, data.label_key, "text or a number", "--label-key")
    messages = _messages(question, data.input_key)
    check_size(sum(len(message["content"]) for message in messages), max_prompt_len)
    if data.apply_chat_template:
        token_ids, head_length = chat_prompt(messages, tokenizer)
    elif isinstance(question, list):
        raise DataError(f"field {data.input_key!r} has chat messages: add --apply-chat-template")
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
        found = listed([repr(name)[:60] for name in row], most=20)
        raise DataError(f"no field {key!r} (found: {found or 'none'}){hint}")
    value = row[key]
    if not isinstance(value, _KINDS[kind]) or isinstance(value, bool):
        raise DataError(f"field {key!r} must be {kind}, found {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"field {key!r} must be {kind}, is {value}")
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
