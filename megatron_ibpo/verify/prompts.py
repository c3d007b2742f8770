"""The run's data: what is left out, whether two readings agree, and whether prompts fit their context."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.basics.rendezvous import variables_set
from megatron_ibpo.config import Config
from megatron_ibpo.data import PromptSource
from megatron_ibpo.data.files import chosen_files, each_row
from megatron_ibpo.data.layouts import fields_read
from megatron_ibpo.data.row_prompts import normalised
from megatron_ibpo.data.sources import read_spec
from megatron_ibpo.data.tokenizer import DataError
from megatron_ibpo.run.resolve import Foundation, read_foundation
from megatron_ibpo.run.run_data import open_run_data
from megatron_ibpo.verify.batch import Subject
from megatron_ibpo.verify.rows import NotCheckedError, Row, counted_faults, measured

READING_TIMEOUT_S = 300.0
MOST_HASH_SEED = 2**32 - 1
Result = TypeVar("Result")
FEW_HELD_OUT = 128
MOST, LABELLED, SCANNED = 512, 64, 20_000
"""Prompts that are compared, those that are looked for in their file, and its rows that are searched."""


def check_data(subject: Subject) -> Iterator[Row]:
    """Read the run's own prompts, here and in another process."""
    config = _with_few_held_out(subject.config)
    foundation = read_foundation(config)
    data = open_run_data(config, foundation)
    source = data.prompts
    if source is None:
        raise NotCheckedError("the run replays recorded rollouts and reads no prompts")
    size = source.num_prompts()
    count = min(MOST, size or MOST)
    prompts = source.batch(0, count)
    held_out = [p for eval_set in data.eval_sets for p in eval_set.prompts]
    yield _readings(prompts, config)
    yield from _rows(config, source, prompts, len(held_out))
    yield _left_out(source, size or count)
    yield _lengths(prompts, config, foundation)
    yield _epochs(source, size)
    yield _duplicates(prompts, held_out)


def _with_few_held_out(config: Config) -> Config:
    """Return the settings with fewer prompts for evaluation, unless they are taken from those of training."""
    few = config.run.eval_num_prompts if config.holds_out else min(config.run.eval_num_prompts, FEW_HELD_OUT)
    return replace(config, run=replace(config.run, eval_num_prompts=few))


def _readings(prompts: Sequence[Prompt], config: Config) -> Row:
    """The prompts are the same in another process, where Python's hashes have another seed."""
    theirs = with_other_hashes(digests, config, len(prompts))
    faults = [
        f"prompt {prompt.index} is another in a second reading"
        for prompt, digest in zip(prompts, theirs, strict=True)
        if _digest(prompt) != digest
    ]
    faults += [f"prompt {i} has the index {p.index}" for i, p in enumerate(prompts) if p.index != i]
    reason = f"{len(prompts)} prompts have the same ids, labels and order in two processes"
    return counted_faults("data: two readings", faults, reason)


def with_other_hashes(function: Callable[..., Result], *arguments: object) -> Result:
    """Return what a function returns in another process, where Python's hashes have another seed than here,
    even if the environment fixes that of this process."""
    seed = os.environ.get("PYTHONHASHSEED", "")
    other_seed = str(int(seed) + 1) if seed.isdigit() and int(seed) < MOST_HASH_SEED else "1"
    with variables_set({"PYTHONHASHSEED": other_seed}), get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function, arguments).get(READING_TIMEOUT_S)


def digests(config: Config, count: int) -> list[str]:
    """Return a digest of each of the run's first prompts, in order. The last is read first, since a prompt
    depends on its position alone."""
    source = open_run_data(config, read_foundation(config)).prompts
    assert source is not None  # checked by the caller
    return [_digest(source.at(position)) for position in reversed(range(count))][::-1]


def _digest(prompt: Prompt) -> str:
    content = (prompt.index, prompt.label, prompt.token_ids.tolist(), prompt.head_length, prompt.text,
               sorted(prompt.metadata.items()))  # fmt: skip
    return hashlib.sha256(repr(content).encode(errors="replace")).hexdigest()


