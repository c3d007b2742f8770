"""Prompts generated without end by reasoning_gym, from a URL such as

    reasoning_gym://chain_sum?min_terms=5&max_terms=7&min_digits=1&max_digits=1&compact=1

Parameters are those of the task's own configuration, except `seed` and `size`, which follow from --data-seed.
Three are added: `compact=1` drops the spaces of an arithmetic expression, `level=2` takes the parameters of
that level of the task's own curriculum, and `level=0..4&over=20000` goes through the levels in equal parts of
the first 20,000 prompts and stays at the last.
"""

import dataclasses
import hashlib
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any
from urllib.parse import parse_qsl

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.config import nearest
from megatron_ibpo.data.prompts import PromptSource, TooLongError, chat_prompt, check_prompt, plain_prompt
from megatron_ibpo.data.row_prompts import Reader, template_settings, with_system_prompt
from megatron_ibpo.data.sources import TOO_LONG, Tally
from megatron_ibpo.data.tokenizer import DataError
from megatron_ibpo.rewards.limits import time_limit
from megatron_ibpo.rewards.sandbox.judges import import_library

SCHEME = "reasoning_gym://"

_ITEM_SEEDS = 2**32
"""Exclusive upper bound of item seeds: numpy, which some tasks use, takes no larger seed."""
_MADE_AHEAD = {"acre": 2**14, "gsm_symbolic": 2**14, "list_functions": 2**14, "word_ladder": 2**14}
"""Tasks that prepare or forbid large sizes when they are opened, and the number of items to give them."""
_MOST_ATTEMPTS = 1000
_CHECKED_AT_START = 64
CHECK_S = 1.0
"""Seconds after which no further item is checked at the start; later items are checked when they are drawn.
Some tasks take a second per item."""
TOLD_AFTER_S = 1.5
"""Seconds of waiting for a task after which the user is told."""
ITEM_S = 10.0
"""Seconds that an item may take; usual ones take milliseconds."""
AGAIN_S = 0.5
"""Seconds after which a task that caught the exception of the time limit is stopped again."""


