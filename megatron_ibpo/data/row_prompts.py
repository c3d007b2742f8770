"""Prompts made from rows of files, or from rows that a user's function returns."""

import gzip
import json
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import starmap
from pathlib import Path
from typing import Any, Literal

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.basics.text import shown
from megatron_ibpo.basics.user_files import RECORD_BYTES, check_user_file
from megatron_ibpo.config import (
    ConfigError,
    DataConfig,
    EnvironmentConfig,
    environment_in,
    load_hook,
    rm_type_in,
    searched,
)
from megatron_ibpo.data.layouts import (
    check_placeholders,
    fields_read,
    has_value,
    layout_said,
    plain_row,
)
from megatron_ibpo.data.pass_rates import PassRates
from megatron_ibpo.data.prompts import (
    PromptSource,
    TooLongError,
    chat_prompt,
    check_prompt,
    check_size,
    plain_prompt,
)
from megatron_ibpo.data.sources import (
    BAD_ROW,
    DUPLICATE,
    HELD_OUT,
    NOT_CHOSEN,
    TOO_LONG,
    Division,
    SourceSpec,
    Tally,
)
from megatron_ibpo.data.tables import LONGEST_LINE, Row, check_encoding, num_brackets, parsed_row, shuffled
from megatron_ibpo.data.tokenizer import DataError, Message, Tokenizer

OWN_SCHEME = "import://"
"""URL scheme of rows from a user's function: `import://package.module:function`."""
LARGEST_COMPRESSED = 256 * 1024**2
"""Limit on the decompressed bytes of a source that is read whole."""
MOST_LINES = 2**18
"""Limit on its lines, blank ones included."""
MOST_BRACKETS = 2**23
"""Limit on its opening brackets: each may become a list of 64 bytes, and a million take a second."""

FirstPlaces = dict[str, Callable[[], str]]
"""Id → function that returns the place of the first row with it."""
LazyRow = tuple[Callable[[], str], Callable[[], Row]]
"""(function that returns a row's place, for messages; function that returns the row, or raises DataError)."""