def _rows(config: Config, source: PromptSource, prompts: Sequence[Prompt], held_out: int) -> Iterator[Row]:
    """Compare the prompts with the rows of their file: each has text and label of a row, and a row that is
    no prompt is counted."""
    spec, *further_specs = [read_spec(spec) for spec in config.data.prompt_data]
    if further_specs or "://" in spec.location:
        return
    keys = spec.input_key or config.data.input_key, spec.label_key or config.data.label_key
    columns = sorted(fields_read(*keys))
    num_rows, rows = 0, list[str]()
    for num_rows, (_, read) in enumerate(
        each_row(chosen_files(Path(spec.location), "train", spec.split), columns), start=1
    ):
        if num_rows <= SCANNED:
            with suppress(DataError):  # of a row that is left out and counted
                row = read()
                rows.append(_letters([row.get(column) for column in columns]))
    yield _labels_row(prompts[:LABELLED], rows)
    if not (spec.only or config.data.deduplicate or config.data.filter_pass_rate):
        size, left_out = source.num_prompts(), sum(sum(tally.counts.values()) for tally in source.tallies)
        accounted = size + left_out + (held_out if config.holds_out else 0)
        yield measured(
            "data: rows", abs(num_rows - accounted), 0, "exact",
            f"{num_rows} rows, of which {size} are prompts, {left_out} are counted as left out", "ibpo data",
        )  # fmt: skip


def _labels_row(prompts: Sequence[Prompt], rows: Sequence[str]) -> Row:
    """A prompt's label is in a row that has its text, if the rows have both."""
    faults, num_prompts = [], 0
    for prompt in prompts:
        text, label = _letters(prompt.text), _letters(prompt.label)
        with_text = [row for row in rows if text in row]
        if with_text and any(label in row for row in rows):
            num_prompts += 1
            if not any(label in row for row in with_text):
                faults.append(f"prompt {prompt.index} has the label {prompt.label[:60]!r} of another row")
    if not num_prompts:
        reason = "texts and labels of prompts are not in the file as they are"
        return Row("data: labels", "not checked", reason=reason)
    return counted_faults("data: labels", faults, f"{num_prompts} prompts have text and label of one row")


def _letters(value: object) -> str:
    """Return a value's letters and digits, which every way of writing it has."""
    return "".join(filter(str.isalnum, json.dumps(value, default=str)))


def _left_out(source: PromptSource, size: int) -> Row:
    reasons = Counter[str]()
    for tally in source.tallies:
        reasons.update(tally.counts)
    total = sum(reasons.values())
    named = ", ".join(f"{reason}: {count}" for reason, count in reasons.items()) or "nothing is left out"
    share = total / max(1, total + size)
    return measured("data: left out", share, 0.5, "half of all rows", f"share of rows; {named}", "ibpo data")


def _lengths(prompts: Sequence[Prompt], config: Config, foundation: Foundation) -> Row:
    room = foundation.max_context - config.rollout.rollout_max_response_len
    longest = max(len(prompt.token_ids) for prompt in prompts)
    empty = sum(len(prompt.token_ids) == 0 for prompt in prompts)
    return measured(
        "data: lengths", float("inf") if empty else longest, room,
        "--rollout-max-context-len less --rollout-max-response-len",
        f"tokens of the longest of {len(prompts)} prompts; {empty} are empty", "--drop-long-prompts",
    )  # fmt: skip


def _epochs(source: PromptSource, size: int) -> Row:
    """A second pass has every prompt once, in whatever order."""
    if not 0 < size <= MOST:
        reason = "the prompts never repeat" if not size else f"{size:,} prompts: an epoch is not read through"
        return Row("data: epochs", "not checked", reason=reason)
    first, second = (Counter(p.text + "\0" + p.label for p in source.batch(i, size)) for i in range(2))
    faults = [f"{(first - second).total()} prompts are missing in the second"] if first != second else []
    return counted_faults("data: epochs", faults, f"two passes have the same {size} prompts")


def _duplicates(prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> Row:
    texts = Counter(normalised(prompt.text) for prompt in prompts)
    twice = len(prompts) - len(texts)
    shared = sum(normalised(prompt.text) in texts for prompt in held_out)
    return measured(
        "data: duplicates", shared, len(held_out) / 2,
        "half of them: generated tasks repeat their easiest prompts",
        f"of {len(held_out)} held-out prompts are trained on; {twice} of {len(prompts)} prompts are "
        "duplicates", "ibpo data, --deduplicate",
    )  # fmt: skip
