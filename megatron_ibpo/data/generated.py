"""Prompts generated without end by reasoning_gym, from a URL such as

    reasoning_gym://chain_sum?min_terms=5&max_terms=7&min_digits=1&max_digits=1&compact=1

Parameters are those of the task's own configuration, but for `seed` and `size`, which follow from
--data-seed, and for our `compact=1`, which drops the spaces of an arithmetic expression.
"""

import dataclasses
import hashlib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from urllib.parse import parse_qsl

from megatron_ibpo.config import DataConfig, nearest
from megatron_ibpo.data.prompts import PromptSource, chat_prompt, check_prompt, plain_prompt
from megatron_ibpo.data.tokenizer import DataError, Tokenizer
from megatron_ibpo.records import Prompt
from megatron_ibpo.seeds import derive_seed
from megatron_ibpo.strict_json import read_json

SCHEME = "reasoning_gym://"

_ITEM_SEEDS = 2**32
"""An item is made from its own seed below this; numpy, which some tasks use, takes no larger one."""
_MADE_AHEAD = {"acre": 2**14, "gsm_symbolic": 2**14, "list_functions": 2**14, "word_ladder": 2**14}
"""Tasks that prepare or forbid large sizes when they are opened, and the number of items to give them."""
_MOST_ATTEMPTS = 1000
_CHECKED_AT_START = 64
FIRST_ITEM_S = 10.0
"""Seconds that the first item may take; usual ones take milliseconds."""


def generated_prompts(
    spec: str,
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    split: Literal["train", "eval"],
    max_prompt_len: int | None,
) -> PromptSource:
    """An endless stream of one task's items, each a function of the seed and its position alone.

    Training and evaluation never share a question, whatever their seeds: a question belongs to one of them
    by a hash of its text, and an item that falls on the other side is drawn again. The held-out items are
    the same for every data seed.

    Raises:
        DataError: unknown task or parameter, a value the task refuses, a task with too few different
            questions, or (seen on the first items) prompts that do not fit the tokenizer or context.
    """
    name, parameters, compact = _parse_task(spec)
    with _time_limit(spec):
        dataset = _dataset(name, parameters)
    seed = data.data_seed if split == "train" else 0

    def item_at(index: int) -> dict[str, Any]:
        """The first of the draws for `index` whose question belongs to this split."""
        size = min(_ITEM_SEEDS, dataset.size)
        for attempt in range(_MOST_ATTEMPTS):
            item = dataset[derive_seed("item", split, seed, index, attempt) % size]
            if _held_out(item["question"]) == (split == "eval"):
                return item
        raise DataError(
            f"{spec}: no {split} question in {_MOST_ATTEMPTS} draws; the task has too few different "
            "questions to hold some out: widen its parameters"
        )

    def prompt_at(index: int) -> Prompt:
        item = item_at(index)
        text = item["question"]
        if compact:
            text = _without_spaces(text, item["metadata"].get("expression"), spec)
        if data.apply_chat_template:
            token_ids, head_length = chat_prompt([{"role": "user", "content": text}], tokenizer)
        else:
            token_ids, head_length = plain_prompt(text, tokenizer, tail="\n")
        try:
            check_prompt(token_ids, tokenizer, max_prompt_len)
        except DataError as error:
            raise DataError(f"{spec}, item {index}: {error}") from error
        metadata = {**item["metadata"], "question": item["question"], "parameters": parameters}
        return Prompt(index, token_ids, head_length, str(item["answer"]), name, text, metadata)

    source = PromptSource(prompt_at)
    with _time_limit(spec):
        source.at(0)
    source.batch(0, _CHECKED_AT_START)
    return source


@contextmanager
def _time_limit(spec: str) -> Iterator[None]:
    """Refuse parameters with which one item takes forever, such as min_terms=99999999. By an alarm, which
    only the main thread has: it also ends the work."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(*_: object) -> None:
        raise DataError(
            f"{spec}: one item was not made within {FIRST_ITEM_S:g} s; make its parameters smaller"
        )

    before = signal.signal(signal.SIGALRM, give_up)
    others = signal.setitimer(signal.ITIMER_REAL, FIRST_ITEM_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *others)


def _parse_task(spec: str) -> tuple[str, dict[str, Any], bool]:
    """(name, the task's own parameters, compact) of a `reasoning_gym://` URL.

    Raises:
        DataError: unknown task or parameter (with the nearest), or a value of the wrong type.
    """
    from reasoning_gym.factory import DATASETS

    name, _, query = spec.removeprefix(SCHEME).partition("?")
    if name not in DATASETS:
        raise DataError(f"{spec}: reasoning_gym has no task {name!r}{nearest(name, DATASETS)}")
    fields = {field.name: field for field in dataclasses.fields(DATASETS[name][1])}
    try:
        given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError as error:
        raise DataError(f"{spec}: parameters must read name=value&name=value ({error})") from error
    compact = given.pop("compact", "0")
    if compact not in ("0", "1"):
        raise DataError(f"{spec}: compact must be 0 or 1, not {compact!r}")
    parameters = {}
    for key, text in given.items():
        if key in ("seed", "size"):
            raise DataError(f"{spec}: {key} cannot be given: items are drawn endlessly by --data-seed")
        if key not in fields:
            raise DataError(f"{spec}: {name} has no parameter {key!r}{nearest(key, fields)}")
        parameters[key] = _value(text, fields[key], spec)
    return name, parameters, compact == "1"


def _dataset(name: str, parameters: dict[str, Any]) -> Any:
    """The reasoning_gym dataset that makes and scores a task's items.

    Raises:
        DataError: the task refuses the parameters.
    """
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(
            name, seed=0, size=_MADE_AHEAD.get(name, _ITEM_SEEDS), **parameters
        )
    except DataError:
        raise  # it took too long
    except (AssertionError, TypeError, ValueError, OverflowError, IndexError, KeyError) as error:
        raise DataError(f"{SCHEME}{name}: it refuses the parameters {parameters}: {error}") from error


def _value(text: str, field: dataclasses.Field[Any], spec: str) -> Any:
    """A parameter's text as JSON where it is that and as text otherwise; of its default's type."""
    try:
        value = read_json(text)
    except ValueError:
        value = text
    if value is text and text.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        raise DataError(f"{spec}: {field.name} must be a finite number, not {text!r}")
    default = field.default
    if isinstance(default, bool):
        if value in (0, 1):
            return bool(value)
    elif isinstance(default, float):
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif isinstance(default, str):
        return text
    elif not isinstance(default, int) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise DataError(f"{spec}: {field.name} must be of type {type(default).__name__}, not {text!r}")


def _without_spaces(question: str, expression: str | None, spec: str) -> str:
    """`…problem: 4 - 1 + 7 =` as `…problem: 4-1+7=`."""
    start = -1 if expression is None else question.find(expression)
    if start < 0:
        raise DataError(f"{spec}: compact=1 needs a task whose items are expressions, such as chain_sum")
    return question[:start] + question[start:].replace(" ", "")


def _held_out(question: str) -> bool:
    return hashlib.blake2b(question.encode(), digest_size=1).digest()[0] < 128