@dataclass(frozen=True)
class _Task:
    """The content of a URL."""

    name: str
    parameters: dict[str, Any]
    """Values of the task's own parameters."""
    compact: bool
    levels: range | None
    """Levels of its curriculum; None: its parameters alone define it."""
    over: int
    """Number of positions over which training climbs the levels."""

    def level(self, index: int, split: str) -> int | None:
        """Return the level at a position: training climbs, and held-out items go through all levels in
        turn."""
        if self.levels is None:
            return None
        count = len(self.levels)
        step = index % count if split == "eval" else min(index * count // self.over, count - 1)
        return self.levels[step]


def generated_prompts(reader: Reader) -> PromptSource:
    """Return an endless stream of one task's items, each a function of the seed and its position alone.

    Training and evaluation never share a question, whatever their seeds: a hash of a question's text assigns
    it to one of them, and an item of the other split is drawn again. The held-out items are the same for
    every data seed.

    Raises:
        DataError: unknown task, parameter or level, a value the task refuses, a task with too few different
            questions, or (seen on the first items) prompts that do not fit the tokenizer or context.
    """
    source, data, tokenizer, spec = reader.source, reader.data, reader.tokenizer, reader.source.location
    task, split = _parse_task(spec), reader.split
    seed = data.data_seed if split == "train" else 0
    tally = Tally(spec)

    @cache
    def dataset(level: int | None) -> tuple[Any, dict[str, Any]]:
        """Return the dataset of a level, and its parameters."""
        parameters = {**_of_level(task.name, level, spec), **task.parameters}
        return _dataset(task.name, parameters), parameters

    def prompt_of(index: int, attempt: int) -> Prompt | None:
        """Return the prompt of a draw for `index`; None if its question belongs to the other split."""
        items, parameters = dataset(task.level(index, split))
        try:
            item = items[derive_seed("item", split, seed, index, attempt) % min(_ITEM_SEEDS, items.size)]
        except Exception as error:  # the task's own code raises it for parameters that contradict each other
            raise DataError(f"the task makes none: {type(error).__name__}: {error}") from error
        if _held_out(item["question"]) != (split == "eval"):
            return None
        text = item["question"]
        if task.compact:
            text = _without_spaces(text, item["metadata"].get("expression"), spec)
        text += source.suffix
        if data.apply_chat_template:
            messages = with_system_prompt([{"role": "user", "content": text}], data)
            token_ids, head_length = chat_prompt(messages, tokenizer, template_settings(data))
        else:
            token_ids, head_length = plain_prompt(text, tokenizer, tail="\n")
        check_prompt(token_ids, tokenizer, reader.max_prompt_len)
        metadata = {**item["metadata"], "question": item["question"], "parameters": parameters}
        if source.rm_type is not None:
            metadata["rm_type"] = source.rm_type
        name = source.task or task.name
        return Prompt(index, token_ids, head_length, str(item["answer"]), name, text, metadata)

    @lru_cache(maxsize=_CHECKED_AT_START)
    def prompt_at(index: int) -> Prompt:
        """Return the first usable draw for `index`."""
        # refuses parameters that make one item take forever, such as min_terms=99999999
        too_slow = f"{spec}: an item was not made within {ITEM_S:g} s; make its parameters smaller"
        with time_limit(signal.ITIMER_REAL, ITEM_S, DataError(too_slow), AGAIN_S):
            return first_usable(index)

    def first_usable(index: int) -> Prompt:
        for attempt in range(_MOST_ATTEMPTS):
            try:
                prompt = prompt_of(index, attempt)
            except TooLongError as error:
                if not data.drop_long_prompts:
                    raise DataError(f"{spec}, item {index}: {error}") from error
                tally.add(TOO_LONG, (index, attempt), lambda: f"item {index}")
                continue
            except DataError as error:
                raise DataError(f"{spec}, item {index}: {error}") from error
            if prompt is not None:
                return prompt
        raise DataError(
            f"{spec}: no {split} question in {_MOST_ATTEMPTS} draws; the task has too few different "
            "questions to hold some out"
            + (", or too long ones" if tally.counts else "")
            + ": change its parameters"
        )

    with warn_if_slow(f"{spec}: the task prepares its items"):
        prompt_at(0)
        started, ready = time.monotonic(), 1
        while ready < _CHECKED_AT_START and time.monotonic() - started <= CHECK_S:
            prompt_at(ready)
            ready += 1
    notes: tuple[str, ...] = ()
    if reader.rates is not None:
        notes = (f"{spec}: --filter-pass-rate has no effect on it, since its prompts never repeat",)
    return PromptSource(prompt_at, notes=notes, tallies=(tally,), ready=ready, grows=data.drop_long_prompts)


@contextmanager
def warn_if_slow(message: str) -> Iterator[None]:
    """Print what the run waits for if it takes more than a moment: some tasks make all their items at
    once."""
    timer = threading.Timer(TOLD_AFTER_S, print, [message], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _parse_task(spec: str) -> _Task:
    """Return the task that a `reasoning_gym://` URL names."""
    import_library()
    from reasoning_gym.factory import DATASETS

    name, _, query = spec.removeprefix(SCHEME).partition("?")
    if name not in DATASETS:
        raise DataError(f"{spec}: reasoning_gym has no task {name!r}{nearest(name, DATASETS)}")
    fields = {field.name: field for field in dataclasses.fields(DATASETS[name][1])}
    try:
        settings = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError as error:
        raise DataError(f"{spec}: parameters must read name=value&name=value ({error})") from error
    compact = settings.pop("compact", "0")
    if compact not in ("0", "1"):
        raise DataError(f"{spec}: compact must be 0 or 1, not {compact!r}")
    levels, over = _levels(settings.pop("level", None), settings.pop("over", None), spec)
    parameters = {}
    for key, text in settings.items():
        if key in ("seed", "size"):
            raise DataError(f"{spec}: {key} cannot be given: items are drawn endlessly by --data-seed")
        if key not in fields:
            raise DataError(f"{spec}: {name} has no parameter {key!r}{nearest(key, fields)}")
        parameters[key] = _value(text, fields[key], spec)
    task = _Task(name, parameters, compact == "1", levels, over)
    for level in levels or ():
        _of_level(name, level, spec)
    return task


def _levels(level: str | None, over: str | None, spec: str) -> tuple[range | None, int]:
    """Return the levels of level=2 or level=0..4, and the positions of over=20000."""
    if level is None:
        if over is not None:
            raise DataError(f"{spec}: over=N needs level=FIRST..LAST")
        return None, 1
    match = re.fullmatch(r"(\d{1,3})(?:\.\.(\d{1,3}))?", level)
    if match is None:
        raise DataError(f"{spec}: level must be a number or FIRST..LAST, is {level!r}")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise DataError(f"{spec}: level {level}: the first is above the last")
    if (over is not None) != (match[2] is not None) or not re.fullmatch(r"[1-9]\d{0,12}", over or "1"):
        raise DataError(
            f"{spec}: level=FIRST..LAST needs over=N, the prompts that it takes, and only it does"
        )
    return range(first, last + 1), int(over or 1)


def _of_level(name: str, level: int | None, spec: str) -> dict[str, Any]:
    """Return the parameters of a level of the task's own curriculum that differ from the task's defaults."""
    if level is None:
        return {}
    from reasoning_gym.factory import create_curriculum, has_curriculum

    if not has_curriculum(name):
        raise DataError(
            f"{spec}: reasoning_gym has no curriculum for {name}; give parameters instead of level"
        )
    curriculum = create_curriculum(name)
    highest = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=1) - 1
    if level > highest:
        raise DataError(f"{spec}: level {level}: the highest level of {name} is {highest}")
    try:
        curriculum.set_global_level(level)
        config = curriculum.generate_configuration()
    except Exception as error:
        raise DataError(f"{spec}: its curriculum makes no level {level}: {error}") from error
    plain = type(config)()
    return {
        field.name: value
        for field in dataclasses.fields(config)
        if field.name not in ("seed", "size")
        and (value := getattr(config, field.name)) != getattr(plain, field.name)
    }


def _dataset(name: str, parameters: dict[str, Any]) -> Any:
    """Return the reasoning_gym dataset that makes and scores a task's items."""
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(
            name, seed=0, size=_MADE_AHEAD.get(name, _ITEM_SEEDS), **parameters
        )
    except (AssertionError, TypeError, ValueError, OverflowError, IndexError, KeyError) as error:
        raise DataError(f"{SCHEME}{name}: it refuses the parameters {parameters}: {error}") from error


def _value(text: str, field: dataclasses.Field[Any], spec: str) -> Any:
    """Return a parameter's text parsed as JSON, else as text; it must have the type of the default."""
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
    """Return `…problem: 4 - 1 + 7 =` as `…problem: 4-1+7=`."""
    start = -1 if expression is None else question.find(expression)
    if start < 0:
        raise DataError(f"{spec}: compact=1 needs a task whose items are expressions, such as chain_sum")
    return question[:start] + question[start:].replace(" ", "")


def _held_out(question: str) -> bool:
    return hashlib.blake2b(question.encode(), digest_size=1).digest()[0] < 128
