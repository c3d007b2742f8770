"""The run's data: what is left out, whether two readings agree, and whether prompts fit their context."""

import hashlib
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
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

MOST = 512
"""Prompts that are compared."""
FEW = 64
"""Prompts that another process reads."""
READ_S = 300.0
"""Seconds that it may take."""


def check_data(subject: Subject) -> Iterator[Row]:
    """Read the run's own prompts twice."""
    config = subject.config
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
    yield counted_faults(
        "data: two readings",
        _unstable(prompts, other),
        f"{count} prompts have the same ids, labels and order",
    )
    yield _other_process(config, prompts[:FEW])
    yield _counted_rows(config, source)
    yield _left_out(source, size or count)
    yield _lengths(prompts, config, foundation)
    yield _epochs(source, size)
    yield _duplicates(prompts, [p for own in data.eval_sets for p in own.prompts[:MOST]])


def _unstable(prompts: Sequence[Prompt], other: Sequence[Prompt]) -> list[str]:
    return [
        f"prompt {i} differs"
        for i, (a, b) in enumerate(zip(prompts, other, strict=True))
        if not np.array_equal(a.token_ids, b.token_ids)
        or (a.index, a.label, a.head_length, a.text, a.metadata)
        != (b.index, b.label, b.head_length, b.text, b.metadata)
        or a.index != i
    ]


def _other_process(config: Config, prompts: Sequence[Prompt]) -> Row:
    """A process whose `hash` has another seed, as every node's has, reads the same."""
    program = f"from {__name__} import print_digests; print_digests({len(prompts)})"
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    done = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(config), stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONHASHSEED": seed}, timeout=READ_S, check=True,
    )  # fmt: skip
    digests = done.stdout.decode().split()[-len(prompts) :]
    faults = [
        f"prompt {prompt.index} differs"
        for prompt, own in zip(prompts, digests, strict=True)
        if own != _digest(prompt)
    ]
    return counted_faults("data: another process", faults, f"it reads the same {len(prompts)} prompts")


def print_digests(count: int) -> None:
    """Print digests of the first prompts of the configuration that comes pickled."""
    config = pickle.load(sys.stdin.buffer)
    source = open_run_data(config, read_foundation(config)).prompts
    assert source is not None
    print(*[_digest(prompt) for prompt in source.batch(0, count)])


def _digest(prompt: Prompt) -> str:
    content = prompt.token_ids.tobytes() + f"{prompt.label}\0{prompt.index}".encode()
    return hashlib.sha256(content).hexdigest()


def _counted_rows(config: Config, source: PromptSource) -> Row:
    """Every row of a file is a prompt, or left out for a reason that is counted."""
    spec = read_spec(config.data.prompt_data[0])
    if "://" in spec.location or len(config.data.prompt_data) > 1 or config.holds_out or source.grows:
        reason = "rows are counted of one file alone that is read whole and not divided for evaluation"
        return Row("data: rows", "not checked", reason=reason)
    rows = sum(1 for _ in each_row(chosen_files(Path(spec.location), "train", spec.split), ()))
    left_out = sum(sum(tally.counts.values()) for tally in source.tallies)
    missing = rows - source.num_prompts() - left_out
    faults = [f"{missing} rows are neither"] * (missing != 0)
    return counted_faults(
        "data: rows", faults, f"of {rows} rows, {source.num_prompts()} are prompts and {left_out} left out"
    )


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