@dataclass(frozen=True)
class Reader:
    """A maker of prompts from the rows of one source; it drops the rows that are to be left out."""

    tokenizer: Tokenizer
    data: DataConfig
    source: SourceSpec
    tally: Tally
    max_prompt_len: int | None
    rates: PassRates | None = None
    division: Division | None = None
    """Leaves out what is held out for evaluation; None: nothing is, or was before."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Names the environments that rows may name."""
    checks_names: bool = True
    """Refuse a row that names a verifier or an environment that is not allowed. False for rows that are drawn
    during a run: their responses then have no reward, and the run goes on."""
    split: Literal["train", "eval"] = "train"
    """Training prompts come in an order drawn by `data.data_seed`, those of evaluation in the source's."""

    @property
    def input_key(self) -> str:
        return self.source.input_key or self.data.input_key

    @property
    def label_key(self) -> str:
        return self.source.label_key or self.data.label_key

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of a table that prompts may need."""
        chosen = () if self.source.only is None else (self.source.only[0].partition(".")[0],)
        return (*sorted(fields_read(self.input_key, self.label_key)), *chosen)

    def layout(self, row: Row) -> str | None:
        """Return the line to print about the layout of a row; None for plain fields."""
        return layout_said(row, self.input_key, self.label_key)

    def question(self, row: Row) -> str:
        """Return the text by which the row's question is compared. Raises DataError if it has none, or if the
        row is not chosen by only=."""
        if self.source.only is not None and not has_value(row, *self.source.only):
            raise DataError(NOT_CHOSEN)
        return normalised(plain_row(row, self.input_key, self.label_key).messages[-1]["content"])

    def prompt(self, key: Hashable, location: Callable[[], str], read: Callable[[], Row]) -> Prompt | None:
        """Return the prompt of a row, with `index` 0; None if the row is left out, which is counted.

        Args:
            key: identifies the row, so that it is counted once.
            location: returns the row's file and line, for messages.
            read: returns the row, or raises DataError.

        Raises:
            DataError: a row that cannot be used, without --skip-bad-rows; with its place.
        """
        try:
            row = read()
            if self.source.only is not None and not has_value(row, *self.source.only):
                self.tally.add(NOT_CHOSEN, key, location)
                return None
            if self.division is not None and self.division.holds_out(self.question(row)):
                self.tally.add(HELD_OUT, key, location)
                return None
            prompt = self.of_row(row)
        except DataError as error:
            is_long = isinstance(error, TooLongError)
            if not (self.data.drop_long_prompts if is_long else self.data.skip_bad_rows):
                raise DataError(f"{location()}: {error}") from error
            fault = str(error)
            self.tally.add(TOO_LONG if is_long else BAD_ROW, key, lambda: f"{location()}: {fault}")
            return None
        refusal = None if self.rates is None else self.rates.refusal(prompt)
        if refusal is not None:
            self.tally.add(refusal, key, location)
            return None
        return prompt

    def of_row(self, row: Row) -> Prompt:
        """Return the prompt of a row, with `index` 0. Raises DataError if the row cannot be used."""
        plain, data = plain_row(row, self.input_key, self.label_key), self.data
        messages = self.with_context(plain.messages)
        check_size(sum(len(message["content"]) for message in messages), self.max_prompt_len)
        if data.apply_chat_template:
            token_ids, head_length = chat_prompt(messages, self.tokenizer, template_settings(data))
        elif plain.is_chat:
            raise DataError(f"field {plain.input_key!r} has chat messages: add --apply-chat-template")
        else:
            token_ids, head_length = plain_prompt(messages[-1]["content"], self.tokenizer)
        metadata = plain.metadata
        if self.checks_names:
            try:
                rm_type_in(metadata, data)
                environment_in(metadata, self.environment)
            except ConfigError as error:
                raise DataError(str(error)) from None
        if self.source.rm_type is not None:
            metadata = {"rm_type": self.source.rm_type, **metadata}
        rm_type = metadata.get("rm_type", data.rm_type)
        verifiers = data.reward_weights if rm_type == "composite" else (rm_type,)
        if plain.has_list_of_numbers and "math" in verifiers:
            raise DataError(
                f"the label {shown(plain.label)} is a list of numbers, which may be several accepted answers "
                "or one answer that is a list or an interval; write a list of texts for the former, and one "
                "text for the latter"
            )
        check_prompt(token_ids, self.tokenizer, self.max_prompt_len)
        task = plain.task or self.source.task or Path(self.source.location).stem
        return Prompt(0, token_ids, head_length, plain.label, task, messages[-1]["content"], metadata)

    def with_context(self, messages: Iterable[Message]) -> list[Message]:
        """Return the messages with the source's suffix, and with the system prompt if they have none. Raises
        DataError if a part of the question is no text."""
        chat = list(messages)
        check_placeholders(chat, self.input_key)
        if self.source.suffix:
            chat[-1] = {**chat[-1], "content": chat[-1]["content"] + self.source.suffix}
        return with_system_prompt(chat, self.data)


def with_system_prompt(messages: list[Message], data: DataConfig) -> list[Message]:
    """Return the chat with --system-prompt before it, unless it has a system message of its own."""
    if data.system_prompt is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": data.system_prompt}, *messages]


def template_settings(data: DataConfig) -> dict[str, Any]:
    """Return --apply-chat-template-kwargs."""
    return json.loads(data.apply_chat_template_kwargs or "{}")


def prompts_of_rows(
    rows: Iterable[tuple[str, Row]],
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    spec: str,
    max_prompt_len: int | None,
) -> PromptSource:
    """Return `read_prompts` of the rows of a source without settings, in their own order.

    Args:
        rows: each with its place, for messages.
        spec: the source; its last part names the task of rows without one.
        max_prompt_len: tokens that a prompt may have.
    """
    reader = Reader(tokenizer, data, SourceSpec(spec), Tally(spec), max_prompt_len, split="eval")
    return read_prompts(starmap(lazy_row, rows), reader)


def read_prompts(rows: Iterable[LazyRow], reader: Reader) -> PromptSource:
    """Return the rows as an endless source; those of training are shuffled anew in every epoch. All are read
    and checked at once.

    A row has a question (text, or chat messages ending with the user's), a label (text or number), and
    optionally `task` (text), `metadata` (object), `rm_type` (text) and `id` (text or number), which no two
    rows may share; or it has the layout of existing RL data sets.

    Raises:
        DataError: no rows, or one that cannot be used: names the place and the field.
    """
    source, data = reader.source, reader.data
    prompts: list[Prompt] = []
    ids: FirstPlaces = {}
    questions: set[str] = set()
    layouts: set[str | None] = set()

    def with_its_layout(read: Callable[[], Row]) -> Row:
        row = read()
        layouts.add(reader.layout(row))
        return row

    for number, (place, read) in enumerate(rows, start=1):
        prompt = reader.prompt(number, place, unique_id(partial(with_its_layout, read), place, ids))
        if prompt is None:
            continue
        if data.deduplicate and (question := normalised(prompt.text)) in questions:
            reader.tally.add(DUPLICATE, number, place)
            continue
        if data.deduplicate:
            questions.add(question)
        prompts.append(prompt)
    if not prompts:
        reasons = "; ".join(reader.tally.lines())
        remaining = f" that are left ({reasons})" if reasons else ""
        raise DataError(f"{source.location}: no prompts in it{remaining}")

    @lru_cache(maxsize=2)  # a batch may span two epochs
    def order(epoch: int) -> list[int]:
        return shuffled(len(prompts), "epoch", data.data_seed, epoch)

    def prompt_at(position: int) -> Prompt:
        epoch, place = divmod(position, len(prompts))
        return replace(prompts[order(epoch)[place] if reader.split == "train" else place], index=position)

    notes = layout_notes(source, layouts) + tuple(reader.tally.lines())
    return PromptSource(prompt_at, len(prompts), notes=notes, tallies=(reader.tally,))


def layout_notes(source: SourceSpec, layouts: Iterable[str | None]) -> tuple[str, ...]:
    """Return the lines to print about the layouts that rows have."""
    return tuple(f"{source.location}: {layout}" for layout in sorted(filter(None, layouts)))


def normalised(question: str) -> str:
    """Return the text by which questions are compared."""
    return " ".join(question.split())


def lazy_row(place: str, row: Any) -> LazyRow:
    """Return a row that is there already as a lazy one."""

    def read() -> Row:
        if not isinstance(row, dict):
            raise DataError(f"expected a dictionary, found {type(row).__name__}")
        return row

    return lambda: place, read


def unique_id(read: Callable[[], Row], location: Callable[[], str], ids: FirstPlaces) -> Callable[[], Row]:
    """Return a function that reads the row and raises DataError if an earlier one of the source has its
    id."""

    def checked() -> Row:
        row = read()
        if (row_id := row.get("id")) is not None:
            first = ids.setdefault(json.dumps(row_id, default=str), location)
            if first is not location:
                raise DataError(f"id {row_id!r} is also that of {first()}")
        return row

    return checked


@dataclass
class Budget:
    """Limits on the files of one source that is read whole: an honest start takes a minute for it,
    and a small compressed file cannot make it hours, or fill the memory."""

    lines: int = MOST_LINES
    content_bytes: int = LARGEST_COMPRESSED
    brackets: int = MOST_BRACKETS

    def spend(self, path: Path, content: bytes, lines: int = 0) -> None:
        """Count what was read. Raises DataError if it is too much."""
        self.lines -= lines
        self.content_bytes -= len(content)
        self.brackets -= num_brackets(content)
        if self.lines < 0:
            too_many = f"more than {MOST_LINES:,} lines, blank ones included"
        elif self.content_bytes < 0:
            too_many = f"more than {LARGEST_COMPRESSED // 1024**2} MiB of content"
        elif self.brackets < 0:
            too_many = f"more than {MOST_BRACKETS:,} brackets"
        else:
            return
        unpack = "; `gunzip` it, since large files are then read in parts" if path.suffix == ".gz" else ""
        raise DataError(f"{path}: {too_many}, in files that are read whole{unpack}")


def read_jsonl(path: Path, budget: Budget | None = None) -> Iterator[LazyRow]:
    """Yield the row of every line that is not blank. The file is read line by line; if its name ends in .gz,
    it is a compressed one.

    Args:
        budget: shared by the files of a source; None: the file's own.

    Raises:
        DataError: file missing or in another encoding, damaged, or over the budget.
    """
    for number, line in enumerate(_lines(path, budget or Budget()), start=1):
        if number == 1:
            check_encoding(path, line)
        if line.strip():
            yield partial("{}, line {}".format, path, number), partial(_row_of, line)


def _lines(path: Path, budget: Budget) -> Iterator[bytes]:
    """Yield the lines of a file; of one that is too long, only the beginning. Raises as `read_jsonl` does."""
    if not path.is_file():
        raise DataError(f"prompt file {path}: no such file{searched(path)}")
    check_user_file(path, RECORD_BYTES)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while line := file.readline(LONGEST_LINE + 1):
                budget.spend(path, line, lines=1)
                yield line
                while len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                    line = file.readline(LONGEST_LINE + 1)
                    budget.spend(path, line)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path}: damaged or cut off: {error}") from error


def _row_of(line: bytes) -> Row:
    if len(line) > LONGEST_LINE:
        raise DataError(f"the line is longer than {LONGEST_LINE // 1024**2} MiB")
    return parsed_row(line)


def own_rows(spec: str, split: str) -> Iterator[LazyRow]:
    """Yield everything that function(split) returns; rows are as in a JSONL file. Raises ValueError if the
    function cannot be loaded, and DataError if it raises."""
    function = load_hook("--prompt-data", spec.removeprefix(OWN_SCHEME))
    try:
        rows = list(function(split))
    except Exception as error:
        raise DataError(f"{spec}: it raised {type(error).__name__}: {error}") from error
    for number, row in enumerate(rows):
        yield lazy_row(f"{spec}, {split} row {number}", row)
