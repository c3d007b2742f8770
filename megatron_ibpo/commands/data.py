"""Show prompts as the model will see them, rendered with special tokens, and their lengths, duplicates, rows
left out with the reason, and bad rows by file and line.

    bash tools/ibpo.sh data --hf-checkpoint MODEL --prompt-data train.jsonl --apply-chat-template

The data flags are those of `train`.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import tyro
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from megatron_ibpo.basics.entry_point import command, parsed
from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.basics.text import counted
from megatron_ibpo.config import (
    Config,
    DataConfig,
    EnvironmentConfig,
    ModelConfig,
    RolloutConfig,
    as_specs,
    rm_type_in,
)
from megatron_ibpo.data import PassRates, Tokenizer, load_tokenizer, open_pass_rates
from megatron_ibpo.data.files import chosen_files, each_row
from megatron_ibpo.data.generated import SCHEME, generated_prompts
from megatron_ibpo.data.hub import local_model, local_source
from megatron_ibpo.data.row_prompts import (
    OWN_SCHEME,
    FirstPlaces,
    Reader,
    normalised,
    own_rows,
    unique_id,
)
from megatron_ibpo.data.sources import DUPLICATE, Tally, read_spec
from megatron_ibpo.data.tokenizer import DataError
from megatron_ibpo.models import ModelConfigError, read_hf_config
from megatron_ibpo.rewards import CHECKED_AT_START, label_problems, named_rm_types, open_pool

BINS = 10
_MOST_LABELS = 5
"""Labels that cannot be graded to show."""
_BAR = 40
"""Length of a histogram's longest bar, in characters."""


@dataclass
class _DataFlags(DataConfig):
    reward_part: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()


@dataclass
class _RolloutFlags(RolloutConfig):
    parameters: Annotated[dict[str, Any], tyro.conf.Fixed, tyro.conf.Suppress] = field(default_factory=dict)


@dataclass
class Arguments:
    hf_checkpoint: Path
    """The model, for its tokenizer: a directory or a model of the Hugging Face Hub."""
    data: tyro.conf.OmitArgPrefixes[_DataFlags] = field(default_factory=_DataFlags)
    rollout: tyro.conf.OmitArgPrefixes[_RolloutFlags] = field(default_factory=_RolloutFlags)
    """--rollout-max-context-len less --rollout-max-response-len is the longest prompt; without it, any
    length. The pass rates of --pass-rates are those of these settings."""
    environment: tyro.conf.OmitArgPrefixes[EnvironmentConfig] = field(default_factory=EnvironmentConfig)
    """--environment and --allowed-environments are those that rows may name."""
    split: Literal["train", "eval"] = "train"
    """Part of directories and generated tasks."""
    most_rows: int = 20_000
    """Rows of each source to inspect. 20,000 take some seconds."""
    show: int = 3
    """Prompts of each source to print."""
    json: bool = False
    """Print JSON, one line per source."""


def show_data(arguments: Arguments) -> None:
    data = arguments.data
    specs = data.prompt_data or tuple(held_out.spec for held_out in as_specs(data.eval_prompt_data))
    if not specs:
        raise ValueError("--prompt-data: required, what is to be shown")
    hf_dir = local_model(arguments.hf_checkpoint, weights=data.filter_pass_rate is not None)
    specs = tuple(map(local_source, specs))
    tokenizer = load_tokenizer(hf_dir, embedding_rows=embedding_rows(hf_dir))
    rates = open_pass_rates(Config(model=ModelConfig(hf_dir), data=data, rollout=arguments.rollout))
    context = arguments.rollout.rollout_max_context_len
    room = None if context is None else context - arguments.rollout.rollout_max_response_len
    for spec in specs:
        inspection = inspect_source(
            spec,
            tokenizer,
            data,
            split=arguments.split,
            max_prompt_len=room,
            most_rows=arguments.most_rows,
            show=arguments.show,
            rates=rates,
            environment=arguments.environment,
        )
        inspection.label_problems = problems_of_labels(inspection.to_check, data)
        if arguments.json:
            print(json.dumps(inspection.as_json(tokenizer), ensure_ascii=False))
        else:
            show_inspection(inspection, tokenizer, Console())


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


def histogram(lengths: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (the count in each bin, the edges of the bins); edges are whole numbers."""
    if not lengths:
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    low, high = min(lengths), max(lengths) + 1
    edges = np.unique(np.linspace(low, high, min(BINS, high - low) + 1).round().astype(np.int64))
    return np.histogram(lengths, edges)[0].astype(np.int64), edges


def show_inspection(inspection: Inspection, tokenizer: Tokenizer, console: Console) -> None:
    """Print the findings: what is left out, lengths, the first prompts."""
    and_more = "" if inspection.is_whole else ", and there are more"
    layout = f", {inspection.layout}" if inspection.layout else ""
    console.rule(escape(inspection.source))
    console.print(
        f"{counted(inspection.rows, 'row')} looked at{and_more}; {len(inspection.lengths):,} prompts{layout}",
        markup=False,
    )
    if inspection.tally.counts:
        console.print(_left_out(inspection.tally))
    for problem in inspection.label_problems[:_MOST_LABELS]:
        console.print(f"a run would refuse this label: {problem}", markup=False, style="red")
    if len(inspection.tasks) > 1:
        console.print(", ".join(f"{escape(task)} {count:,}" for task, count in inspection.tasks.items()))
    if inspection.lengths:
        console.print(_bars(inspection.lengths))
    for prompt in inspection.first:
        body = Text(tokenizer.decode_all(prompt.token_ids))
        body.append(f"\nlabel: {prompt.label}", style="bold")
        console.print(Panel(body, title=escape(prompt.task), title_align="left"))


def _left_out(tally: Tally) -> RichTable:
    table = RichTable("reason", "rows", "the first of them")
    for reason, count in tally.counts.items():
        table.add_row(reason, f"{count:,}", escape("\n".join(tally.named.get(reason, []))))
    return table


def _bars(lengths: Sequence[int]) -> RichTable:
    counts, edges = histogram(lengths)
    table = RichTable("tokens", "prompts", "")
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        table.add_row(f"{low}–{high - 1}", f"{count:,}", "█" * round(_BAR * count / counts.max()))
    return table


Entry = tuple[Callable[[], str], Prompt | None]
"""(function that returns a row's place, its prompt); the prompt is None if the row is left out."""


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


def embedding_rows(hf_dir: Path) -> int | None:
    """Return the size of the model's vocabulary; None for one that can be shown but not trained."""
    try:
        return read_hf_config(hf_dir).vocab_size
    except ModelConfigError:
        return None


def problems_of_labels(prompts: list[Prompt], data: DataConfig) -> list[str]:
    """Return the labels that a run would refuse. Prompts of files are not checked against the verifier of
    generated tasks, which is only the default."""
    graded = [
        prompt
        for prompt in prompts
        if rm_type_in(prompt.metadata, data) != DataConfig.rm_type or "source_dataset" in prompt.metadata
    ]
    if not graded:
        return []
    with open_pool(data, named_rm_types(graded, data)) as pool:
        return label_problems(pool, graded, data)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Show the prompts of each source."""
    show_data(parsed(Arguments, __doc__, argv, program="ibpo data"))


if __name__ == "__main__":
    sys.exit(main())
