"""Inspection of a source: prompts as the policy will see them, and what is left out and why."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.config import DataConfig, EnvironmentConfig
from megatron_ibpo.data.files import chosen_files, each_row
from megatron_ibpo.data.generated import SCHEME, generated_prompts
from megatron_ibpo.data.pass_rates import PassRates
from megatron_ibpo.data.row_prompts import OWN_SCHEME, FirstPlaces, Reader, normalised, own_rows, unique_id
from megatron_ibpo.data.sources import DUPLICATE, Tally, read_spec
from megatron_ibpo.data.tokenizer import DataError, Tokenizer
from megatron_ibpo.rewards import CHECKED_AT_START

BINS = 10
Entry = tuple[Callable[[], str], Prompt | None]
"""(function that returns a row's place, its prompt); the prompt is None if the row is left out."""


@dataclass
class Inspection:
    """The findings in one source."""

    source: str
    rows: int = 0
    """Number of rows inspected."""
    is_whole: bool = False
    """True if these are all rows."""
    layout: str | None = None
    """The recognised layout of its rows; None: plain fields."""
    tally: Tally = field(default_factory=lambda: Tally(""))
    lengths: list[int] = field(default_factory=list)
    """Tokens of each prompt in use."""
    tasks: dict[str, int] = field(default_factory=dict)
    """Task → its number of prompts."""
    first: list[Prompt] = field(default_factory=list)
    to_check: list[Prompt] = field(default_factory=list)
    """The first prompts, as many as a run checks the labels of."""
    label_problems: list[str] = field(default_factory=list)
    """Labels of these that their verifier cannot grade."""

    def as_json(self, tokenizer: Tokenizer) -> dict[str, object]:
        """Return the findings as JSON, for programs."""
        counts, edges = histogram(self.lengths)
        return {
            "source": self.source,
            "rows": self.rows,
            "is_whole": self.is_whole,
            "layout": self.layout or "plain",
            "prompts": len(self.lengths),
            "left_out": dict(self.tally.counts),
            "named": self.tally.named,
            "label_problems": self.label_problems,
            "tasks": self.tasks,
            "tokens": {"counts": counts.tolist(), "edges": edges.tolist()},
            "first": [
                {"prompt": tokenizer.decode_all(prompt.token_ids), "label": prompt.label, "task": prompt.task}
                for prompt in self.first
            ],
        }


def histogram(lengths: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (the count in each bin, the edges of the bins); edges are whole numbers."""
    if not lengths:
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    low, high = min(lengths), max(lengths) + 1
    edges = np.unique(np.linspace(low, high, min(BINS, high - low) + 1).round().astype(np.int64))
    return np.histogram(lengths, edges)[0].astype(np.int64), edges


def inspect_source(
    spec: str,
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    split: Literal["train", "eval"],
    max_prompt_len: int | None,
    most_rows: int,
    show: int,
    rates: PassRates | None = None,
    environment: EnvironmentConfig | None = None,
) -> Inspection:
    """Inspect the first `most_rows` rows of a source. Errors that would end a run are counted instead.

    Args:
        split: part of a directory or generated task.
        show: number of prompts to keep for printing.
        environment: names the environments that rows may name; None: none.

    Raises:
        DataError: the source as a whole cannot be read.
    """
    source = read_spec(spec)
    data = replace(data, skip_bad_rows=True, drop_long_prompts=True)
    tally, settings = Tally(source.location), environment or EnvironmentConfig()
    reader = Reader(tokenizer, data, source, tally, max_prompt_len, rates, environment=settings, split=split)
    inspection = Inspection(source.location, tally=reader.tally)
    entries = _read(reader, inspection)
    seen_questions: set[str] = set()
    for row_location, prompt in itertools.islice(entries, most_rows):
        inspection.rows += 1
        if prompt is None:
            continue
        if (question := normalised(prompt.text)) in seen_questions:
            reason = DUPLICATE if data.deduplicate else f"{DUPLICATE}, which stay without --deduplicate"
            inspection.tally.add(reason, (DUPLICATE, inspection.rows), row_location)
            if data.deduplicate:
                continue
        seen_questions.add(question)
        inspection.lengths.append(len(prompt.token_ids))
        inspection.tasks[prompt.task] = inspection.tasks.get(prompt.task, 0) + 1
        if len(inspection.to_check) < CHECKED_AT_START:
            inspection.to_check.append(replace(prompt, index=inspection.rows - 1))
        if len(inspection.first) < show:
            inspection.first.append(prompt)
    inspection.is_whole = not source.location.startswith(SCHEME) and next(entries, None) is None
    return inspection


def _read(reader: Reader, inspection: Inspection) -> Iterator[Entry]:
    location, split = reader.source.location, reader.split
    if location.startswith(SCHEME):
        source = generated_prompts(reader)
        yield from ((partial("item {}".format, index), source.at(index)) for index in itertools.count())
    if location.startswith(OWN_SCHEME):
        rows = own_rows(location, split)
    else:
        rows = each_row(chosen_files(Path(location), split, reader.source.split), reader.columns)
    ids: FirstPlaces = {}
    for number, (row_location, read) in enumerate(rows):
        if number == 0:
            with suppress(DataError):
                inspection.layout = reader.layout(read())
        yield row_location, reader.prompt(number, row_location, unique_id(read, row_location, ids))
