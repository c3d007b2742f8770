"""The run's data: what is left out, whether two readings agree, and whether prompts fit their context."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.config import Config
from megatron_ibpo.data import PromptSource
from megatron_ibpo.data.files import chosen_files, each_row
from megatron_ibpo.data.row_prompts import normalised
from megatron_ibpo.data.sources import read_spec
from megatron_ibpo.run.resolve import Foundation, read_foundation
from megatron_ibpo.run.run_data import open_run_data
from megatron_ibpo.verify.batch import Subject
from megatron_ibpo.verify.rows import NotCheckedError, Row, counted_faults, measured

READING_TIMEOUT_S = 300.0
FEW_HELD_OUT = 128
MOST = 512
"""Prompts that are compared."""


def check_data(subject: Subject) -> Iterator[Row]:
    """Read the run's own prompts twice."""
    config = _with_few_held_out(subject.config)
    foundation = read_foundation(config)
    data, again = (open_run_data(config, foundation) for _ in range(2))
    source, second = data.prompts, again.prompts
    if source is None or second is None:
        raise NotCheckedError("the run replays recorded rollouts and reads no prompts")
    size = source.num_prompts()
    count = min(MOST, size or MOST)
    prompts = source.batch(0, count)
    # read from the end, so that a prompt depends on its position alone
    other = [second.at(position) for position in reversed(range(count))][::-1]
    faults = _unstable(prompts, other)
    if _digest(prompts) != _digest_elsewhere(config, count):
        faults.append("another process reads other prompts, or in another order")
    yield counted_faults(
        "data: two readings", faults, f"{count} prompts have the same ids, labels and order in two processes"
    )
    yield from _rows(config, source, size, sum(len(own.prompts) for own in data.eval_sets))
    yield _left_out(source, size or count)
    yield _lengths(prompts, config, foundation)
    yield _epochs(source, size)
    yield _duplicates(prompts, [p for own in data.eval_sets for p in own.prompts[:MOST]])


def _with_few_held_out(config: Config) -> Config:
    """Return the settings with fewer prompts for evaluation, unless they are taken from those of training."""
    few = config.run.eval_num_prompts if config.holds_out else min(config.run.eval_num_prompts, FEW_HELD_OUT)
    return replace(config, run=replace(config.run, eval_num_prompts=few))


def _unstable(prompts: Sequence[Prompt], other: Sequence[Prompt]) -> list[str]:
    return [
        f"prompt {i} differs"
        for i, (a, b) in enumerate(zip(prompts, other, strict=True))
        if not np.array_equal(a.token_ids, b.token_ids)
        or (a.index, a.label, a.head_length, a.text, a.metadata)
        != (b.index, b.label, b.head_length, b.text, b.metadata)
        or a.index != i
    ]


def _digest(prompts: Sequence[Prompt]) -> str:
    content = "".join(f"{p.index} {p.label!r} {p.token_ids.tolist()} {p.head_length}" for p in prompts)
    return hashlib.sha256(content.encode(errors="replace")).hexdigest()


def digest_of(config: Config, count: int) -> str:
    """Return the digest of the run's first prompts."""
    source = open_run_data(config, read_foundation(config)).prompts
    return "" if source is None else _digest(source.batch(0, count))


def _digest_elsewhere(config: Config, count: int) -> str:
    """Return `digest_of` in a new process with another seed of Python's hashes."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "11" if before != "11" else "12"
    try:
        with get_context("spawn").Pool(1) as pool:
            digest: str = pool.apply_async(digest_of, (config, count)).get(READING_TIMEOUT_S)
            return digest
    finally:
        os.environ.pop("PYTHONHASHSEED")
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before


def _rows(config: Config, source: PromptSource, size: int, held_out: int) -> Iterator[Row]:
    """Compare the prompts with the rows of their file: what is missing must be counted."""
    specs = [read_spec(spec) for spec in config.data.prompt_data]
    is_file = len(specs) == 1 and "://" not in specs[0].location and not specs[0].only
    if not is_file or config.data.deduplicate or config.data.filter_pass_rate:
        return
    files = chosen_files(Path(specs[0].location), "train", specs[0].split)
    rows = sum(1 for _ in each_row(files, ()))
    counted = sum(sum(tally.counts.values()) for tally in source.tallies)
    there = size + counted + (held_out if config.holds_out else 0)
    yield measured(
        "data: rows", abs(rows - there), 0, "exact",
        f"{rows} rows, of which {size} are prompts, {counted} are counted as left out", "ibpo data",
    )  # fmt: skip


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
    labels = [Counter(p.text + "\0" + p.label for p in source.batch(epoch, size)) for epoch in range(2)]
    faults = [f"{(labels[0] - labels[1]).total()} prompts are missing in the second"] * (
        labels[0] != labels[1]
    )
    return counted_faults("data: epochs", faults, f"two passes have the same {size} prompts")


def _duplicates(prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> Row:
    texts = Counter(normalised(prompt.text) for prompt in prompts)
    twice = sum(count - 1 for count in texts.values())
    shared = [p.text[:60] for p in held_out if normalised(p.text) in texts]
    reason = (
        f"{twice} of {len(prompts)} prompts are duplicates; {len(held_out)} held-out prompts, none trained on"
    )
    if held_out and len(shared) < len(held_out) / 2:  # generated tasks repeat their easiest prompts
        return Row("data: duplicates", "right", len(shared), len(held_out) / 2, "half of them",
                   reason.replace("none", f"{len(shared)}"))  # fmt: skip
    return counted_faults("data: duplicates", shared, reason)
