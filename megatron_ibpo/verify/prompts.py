"""The run's data: what is left out, whether two readings agree, and whether prompts fit their context."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from megatron_ibpo.basics.records import Prompt
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
FEW_HELD_OUT = 128
MOST, PAIRS, SCANNED = 512, 64, 20_000
"""Prompts that are compared, those that are looked for in their file, and its rows that are searched."""


def check_data(subject: Subject) -> Iterator[Row]:
    """Read the run's own prompts here and in another process."""
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
    """The prompts are the same in a second reading, and in another process with another seed of Python's
    hashes, whichever is read first."""
    ours = [_digest(prompt) for prompt in prompts]
    readings = {
        "a second reading": digests(config, len(prompts)),
        "another process that reads from the end": _digests_elsewhere(config, len(prompts)),
    }
    faults = [
        f"prompt {i} is another in {where}"
        for where, theirs in readings.items()
        for i, (first, second) in enumerate(zip(ours, theirs, strict=True))
        if first != second
    ]
    faults += [f"prompt {i} has the index {p.index}" for i, p in enumerate(prompts) if p.index != i]
    reason = f"{len(prompts)} prompts have the same ids, labels and order in two processes"
    return counted_faults("data: two readings", faults, reason)


def digests(config: Config, count: int, *, from_the_end: bool = False) -> list[str]:
    """Return a digest of each of the run's first prompts, in order.

    Args:
        from_the_end: read the last of them first, since a prompt depends on its position alone.
    """
    source = open_run_data(config, read_foundation(config)).prompts
    assert source is not None  # checked by the caller
    if from_the_end:
        return [_digest(source.at(position)) for position in reversed(range(count))][::-1]
    return [_digest(prompt) for prompt in source.batch(0, count)]


def _digest(prompt: Prompt) -> str:
    content = (prompt.index, prompt.label, prompt.token_ids.tolist(), prompt.head_length, prompt.text,
               sorted(prompt.metadata.items()))  # fmt: skip
    return hashlib.sha256(repr(content).encode(errors="replace")).hexdigest()


def _digests_elsewhere(config: Config, count: int) -> list[str]:
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "11" if before != "11" else "12"
    try:
        with get_context("spawn").Pool(1) as pool:
            reading = pool.apply_async(digests, (config, count), {"from_the_end": True})
            return reading.get(READING_TIMEOUT_S)
    finally:
        os.environ.pop("PYTHONHASHSEED")
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before


def _rows(config: Config, source: PromptSource, prompts: Sequence[Prompt], held_out: int) -> Iterator[Row]:
    """Compare the prompts with the rows of their file: each has text and label of a row, and a row that is
    no prompt is counted."""
    spec, *others = [read_spec(spec) for spec in config.data.prompt_data]
    if others or "://" in spec.location:
        return
    keys = spec.input_key or config.data.input_key, spec.label_key or config.data.label_key
    columns = sorted(fields_read(*keys))
    num_rows, pairs = 0, [_Pair(prompt) for prompt in prompts[:PAIRS]]
    for _, read in each_row(chosen_files(Path(spec.location), "train", spec.split), columns):
        num_rows += 1
        if num_rows > SCANNED:
            continue
        with suppress(DataError):  # of a row that is left out and counted
            row = read()
            letters = _letters([row.get(column) for column in columns])
            for pair in pairs:
                pair.look_at(letters)
    yield _labels_row(pairs)
    if not (spec.only or config.data.deduplicate or config.data.filter_pass_rate):
        size, counted = source.num_prompts(), sum(sum(tally.counts.values()) for tally in source.tallies)
        there = size + counted + (held_out if config.holds_out else 0)
        yield measured(
            "data: rows", abs(num_rows - there), 0, "exact",
            f"{num_rows} rows, of which {size} are prompts, {counted} are counted as left out", "ibpo data",
        )  # fmt: skip


class _Pair:
    """A prompt's text and label, which are looked for in the rows of its file."""

    def __init__(self, prompt: Prompt):
        self.prompt, self.text, self.label = prompt, _letters(prompt.text), _letters(prompt.label)
        self.together = self.has_text = self.has_label = False

    def look_at(self, row: str) -> None:
        if not self.together:
            has_text, has_label = self.text in row, self.label in row
            self.has_text, self.has_label = self.has_text or has_text, self.has_label or has_label
            self.together = has_text and has_label


def _labels_row(pairs: Sequence[_Pair]) -> Row:
    there = [pair for pair in pairs if pair.has_text and pair.has_label]
    if not there:
        reason = "texts and labels of prompts are not in the file as they are"
        return Row("data: labels", "not checked", reason=reason)
    faults = [
        f"prompt {pair.prompt.index} has the label {pair.prompt.label[:60]!r} of another row"
        for pair in there
        if not pair.together
    ]
    return counted_faults("data: labels", faults, f"{len(there)} prompts have text and label of one row")


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
