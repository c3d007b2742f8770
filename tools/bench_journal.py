"""What the journal costs a step: appending every sample, then closing the batch, which waits for the disk.

    python tools/bench_journal.py --directory runs --save tools/results/bench_journal.json

Samples are made before the clock starts. The directory should lie on the disk that a run's would.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.records import Sample
from megatron_ibpo.basics.versions import machine
from megatron_ibpo.journal import ClosedBatch, ClosedGroup, Journal, SampleKey, read_journal


@dataclass
class Arguments:
    directory: Path = Path(".")
    """Where the journals are written; they are deleted again."""
    save: Path | None = None
    """JSON file for the results."""


@dataclass
class Step:
    """The size of one."""

    name: str
    groups: int
    responses: int
    """Per group."""
    corrections: int
    """Per group."""
    tokens: int
    prompt_tokens: int
    steps: int
    """How many are measured."""


STEPS = [
    Step("the default run", 32, 8, 3, tokens=60, prompt_tokens=80, steps=20),
    Step("long responses", 512, 8, 0, tokens=16_384, prompt_tokens=1024, steps=2),
]


@dataclass
class Row:
    step: str
    samples: int
    mb: float
    sampled_ms: float
    """All samples of a step, median over the steps."""
    closed_ms: float
    """Waiting for the disk included; median."""
    closed_most_ms: float
    sampled_mb_per_s: float
    read_ms: float
    """Reading one step back."""


def make_sample(draw: np.random.Generator, tokens: int, prompt_tokens: int) -> Sample:
    return Sample(
        prompt_token_ids=draw.integers(0, 150_000, prompt_tokens, dtype=np.int32),
        token_ids=draw.integers(0, 150_000, tokens, dtype=np.int32),
        logprobs=draw.random(tokens, dtype=np.float32),
        finish_reason="stop",
        temperature=1.0,
        versions=((0, 0),),
        loss_mask=np.ones(tokens, bool),
        reward=1.0,
    )


def measure(step: Step, directory: Path) -> Row:
    """Appends the same samples in every step, as those of other prompts."""
    draw = np.random.default_rng(0)
    sizes = ClosedGroup(0, 0, step.responses, step.corrections, 0)
    samples = [make_sample(draw, step.tokens, step.prompt_tokens) for _ in sizes.sample_keys() * step.groups]
    sampled, closed = [], []
    with Journal(directory, 0, "", 0) as journal:
        for number in range(1, step.steps + 1):
            prompts = range(number * step.groups, (number + 1) * step.groups)
            groups = tuple(sizes._replace(prompt_index=prompt) for prompt in prompts)
            keys: list[SampleKey] = [key for group in groups for key in group.sample_keys()]
            start = time.perf_counter()
            for key, sample in zip(keys, samples, strict=True):
                journal.sampled(key, sample)
            sampled.append(time.perf_counter() - start)
            start = time.perf_counter()
            journal.closed(ClosedBatch(number, groups))
            closed.append(time.perf_counter() - start)
            size = journal.pending_bytes
            if number < step.steps:
                journal.saved(number)
    start = time.perf_counter()
    assert len(read_journal(directory, step.steps - 1).samples) == len(samples)
    read = time.perf_counter() - start
    median = statistics.median(sampled)
    return Row(
        step.name,
        len(samples),
        mb=size / 1e6,
        sampled_ms=median * 1e3,
        closed_ms=statistics.median(closed) * 1e3,
        closed_most_ms=max(closed) * 1e3,
        sampled_mb_per_s=size / 1e6 / median,
        read_ms=read * 1e3,
    )


def main(arguments: Arguments) -> None:
    rows = []
    for step in STEPS:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            rows.append(asdict(measure(step, Path(directory))))
        print(
            {name: round(value, 1) if isinstance(value, float) else value for name, value in rows[-1].items()}
        )
    if arguments.save is not None:
        content = {"machine": machine("msgpack"), "rows": rows}
        arguments.save.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
