"""Show prompts as the model will see them, rendered with special tokens, and their lengths, duplicates, rows
left out with the reason, and bad rows by file and line.

    bash tools/ibpo.sh data --hf-checkpoint MODEL --prompt-data train.jsonl --apply-chat-template

The data flags are those of `train`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

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
from megatron_ibpo.data import Tokenizer, load_tokenizer, open_pass_rates
from megatron_ibpo.data.hub import local_model, local_source
from megatron_ibpo.data.inspection import Inspection, histogram, inspect_source
from megatron_ibpo.data.sources import Tally
from megatron_ibpo.models import ModelConfigError, read_hf_config
from megatron_ibpo.rewards import label_problems, named_rm_types, open_pool

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
